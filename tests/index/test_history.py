"""The history names the true first difference, and its accounts add up."""

from __future__ import annotations

import time
from itertools import takewhile

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workmem.core.generation import Span
from workmem.core.outcomes import MissReason, SourceRun
from workmem.index.history import PromptHistory


def chat_spans(*lengths: int) -> tuple[Span, ...]:
    spans, start = [], 0
    for index, length in enumerate(lengths):
        spans.append(Span(f"messages[{index}].content", start, start + length))
        start += length
    return tuple(spans)


def computed(tokens: int, reason: MissReason = MissReason.COLD) -> SourceRun:
    return SourceRun("computed", tokens, reason)


def shared_prefix(a, b) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_changed_message_is_named_down_to_its_token():
    history = PromptHistory()
    before = [*range(100), *range(500, 520), *range(900, 930)]
    here = [*range(100), *range(500, 507), 7, 8, *range(900, 930)]
    history.add("old", "m", before, chat_spans(100, 20, 30), 1.0)
    history.add("new", "m", here, chat_spans(100, 9, 30), 2.0)
    history.finish("new", (SourceRun("vram", 96), computed(42), computed(1, MissReason.TAIL)))

    explanation = history.explain("new")
    assert explanation is not None
    assert explanation.compared_with == "old"
    assert explanation.difference is not None
    assert explanation.difference.token == 107
    assert explanation.difference.path == "messages[1].content"
    assert (explanation.difference.message, explanation.difference.field) == (1, "content")
    assert explanation.difference.offset == 7
    assert explanation.difference.here == (7, 8, *range(900, 906))
    assert explanation.difference.before == tuple(range(507, 515))
    assert explanation.difference.reason == "messages[1].content differs from its token 7 on"
    assert explanation.cached_tokens == 96
    assert explanation.tokens_by_source == {"vram": 96, "computed": 43}
    reasons = [(part.source, part.tokens, part.reason) for span in explanation.spans for part in span.parts]
    assert reasons == [
        ("vram", 96, None),
        ("computed", 4, MissReason.CHANGED),
        ("computed", 9, MissReason.CHANGED),
        ("computed", 29, MissReason.CHANGED),
        ("computed", 1, MissReason.TAIL),
    ]


def test_a_field_in_another_ones_place_names_both():
    history = PromptHistory()
    history.add("old", "m", range(40), (Span("messages[0].content", 0, 20), Span("tools[0]", 20, 40)), 1.0)
    history.add("new", "m", [*range(20), *range(60, 70)], chat_spans(20, 10), 2.0)
    explanation = history.explain("new")
    assert explanation is not None
    assert explanation.difference is not None
    assert explanation.difference.path_before == "tools[0]"
    assert explanation.difference.reason == "messages[1].content stands where tools[0] stood before"


def test_appended_turns_are_new_not_changed():
    history = PromptHistory()
    history.add("turn 1", "m", range(64), chat_spans(64), 1.0)
    history.add("turn 2", "m", range(164), chat_spans(64, 100), 2.0)
    history.finish("turn 2", (SourceRun("dram", 64), computed(99), computed(1, MissReason.TAIL)))
    explanation = history.explain("turn 2")
    assert explanation is not None
    assert explanation.compared_with == "turn 1"
    assert explanation.difference is None
    assert [part.reason for part in explanation.spans[1].parts] == [MissReason.COLD, MissReason.TAIL]


def test_an_extended_prompt_is_nearer_than_a_later_sibling():
    history = PromptHistory()
    history.add("turn 1", "m", range(64), chat_spans(64), 1.0)
    history.add("sibling", "m", [*range(64), *range(900, 950)], chat_spans(64, 50), 2.0)
    history.add("turn 2", "m", range(164), chat_spans(64, 100), 3.0)
    explanation = history.explain("turn 2")
    assert explanation is not None
    assert explanation.compared_with == "turn 1"
    assert explanation.difference is None


@pytest.mark.parametrize("reason", [MissReason.EVICTED, MissReason.CORRUPT, MissReason.UNAVAILABLE])
def test_what_the_engine_knows_better_stays(reason: MissReason):
    history = PromptHistory()
    history.add("old", "m", range(64), chat_spans(64), 1.0)
    history.add("new", "m", [*range(32), *range(100, 132)], chat_spans(64), 2.0)
    history.finish("new", (computed(64, reason),))
    explanation = history.explain("new")
    assert explanation is not None
    assert [part.reason for part in explanation.spans[0].parts] == [reason]
    assert explanation.difference is not None


def test_cold_blocks_before_the_change_stay_cold():
    history = PromptHistory()
    history.add("old", "m", range(64), chat_spans(64), 1.0)
    history.add("new", "m", [*range(40), *range(100, 124)], chat_spans(64), 2.0)
    history.finish("new", (computed(64),))
    explanation = history.explain("new")
    assert explanation is not None
    parts = [(part.tokens, part.reason) for part in explanation.spans[0].parts]
    assert parts == [(32, MissReason.COLD), (32, MissReason.CHANGED)]


def test_reuse_beyond_the_common_prefix_blames_no_difference():
    history = PromptHistory()
    history.add("old", "m", [*range(16), *range(500, 548)], chat_spans(64), 1.0)
    history.add("new", "m", range(64), chat_spans(64), 2.0)
    history.finish("new", (SourceRun("ssd", 48), computed(16)))
    explanation = history.explain("new")
    assert explanation is not None
    assert explanation.difference is None
    assert [part.reason for part in explanation.spans[0].parts] == [None, MissReason.COLD]


def test_spaces_do_not_see_each_other():
    history = PromptHistory()
    history.add("a", "tenant a", range(64), chat_spans(64), 1.0)
    history.add("b", "tenant b", range(64), chat_spans(64), 2.0)
    explanation = history.explain("b")
    assert explanation is not None
    assert explanation.compared_with is None


def test_running_and_cancelled_requests_are_accounted_as_far_as_known():
    history = PromptHistory()
    history.add("r", "m", range(64), chat_spans(32, 32), 1.0)
    running = history.explain("r")
    assert running is not None
    assert not running.finished
    assert running.tokens_by_source == {"unaccounted": 64}
    history.finish("r", (SourceRun("vram", 16),))
    cancelled = history.explain("r")
    assert cancelled is not None
    assert cancelled.finished
    assert cancelled.cached_tokens == 16
    assert cancelled.tokens_by_source == {"vram": 16, "unaccounted": 48}
    assert not cancelled.approximate
    history.finish("r", (SourceRun("ssd", 16),), approximate=True)
    rounded = history.explain("r")
    assert rounded is not None
    assert rounded.approximate


def test_too_many_sources_are_refused_and_name_both_sizes():
    history = PromptHistory()
    history.add("r", "m", range(64), chat_spans(64), 1.0)
    with pytest.raises(ValueError, match=r"account for 80 tokens, but its prompt has 64"):
        history.finish("r", (computed(80),))


@pytest.mark.parametrize(
    "spans", [(), (Span("a", 0, 30),), (Span("a", 0, 64), Span("b", 32, 64)), (Span("a", 1, 64),)]
)
def test_spans_must_cover(spans: tuple[Span, ...]):
    with pytest.raises(ValueError, match="span"):
        PromptHistory().add("r", "m", range(64), spans, 1.0)


def test_a_repeated_id_names_the_later_prompt():
    history = PromptHistory(prompts_max=2)
    history.add("same", "m", range(10), chat_spans(10), 1.0)
    history.add("same", "m", range(20), chat_spans(20), 2.0)
    history.add("other", "m", range(30), chat_spans(30), 3.0)
    assert history.latest(10) == ["other", "same"]
    explanation = history.explain("same")
    assert explanation is not None
    assert explanation.prompt_tokens == 20


def test_unknown_and_forgotten_requests():
    history = PromptHistory(prompts_max=2)
    for name in "abc":
        history.add(name, "m", range(10), chat_spans(10), 1.0)
    history.finish("a", (computed(10),))
    assert history.explain("a") is None
    assert history.explain("never") is None
    assert history.latest(1) == ["c"]


def test_a_prompt_larger_than_the_bound_is_not_held():
    history = PromptHistory(tokens_max=50)
    history.add("small", "m", range(40), chat_spans(40), 1.0)
    history.add("large", "m", range(60), chat_spans(60), 2.0)
    assert len(history) == 0
    assert history.explain("large") is None


def test_an_explanation_is_json():
    history = PromptHistory()
    history.add("r", "m", range(64), chat_spans(64), 1.0)
    history.finish("r", (computed(63), computed(1, MissReason.TAIL)))
    parsed = msgspec.json.decode(msgspec.json.encode(history.explain("r")))
    assert parsed["spans"][0]["parts"][1] == {"source": "computed", "tokens": 1, "reason": "tail"}


# Few symbols and short prompts: forks, repeats and prefixes of each other are the rule.
prompts = st.lists(
    st.tuples(st.sampled_from("xy"), st.lists(st.integers(0, 2), max_size=14)), min_size=1, max_size=24
)


@given(prompts=prompts, prompts_max=st.integers(1, 9), tokens_max=st.integers(1, 90))
def test_nearest_prompt_and_difference_agree_with_brute_force(prompts, prompts_max: int, tokens_max: int):
    history = PromptHistory(prompts_max=prompts_max, tokens_max=tokens_max)
    held: list[tuple[str, str, list[int]]] = []
    for number, (space, tokens) in enumerate(prompts):
        name = str(number)
        history.add(name, space, tokens, chat_spans(*[1] * len(tokens)), float(number))
        best = max(
            (
                (shared_prefix(tokens, other), shared_prefix(tokens, other) == len(other), int(other_name))
                for other_name, other_space, other in held
                if other_space == space
            ),
            default=(0, False, -1),
        )
        held.append((name, space, tokens))
        while len(held) > prompts_max or sum(len(t) for _, _, t in held) > tokens_max:
            held.pop(0)
        explanation = history.explain(name)
        assert (explanation is not None) == (held != [] and held[-1][0] == name)
        if explanation is None:
            continue
        shared, is_prefix, other_number = best
        if shared == 0:
            assert explanation.compared_with is None
            continue
        if shared < len(tokens):
            assert explanation.compared_with == str(other_number)
        difference = explanation.difference
        other = prompts[int(explanation.compared_with or -1)][1]
        assert shared_prefix(tokens, other) == shared
        if is_prefix or shared == len(tokens):
            assert difference is None
        else:
            assert difference is not None
            assert difference.token == shared
            assert difference.path == f"messages[{shared}].content"
            assert difference.here == tuple(tokens[shared : shared + 8])
            assert difference.before == tuple(other[shared : shared + 8])
    assert history.latest(len(held) + 1) == [name for name, _, _ in reversed(held)]
    assert history._held_tokens == sum(len(tokens) for _, _, tokens in held)


runs = st.lists(
    st.builds(
        SourceRun,
        st.sampled_from(["vram", "dram", "ssd", "computed"]),
        st.integers(0, 30),
        st.sampled_from([None, *MissReason]),
    ),
    max_size=6,
)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    sources=runs,
    change=st.none() | st.integers(0, 200),
)
def test_parts_sum_to_their_spans_and_to_the_sources(lengths, sources, change):
    total = sum(lengths)
    kept, left = [], total
    for run in sources:
        kept.append(SourceRun(run.source, min(run.tokens, left), run.reason))
        left -= kept[-1].tokens
    history = PromptHistory()
    if change is not None:
        history.add("old", "m", [int(t == change) for t in range(total)], chat_spans(*lengths), 1.0)
    history.add("new", "m", [0] * total, chat_spans(*lengths), 2.0)
    history.finish("new", tuple(kept))
    explanation = history.explain("new")
    assert explanation is not None
    for span in explanation.spans:
        assert sum(part.tokens for part in span.parts) == span.end - span.start
        assert all(part.tokens > 0 for part in span.parts)
    for source in {run.source for run in kept}:
        expected = sum(run.tokens for run in kept if run.source == source)
        assert explanation.tokens_by_source.get(source, 0) == expected
    assert sum(explanation.tokens_by_source.values()) == explanation.prompt_tokens == total
    cached = sum(run.tokens for run in kept if run.source != "computed")
    assert explanation.cached_tokens == cached


def test_a_thousand_long_prompts_cost_less_than_two_milliseconds_each():
    history = PromptHistory(tokens_max=10_000_000)
    spans = chat_spans(*[256] * 32)
    adding, explaining = [], []
    for number in range(1000):
        tokens = [*range(8192 - number), *range(20_000, 20_000 + number)]
        start = time.perf_counter()
        history.add(str(number), "m", tokens, spans, float(number))
        adding.append(time.perf_counter() - start)
        history.finish(str(number), (SourceRun("vram", 4096), computed(4096)))
    for number in range(960, 1000):
        start = time.perf_counter()
        history.explain(str(number))
        explaining.append(time.perf_counter() - start)
    # The best of many: the rest measures what else this machine does.
    assert min(explaining) < 0.002
    assert min(adding[500:]) < 0.002
