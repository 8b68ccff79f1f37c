"""What is said of a miss that no difference of the bodies explains, and what each costs."""

import json

import pytest
from tests.prompt.talks import Talk, Turn

from workmem.core.generation import Span
from workmem.core.outcomes import COMPUTED, MissReason, SourceRun
from workmem.gateway.judging import Candidate, Facts, judge
from workmem.gateway.prefill_speed import PrefillSpeed
from workmem.gateway.recent_requests import Kept, Outcome
from workmem.index.history import PromptHistory
from workmem.prompt.causes.answers import Made
from workmem.prompt.dialects.chat import CHAT

BEFORE = [Turn("user", "Tell me of the fox and the goose.")]
AFTER = [*BEFORE, Turn("assistant", "They met."), Turn("user", "And then?")]


def kept(number, turns=BEFORE, outcome=None, made=None, name="", body=None):
    data = json.dumps(Talk("Be brief.", [], turns).body(CHAT) if body is None else body).encode()
    return Kept(
        number=number, name=name, space="", session="", dialect=CHAT, data=data, earlier=(), outcome=outcome, made=made
    )  # fmt: skip


def outcome(prompt, cached, completion=10):
    return Outcome(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def judged(before, after, *, explanation=None, overlap=None, nearest=None):
    candidates = [] if before is None else [Candidate(kept=before, overlap=overlap)]
    facts = Facts(
        kept=after,
        candidates=candidates,
        explanation=explanation,
        nearest=nearest,
        block_tokens=16,
        is_finished=after.outcome is not None,
    )
    return judge(facts)


def of_engine(tokens_before, tokens, sources, *, before=None, after=None):
    """The verdict on a prompt of the embedded engine, whose tokens are given."""
    history = PromptHistory()
    for name, ids in (("1", tokens_before), ("2", tokens)):
        history.add(name, "", ids, (Span("messages[1].content", 0, len(ids)),), 0.0)
    cached = sum(run.tokens for run in sources if run.source != COMPUTED)
    history.finish("2", tuple(sources))
    before = before or kept(1, name="1", outcome=outcome(len(tokens_before), 0))
    after = after or kept(2, AFTER, name="2", outcome=outcome(len(tokens), cached))
    found = history.explain("2")
    nearest = 1 if found.compared_with == "1" else None
    return judged(before, after, explanation=found, overlap=history.overlap("2", "1"), nearest=nearest)


def names(verdict):
    return [one.name for one in verdict.causes]


def test_what_the_engine_let_go_of_is_said_with_its_tokens():
    sources = [
        SourceRun("vram", 32),
        SourceRun(COMPUTED, 48, MissReason.EVICTED),
        SourceRun(COMPUTED, 20, MissReason.COLD),
    ]
    found = of_engine(range(80), range(100), sources)
    assert names(found) == ["evicted"]
    assert (found.lost_tokens, found.tokens_by_cause) == (48, {"evicted": 48})


def test_a_request_that_may_not_reuse_is_no_miss():
    found = of_engine(range(80), range(100), [SourceRun(COMPUTED, 100, MissReason.DISABLED)])
    assert names(found) == ["disabled"]
    assert (found.lost_tokens, found.tokens_by_cause) == (0, {})


def test_a_change_and_an_eviction_are_told_apart():
    tokens = [*range(64), *range(1000, 1036)]
    sources = [
        SourceRun("vram", 16),
        SourceRun(COMPUTED, 32, MissReason.EVICTED),
        SourceRun(COMPUTED, 52, MissReason.COLD),
    ]
    after = kept(2, [Turn("user", "Tell me of the fox and a goose.")], name="2", outcome=outcome(100, 16))
    found = of_engine(range(80), tokens, sources, after=after)
    assert found.causes[0].name == "history_rewritten"
    assert found.tokens_by_cause == {"evicted": 32, "history_rewritten": 16}


def test_a_template_that_strips_thinking_is_named():
    thought = [*BEFORE, Turn("assistant", "They met.", "A fox, hm."), Turn("user", "And then?")]
    after = [*thought, Turn("assistant", "They ate."), Turn("user", "Why?")]
    tokens = [*range(40), *range(60, 140)]
    sources = [SourceRun("vram", 32), SourceRun(COMPUTED, 88, MissReason.COLD)]
    found = of_engine(
        range(100), tokens, sources,
        before=kept(1, thought, name="1", outcome=outcome(100, 0)),
        after=kept(2, after, name="2", outcome=outcome(120, 32)),
    )  # fmt: skip
    assert [(one.name, one.path) for one in found.causes] == [
        ("template_strips_thinking", "messages[1].content")
    ]
    assert found.lost_tokens == 60


def test_another_rendering_of_the_same_bodies_is_named():
    tokens = [*range(40), *range(200, 280)]
    sources = [SourceRun("vram", 32), SourceRun(COMPUTED, 88, MissReason.COLD)]
    found = of_engine(range(100), tokens, sources)
    assert names(found) == ["rendering_changed"]
    assert found.lost_tokens == 60


def test_the_opening_of_a_turn_that_is_written_otherwise_is_no_cause():
    tokens = [*range(96), *range(200, 230)]
    sources = [SourceRun("vram", 96), SourceRun(COMPUTED, 30, MissReason.COLD)]
    assert names(of_engine(range(100), tokens, sources)) == []


def test_an_answer_that_is_spelt_otherwise_is_named():
    before = kept(1, name="1", outcome=outcome(80, 0, completion=60), made=Made("They met."))
    sources = [SourceRun("vram", 80), SourceRun(COMPUTED, 80, MissReason.COLD)]
    found = of_engine(range(80), range(160), sources, before=before)
    assert names(found) == ["retokenised"]
    assert found.lost_tokens == 60


def test_an_answer_that_came_from_memory_is_no_cause():
    before = kept(1, name="1", outcome=outcome(80, 0, completion=60), made=Made("They met."))
    sources = [SourceRun("vram", 128), SourceRun(COMPUTED, 32, MissReason.COLD)]
    assert names(of_engine(range(80), range(160), sources, before=before)) == []


@pytest.mark.parametrize(
    ("before", "now", "name", "lost"),
    [
        (outcome(2000, 0), outcome(2100, 1984), None, 0),
        (outcome(2000, 0), outcome(2100, 0), "not_kept", 2000),
        (outcome(900, 0), outcome(1000, 0), "below_minimum", 900),
        (outcome(2000, None), outcome(2100, None), "not_reported", 0),
    ],
)
def test_a_server_that_had_not_kept_it_is_told_from_one_that_does_not_say(before, now, name, lost):
    found = judged(kept(1, outcome=before), kept(2, AFTER, outcome=now))
    assert names(found) == ([] if name is None else [name])
    assert found.lost_tokens == lost


def test_what_is_unknown_is_left_out():
    after = kept(2, [Turn("user", "Tell me of the fox and a goose.")])
    found = judged(kept(1), after)
    assert (names(found), found.lost_tokens, found.tokens_by_cause) == (["history_rewritten"], None, {})
    found = judged(kept(1, outcome=outcome(50, None)), kept(2, AFTER[:1], outcome=outcome(50, None)))
    assert names(found) == ["not_reported"]


def test_the_earlier_request_with_most_in_common_is_compared_with():
    mine, other = kept(1, AFTER), kept(2, [Turn("user", "Something else.")])
    after = [*AFTER, Turn("assistant", "They ate."), Turn("user", "Why?")]
    facts = Facts(
        kept=kept(3, after),
        candidates=[Candidate(kept=other, overlap=None), Candidate(kept=mine, overlap=None)],
        explanation=None,
        nearest=None,
        block_tokens=16,
        is_finished=False,
    )
    assert judge(facts).against == 1


def test_bodies_nested_beyond_reason_are_passed_over():
    schema: dict = {}
    for _ in range(400):
        schema = {"properties": {"x": schema}, "items": [schema] if not schema else []}
    bodies = []
    for kind in ("string", "number"):
        text = json.dumps(schema).replace("[{}]", f'[{{"type": "{kind}"}}]')
        tools = [{"type": "function", "function": {"name": "f", "parameters": json.loads(text)}}]
        bodies.append({"messages": [{"role": "user", "content": "Hi"}], "tools": tools})
    found = judged(kept(1, body=bodies[0]), kept(2, body=bodies[1]))
    assert names(found) in ([], ["tool_changed"])


def test_time_is_told_from_what_was_seen():
    speed = PrefillSpeed()
    assert speed.milliseconds(100) is None
    speed.observe(4, 1.0)
    assert speed.milliseconds(100) is None
    for seconds in (0.1, 0.1, 5.0):
        speed.observe(100, seconds)
    assert speed.milliseconds(1000) == 1000.0
