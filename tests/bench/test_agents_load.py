"""The agents' sessions: shapes out of traces and conversations, and prompts of their sizes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import agents
import agents_load
import pytest
from agents_load import SCALE, Load, Size, Turn

TEXTS = (
    {"system": list(range(1000, 1400)), "answer": list(range(2000, 2400)), "result": list(range(3000, 3400))},
    {"system": [1], "answer": [2], "result": [3], "message": [4]},
)
SIZE = Size(sessions=4, requests=3, longest=1000, spread_s=5.0)
CODING = [
    [
        Turn(0, 9600 + 160 * number, 320, 0.0, False),
        Turn(9600, 11200, 160, 8.0, True),
        # Cut back: most of the prompt before is thrown away.
        Turn(1600, 4800, 16, 60.0, False),
    ]
    for number in range(6)
]
TAU = [
    [Turn(0, 1600 + n, 32, 0.0, False), Turn(1600 + n, 1920, 32, 4.0, True), Turn(1920, 2400, 8, 2.0, True)]
    for n in (0, 64)
]


@pytest.fixture
def load() -> Load:
    return Load(SIZE, CODING, TAU, TEXTS, 7)


def test_prompts_and_gaps_are_a_part_of_the_recorded_ones(load: Load):
    coding = [session for session in load.sessions if session.name.startswith("coding")]
    assert [len(r.prompt) for r in coding[0].requests[1:]] == [11200 // SCALE, 4800 // SCALE]
    assert [r.gap_s for r in coding[0].requests] == [0.0, 8.0 / SCALE, 60.0 / SCALE]
    assert [r.max_tokens for r in coding[0].requests] == [20, 10, 1]
    assert (len(coding), len(load.sessions)) == (3, 4)


def test_a_prompt_goes_on_from_what_is_kept_of_the_one_before_and_from_nothing_else(load: Load):
    first, second, third = (request.prompt for request in load.sessions[0].requests)
    assert second[: 9600 // SCALE] == first[: 9600 // SCALE]
    assert third[:100] == second[:100]
    assert third[100] == TEXTS[1]["answer"][0]
    assert [request.new for request in load.sessions[0].requests] == [len(first), 100, 200]


def test_coding_sessions_share_nothing_and_conversations_their_policy():
    load = Load(SIZE._replace(sessions=8), CODING, TAU, TEXTS, 7)
    coding, tau = ([s for s in load.sessions if s.name.startswith(kind)] for kind in ("coding", "tau"))
    assert len({tuple(session.requests[0].prompt[:8]) for session in coding}) == len(coding) == 6
    one, other = (session.requests[0] for session in tau)
    policy = int(100 * 0.9)
    assert one.prompt[:policy] == other.prompt[:policy]
    assert one.prompt[policy : policy + 8] != other.prompt[policy : policy + 8]
    assert (one.new, other.new) == (len(one.prompt), len(other.prompt) - policy)


def test_the_working_set_counts_blocks_that_are_shared_once():
    load = Load(SIZE._replace(sessions=8), CODING, TAU, TEXTS, 7)
    whole = sum(len(session.requests[-1].prompt) // 10 * 10 for session in load.sessions)
    assert load.working_set(10) == whole - 90


def test_the_same_seed_makes_the_same_load(load: Load):
    again, other = Load(SIZE, CODING, TAU, TEXTS, 7), Load(SIZE, CODING, TAU, TEXTS, 8)
    assert again.sessions == load.sessions
    assert other.sessions != load.sessions
    assert all(0 <= session.start_s <= SIZE.spread_s for session in load.sessions)


def test_sessions_that_are_too_long_or_too_short_are_left_out():
    long, short = [Turn(0, 17000, 1, 0.0, False)] * 3, [Turn(0, 8000, 1, 0.0, False)] * 2
    with pytest.raises(SystemExit, match="no coding session has 3 requests of at most 1000 tokens"):
        Load(SIZE, [long, short], TAU, TEXTS, 7)


def test_a_trace_says_how_much_of_a_prompt_is_kept(tmp_path: Path):
    calls = [
        {"in": 9000, "out": 50, "stop": "tool_use", "hash_runs": [[1, 140]]},
        {"in": 9100, "out": 0, "stop": "end_turn", "think_time": 7.0, "hash_runs": [[1, 140], [200, 2]]},
        {"in": 100, "out": 5, "hash_runs": []},
        {"in": 6500, "out": 9, "think_time": 4000.0, "hash_runs": [[1, 90], [300, 11]]},
    ]
    (tmp_path / "other.jsonl").write_text(json.dumps({"requests": "none"}) + "\n")
    body = json.dumps({"block_size": 64, "requests": calls}) + "\n"
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(body.encode()))
    assert agents_load.coding_shapes(tmp_path) == [
        [
            Turn(0, 9000, 50, 0.0, False),
            Turn(140 * 64, 9100, 1, 7.0, True),
            Turn(90 * 64, 6500, 9, agents_load.GAP_MAX_S, False),
        ]
    ]


def test_a_conversation_is_a_request_before_each_answer():
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": "x" * 10} for role in roles]
    turns = agents_load.conversation_shape(
        messages, lambda message: len(message["content"]), lambda is_tool: 3.0 if is_tool else 50.0
    )
    assert turns == [
        Turn(0, 20, 10, 0.0, False),
        Turn(20, 40, 10, 3.0, True),
        Turn(40, 60, 10, 50.0, False),
    ]


def test_what_comes_with_the_benchmark_makes_a_load_of_every_size(tmp_path: Path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for mode in (agents.SMOKE, agents.QUICK, agents.FULL):
        load = agents_load.load_of(mode.size, tmp_path, None, 20)
        assert len(load.sessions) == mode.size.sessions
        # What SmolLM2 takes.
        assert load.longest <= 8192
        # Engines recompute, or there is nothing to measure.
        assert load.new_tokens < load.prompt_tokens / 2
    excerpt = json.loads(agents_load.EXCERPT.read_text())
    assert (excerpt["licence"], len(excerpt["sessions"])) == ("Apache-2.0", 24)
