"""Traps are what they say, hits are counted as an engine counts them, and what is told of it holds."""

from __future__ import annotations

import asyncio
import json
import random

import prompt_hits
import prompt_load
import prompt_peers
import prompt_report
import prompt_traps
import prompt_ttft
import pytest

from workmem.prompt.dialects.chat import CHAT

SEED = 20


def test_each_trap_is_named_first_at_its_place_and_nothing_is_said_of_a_healthy_append():
    rows = prompt_peers.ours(prompt_traps.traps(SEED), CHAT)
    assert len(rows) == 14
    assert [row["trap"] for row in rows if not row["named"]] == []
    assert rows[0]["trap"] == prompt_traps.CONTROL
    assert rows[0]["said"] == []


@pytest.mark.parametrize("seed", [1, 2])
def test_a_trap_that_is_lossless_has_the_same_json_and_any_other_has_not(seed):
    """Apart from what the rules leave out on purpose: a line for billing, and the names of calls."""
    ours_alone = {
        "billing line in front",
        "another id of a call",
        "tools in another order",
        "`required` in another order",
    }
    for trap in prompt_traps.traps(seed):
        plain = prompt_traps.continued(trap.before)
        same = _meaning(plain) == _meaning(trap.after)
        assert same == (trap.is_lossless and trap.name not in ours_alone), trap.name


def _meaning(body):
    body = json.loads(json.dumps(body))
    for message in body["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return body


def test_a_request_hits_whole_blocks_that_an_earlier_one_had_short_of_its_last_token():
    cache = prompt_hits.BlockCache()
    assert cache.ask(range(40)) == 0
    assert cache.ask(range(40)) == 32
    # All of it is known, and the last block has the token that has to be computed.
    assert cache.ask(range(32)) == 16
    assert cache.ask([*range(20), 7, 8, *range(22, 60)]) == 16
    assert cache.ask([1, *range(1, 40)]) == 0
    assert cache.ask([]) == 0


def test_requests_of_which_only_digests_were_recorded_keep_what_they_share(tmp_path):
    def shape(*digests):
        content = [{"type": "text", "text": {"sha256": digest, "chars": 900}} for digest in digests]
        return {
            "path": "/v1/messages?beta=true",
            "body_shape": {"model": "m", "messages": [{"role": "user", "content": content}]},
        }

    (tmp_path / "one.jsonl").write_text(
        "\n".join(json.dumps(shape(*names)) for names in (["aa"], ["aa", "bb"]))
    )
    ((first, second),) = prompt_hits.recorded(tmp_path)["one"]
    texts = [part["text"] for part in second.body["messages"][0]["content"]]
    assert [len(text) for text in texts] == [900, 900]
    assert texts[0] == first.body["messages"][0]["content"][0]["text"] != texts[1]


def test_a_peer_has_noticed_what_it_does_not_say_of_the_control_and_named_what_its_words_tell():
    found = prompt_traps.traps(SEED)[:3]
    said = [[["CL010", ""]], [["CL010", ""], ["CL001", "messages[0]"]], [["CL010", ""]]]
    control, billing, order = prompt_peers.judged("promptcachelint", found, said)
    assert (control["noticed"], control["named"]) == (True, False)
    assert (billing["noticed"], billing["named"]) == (True, False)
    assert (order["noticed"], order["named"]) == (False, False)
    (named,) = prompt_peers.judged("prefixguard", found[2:], [[]]) or [None]
    assert named["named"] is False
    rows = prompt_peers.judged("prefixguard", found, [[], [], [["TOOL_REORDER", "tools[0]"]]])
    assert [row["named"] for row in rows] == [True, False, True]


def test_every_word_of_a_peer_is_about_a_trap_that_there_is():
    names = {trap.name for trap in prompt_traps.traps(SEED)}
    for words in prompt_peers.NAMING.values():
        for about in words.values():
            assert about <= names


def test_shuffled_keys_are_the_same_json_in_another_order():
    body = prompt_traps.body_of(SEED)
    mixed = prompt_traps.keys_shuffled(body, random.Random(1))
    assert mixed == body
    assert json.dumps(mixed) != json.dumps(body)


def test_what_a_gateway_adds_is_taken_request_by_request():
    arms = (prompt_load.DIRECT, prompt_load.OFF, prompt_load.ON, prompt_load.SHUFFLED)
    pairs = [
        {"ms": dict(zip(arms, (slow, slow + 1, slow + 1.5, slow + 6), strict=True))}
        for slow in (1.0, 30.0, 2.0)
    ]
    found = prompt_load.summed_latency(pairs)
    assert found[prompt_load.ON]["added_ms"]["p95"] == pytest.approx(1.5)
    assert found[prompt_load.ON]["meets_aim"]
    assert not found[prompt_load.SHUFFLED]["meets_aim"]
    assert "added_ms" not in found[prompt_load.DIRECT]


def test_a_body_of_75_kb_has_about_that():
    size = len(json.dumps(prompt_load.body_of_size(SEED)))
    assert prompt_load.BODY_BYTES <= size < prompt_load.BODY_BYTES + 4000


def test_streams_and_answers_of_the_mock_are_whole_and_one_that_is_not_is_told():
    load = prompt_load.Load(1, 3, 5, 0.01, 0.1, 1, 2)
    body = json.dumps(prompt_traps.body_of(SEED, tools=2) | {"stream": True}).encode()

    async def run():
        async with prompt_load.mock() as port:
            whole = await prompt_load._stream(port, body, "x-chunks: 5\r\nx-gap-s: 0.01\r\n", load)
            short = await prompt_load._stream(port, body, "x-chunks: 4\r\n", load)
            rate = await prompt_load._rate(port, body.replace(b'"stream": true', b'"stream": false'), load)
            return whole, short, rate

    whole, short, rate = asyncio.run(run())
    assert isinstance(whole, float)
    assert short == "not whole: 4 of 5 pieces"
    assert rate["per_s"] > 0
    assert rate["failed"] == 0


def test_ratios_of_time_are_of_the_same_turn_of_the_same_pair():
    def sample(arm, turn, ttft_s, cached):
        return {"arm": arm, "turn": turn, "ttft_s": ttft_s, "prompt_tokens": 100, "cached_tokens": cached}

    pairs = [
        {
            "samples": [
                sample(prompt_ttft.SAME, 0, slow, 96),
                sample(prompt_ttft.SHUFFLED, 0, slow, 96),
                sample(prompt_ttft.WITHOUT, 0, 9 * slow, 16),
            ]
        }
        for slow in (1.0, 5.0, 2.0)
    ]
    found = prompt_ttft.summed(pairs)
    assert found["shuffled_of_same"]["ratio"] == pytest.approx(1.0)
    assert found["meets_aim"]
    assert found["without_of_same"]["ratio"] == pytest.approx(9.0)
    assert found["share"][prompt_ttft.WITHOUT] == pytest.approx(0.16)
    assert not prompt_ttft.summed(pairs[:1])["meets_aim"]


def test_nothing_measured_is_nothing_told():
    found = prompt_report.summarise({})
    assert found["traps"]["counted"] == {}
    assert found["ttft"] == {}
    assert len(prompt_report.tables(found)) == 1
    assert set(prompt_report.absent({}, given=["kvlint"])) == {"cachelint", "prefixguard", "promptcachelint"}
