"""Rules that change what the model reads: what they find, what they leave, and what they make stable."""

import copy

import msgspec
import pytest

from workmem.prompt.canonical.canonicalise import canonicalise
from workmem.prompt.canonical.description_line_order import sorted_bullets
from workmem.prompt.canonical.unordered_context import sorted_elements
from workmem.prompt.dialects.chat import CHAT
from workmem.prompt.dialects.messages import MESSAGES
from workmem.prompt.dialects.responses import RESPONSES

encode = msgspec.json.encode


def run(body, rule, dialect=CHAT):
    return canonicalise(copy.deepcopy(body), dialect, {rule})


def bodies(system, *users):
    """The same talk in all three APIs."""
    turns = [{"role": "user", "content": user} for user in users]
    yield CHAT, {"messages": [{"role": "system", "content": system}, *turns]}
    yield MESSAGES, {"system": system, "messages": turns}
    yield RESPONSES, {"instructions": system, "input": turns}


def test_a_clock_goes_to_the_newest_words_and_what_lasts_behind_the_instructions():
    system = "Now: 2026-11-29T10:15:03Z\nWorking directory: /srv/app\nBe brief."
    for dialect, body in bodies(system, "First", "Second"):
        found = run(body, "volatile_to_tail", dialect)
        texts = [place.text for place in dialect.texts(found.body)]
        assert texts == [
            "Now: (see time_1 in current_values)\nWorking directory: (see path_1 in current_values)\nBe brief.",
            "<current_values>\npath_1: /srv/app\n</current_values>\n\nFirst",
            "<current_values>\ntime_1: 2026-11-29T10:15:03Z\n</current_values>\n\nSecond",
        ]
        assert found.counts == {"volatile_to_tail": 1}


def test_two_requests_a_minute_apart_have_the_same_instructions():
    for first, second in zip(
        bodies("It is 2026-11-29 10:15:03.", "Hi"), bodies("It is 2026-11-29 10:16:04.", "Hi"), strict=True
    ):
        stable = [
            next(iter(dialect.texts(run(body, "volatile_to_tail", dialect).body))).text
            for dialect, body in (first, second)
        ]
        assert stable[0] == stable[1] == "It is (see time_1 in current_values)."


def test_nothing_is_moved_where_there_is_nowhere_to_move_it():
    body = {"messages": [{"role": "system", "content": "Now: 10:15:03"}]}
    assert run(body, "volatile_to_tail").body == body


def test_what_a_user_says_keeps_its_values():
    body = {"messages": [{"role": "user", "content": "Meet at 2026-11-29T10:15:03Z"}]}
    for rule in ("volatile_to_tail", "date_rounding"):
        assert run(body, rule).body == body


def test_a_clock_is_rounded_to_its_day():
    for dialect, body in bodies(
        "Now: 2026-11-29T10:15:03Z, be brief; since 2026-11-28.", "At 2026-11-29T10:15"
    ):
        texts = [place.text for place in dialect.texts(run(body, "date_rounding", dialect).body)]
        assert texts == ["Now: 2026-11-29, be brief; since 2026-11-28.", "At 2026-11-29T10:15"]


@pytest.mark.parametrize(
    ("text", "now"),
    [
        ("Agents:\n- b: two\n- a: one\nEnd.", "Agents:\n- a: one\n- b: two\nEnd."),
        ("- b\n  more of b\n- a", "- a\n- b\n  more of b"),
        ("- b\n  - y\n  - x\n- a", "- a\n- b\n  - y\n  - x"),
        ("1. b\n2. a", "1. b\n2. a"),
        ("- b\n\n- a", "- b\n\n- a"),
        ("", ""),
    ],
)
def test_bullet_points_are_sorted_with_what_stands_below_them(text, now):
    assert sorted_bullets(text) == now
    assert sorted_bullets(now) == now


def test_descriptions_that_list_the_same_in_two_orders_are_one():
    def body(*lines):
        text = "\n".join(["Starts an agent:", *lines])
        return {"tools": [{"type": "function", "function": {"name": "agent", "description": text}}]}

    one, other = (run(body(*lines), "description_line_order") for lines in (("- b", "- a"), ("- a", "- b")))
    assert encode(one.body) == encode(other.body)
    assert one.applied[0].paths == ("tools[0].function.description",)


@pytest.mark.parametrize(
    ("text", "now"),
    [
        ("<doc>b</doc>\n<doc>a</doc>", "<doc>a</doc>\n<doc>b</doc>"),
        (
            '<memory id="2">b</memory><memory id="1">a</memory>!',
            '<memory id="1">a</memory><memory id="2">b</memory>!',
        ),
        ("<doc>b</doc> and <doc>a</doc>", "<doc>b</doc> and <doc>a</doc>"),
        ("<doc>b</doc><fact>a</fact>", "<doc>b</doc><fact>a</fact>"),
        ("<li>b</li><li>a</li>", "<li>b</li><li>a</li>"),
        ("<doc>b", "<doc>b"),
    ],
)
def test_results_beside_each_other_are_sorted(text, now):
    assert sorted_elements(text) == now
    assert sorted_elements(now) == now


def test_the_model_s_own_words_keep_their_order():
    body = {"messages": [{"role": "assistant", "content": "<doc>b</doc><doc>a</doc>"}]}
    assert run(body, "unordered_context").body == body
