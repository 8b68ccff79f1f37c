"""What a model thought is told from what it says, however the text is cut."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workmem.gateway.turn import MadeCall, Turn
from workmem.prompt.thinking import ThinkingParser, Thought

WORDS = ["<think>", "</think>", "<thi", "</", "think>", "\n", " ", "a", "<tool_call>", "b c", "\n\n"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


def parse(pieces, *, has_begun=False):
    parser = ThinkingParser(has_begun=has_begun)
    found = [one for piece in pieces for one in parser.feed(piece)] + parser.finish()
    thoughts = "".join(one.text for one in found if isinstance(one, Thought))
    return thoughts, "".join(one for one in found if isinstance(one, str))


@pytest.mark.parametrize(
    ("text", "has_begun", "thoughts", "answer"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
        ("\n<think>why</think>so", False, "why", "so"),
        ("why\nnot\n</think>\n\nso", True, "why\nnot", "so"),
        ("<think>\n\n</think>\n\nso", False, "", "so"),
        ("so <think>why</think>", False, "", "so <think>why</think>"),
        ("<thin", False, "", "<thin"),
        ("  so", False, "", "  so"),
        ("why </th", True, "why </th", ""),
        ("<think>why", False, "why", ""),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_thoughts_and_answer(text, has_begun, thoughts, answer):
    assert parse([text], has_begun=has_begun) == (thoughts, answer)


@given(TEXTS, st.booleans(), st.data())
@example("<think>a\n</think>\nb", False, None)
def test_any_split_gives_the_same(text, has_begun, data):
    if data is None:
        pieces = list(text)
    else:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, has_begun=has_begun) == parse([text], has_begun=has_begun)


@given(TEXTS)
def test_what_does_not_begin_with_thinking_passes_unchanged(text):
    if not text.lstrip().startswith("<think>"):
        assert parse(list(text)) == ("", text)


def test_nothing_is_held_back_that_is_certain():
    parser = ThinkingParser(has_begun=True)
    assert parser.feed("one two\n") == [Thought("one two")]
    assert parser.feed("three</th") == [Thought("\nthree")]
    assert parser.feed("ink>") == []
    assert parser.feed("four") == ["four"]


def test_a_call_in_a_thought_is_none_and_one_after_it_is():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    turn = Turn(["f"], thinking="possible")
    text = f"<think>I could {call}</think>\n{call}"
    out = [piece for start in range(0, len(text), 5) for piece in turn.take(text[start : start + 5], None)]
    out += turn.take("", "stop")
    assert turn.thinking == f"I could {call}"
    assert [piece.name for piece in out if isinstance(piece, MadeCall)] == ["f"]
    assert (turn.text, turn.finish_reason) == ("", "tool_calls")
