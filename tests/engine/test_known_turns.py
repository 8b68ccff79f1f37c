import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.core.generation import KnownTurn, text_digest
from workmem.engines.embedded.tokenizer import ModelTokenizer
from workmem.testing.tiny_models import build_tokenizer

TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "What is in the place?"}]
CALL = '<tool_call>{"name": "ls", "arguments": {"path":".","all":true}}</tool_call>'
STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return ModelTokenizer(folder)


def split(tokenizer, text):
    """Tokens that say `text`, and that no encoder would choose: one per byte."""
    return [token for char in text for token in tokenizer.backend.encode(char, add_special_tokens=False).ids]


def said(tokenizer, ids):
    return tokenizer.backend.decode(list(ids), skip_special_tokens=False)


def known_turn(tokenizer, messages, ids, **more):
    text = tokenizer.render_chat(messages, **more).text
    return KnownTurn(
        message=len(messages), prompt_chars=len(text), prompt_digest=text_digest(text), token_ids=tuple(ids)
    )


def back(arguments, content=""):
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def check_spans(prompt):
    at = 0
    for span in prompt.spans:
        assert span.start == at < span.end
        at = span.end
    assert at == len(prompt.token_ids)


def test_generated_tokens_stand_where_the_turn_is_rendered(tiny):
    ids = split(tiny, "in the end")
    known = known_turn(tiny, ASKED, ids)
    before = tiny.render_chat(ASKED).token_ids
    chat = [*ASKED, {"role": "assistant", "content": "in the end"}, {"role": "user", "content": "and then"}]
    prompt = tiny.render_chat(chat, known=[known])
    plain = tiny.render_chat(chat)
    assert [(one.outcome, one.tokens) for one in prompt.known] == [("used", len(ids))]
    assert prompt.token_ids[: len(before) + len(ids)] == before + ids
    assert said(tiny, prompt.token_ids) == prompt.text == plain.text == said(tiny, plain.token_ids)
    assert len(prompt.token_ids) > len(plain.token_ids)
    check_spans(prompt)
    texts = [(span.path, said(tiny, prompt.token_ids[span.start : span.end])) for span in prompt.spans]
    assert texts == [(span.path, said(tiny, plain.token_ids[span.start : span.end])) for span in plain.spans]


def test_a_call_keeps_the_spelling_it_was_generated_in(tiny):
    ids = split(tiny, CALL)
    known = known_turn(tiny, ASKED, ids, tools=[TOOL])
    result = {"role": "tool", "tool_call_id": "c1", "content": "a.txt"}
    prompt = tiny.render_chat([*ASKED, back({"all": True, "path": "."}), result], tools=[TOOL], known=[known])
    assert [one.outcome for one in prompt.known] == ["used"]
    assert CALL in said(tiny, prompt.token_ids)
    assert CALL not in prompt.text
    check_spans(prompt)
    spans = {span.path: said(tiny, prompt.token_ids[span.start : span.end]) for span in prompt.spans}
    assert spans["messages[1].tool_calls[0].function.arguments"] == '{"path":".","all":true}'
    assert spans["messages[2].content"] == "a.txt"


def test_each_turn_of_a_long_history_gets_its_own_tokens(tiny):
    chat, known = list(ASKED), []
    for number in range(5):
        answer = f"the answer {number}"
        known.append(known_turn(tiny, chat, split(tiny, answer)))
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"then {number}"}]
    grown = [tiny.render_chat(chat[: 2 * n + 1], known=known[:n]).token_ids for n in range(6)]
    for number in range(5):
        whole = grown[number] + list(known[number].token_ids)
        assert grown[number + 1][: len(whole)] == whole
    # Those that are forgotten are encoded, and cost the rest nothing.
    without = tiny.render_chat(chat, known=[known[0], known[3]])
    assert [one.outcome for one in without.known] == ["used", "used"]
    assert said(tiny, without.token_ids) == without.text


def test_tokens_that_encoding_gives_anyway_change_nothing(tiny):
    ids = tiny.backend.encode("in the end", add_special_tokens=False).ids
    chat = [*ASKED, {"role": "assistant", "content": "in the end"}, {"role": "user", "content": "and then"}]
    prompt = tiny.render_chat(chat, known=[known_turn(tiny, ASKED, ids)])
    assert [one.outcome for one in prompt.known] == ["same"]
    assert prompt.token_ids == tiny.render_chat(chat).token_ids


@pytest.mark.parametrize(
    ("answer", "content", "outcome"),
    [
        ("in the end", "in the End", "template_differs"),
        ("in the end", " in the end", "template_differs"),
        ("in the end", "in the end ", "template_differs"),
        # A stop string, or white space that somebody trimmed: cut where the text ends.
        ("in the end.\nUser:", "in the end.", "used"),
        ("in the end  ", "in the end", "used"),
        # The text names an end mark itself.
        ("say <|im_end|> to end", "say <|im_end|> to end", "used"),
    ],
)
def test_only_what_the_rendering_says_is_put_in_place(tiny, answer, content, outcome):
    known = known_turn(tiny, ASKED, split(tiny, answer))
    chat = [*ASKED, {"role": "assistant", "content": content}, {"role": "user", "content": "and then"}]
    prompt = tiny.render_chat(chat, known=[known])
    assert [one.outcome for one in prompt.known] == [outcome]
    assert said(tiny, prompt.token_ids) == prompt.text
    if outcome != "used":
        assert prompt.token_ids == tiny.render_chat(chat).token_ids


def test_a_text_that_ends_inside_a_token_cannot_be_cut(tiny):
    ids = tiny.backend.encode("in the", add_special_tokens=False).ids
    chat = [*ASKED, {"role": "assistant", "content": "in th"}, {"role": "user", "content": "and then"}]
    prompt = tiny.render_chat(chat, known=[known_turn(tiny, ASKED, ids)])
    assert [one.outcome for one in prompt.known] == ["inside_token"]
    assert prompt.token_ids == tiny.render_chat(chat).token_ids


def test_a_character_that_was_cut_short_is_no_text(tiny):
    ids = split(tiny, "né")[:-1]
    chat = [*ASKED, {"role": "assistant", "content": "n\ufffd"}, {"role": "user", "content": "and then"}]
    prompt = tiny.render_chat(chat, known=[known_turn(tiny, ASKED, ids)])
    assert [one.outcome for one in prompt.known] == ["cut_character"]
    assert prompt.token_ids == tiny.render_chat(chat).token_ids


def test_another_text_before_a_turn_keeps_its_tokens_out(tiny):
    known = known_turn(tiny, ASKED, split(tiny, "in the end"))
    for first in ("What is in the Place?", "What", "What is in the place? And where is it, by the way?"):
        chat = [{"role": "user", "content": first}, {"role": "assistant", "content": "in the end"}]
        prompt = tiny.render_chat(chat, known=[known])
        assert [one.outcome for one in prompt.known] == ["template_differs"]
        assert prompt.token_ids == tiny.render_chat(chat).token_ids


def test_a_template_that_drops_thinking_is_named(tmp_path):
    build_tokenizer(tmp_path, chat_template=STRIPS)
    tokenizer = ModelTokenizer(tmp_path)
    known = known_turn(tokenizer, ASKED, split(tokenizer, "<think>hm</think>in the end"))
    turn = {"role": "assistant", "content": "in the end", "reasoning_content": "hm"}
    at_once = tokenizer.render_chat([*ASKED, turn], known=[known])
    assert [one.outcome for one in at_once.known] == ["used"]
    later = tokenizer.render_chat([*ASKED, turn, {"role": "user", "content": "and then"}], known=[known])
    assert [one.outcome for one in later.known] == ["template_strips_thinking"]


@settings(max_examples=150, deadline=None)
@given(
    answers=st.lists(
        st.text(min_size=1, max_size=10) | st.sampled_from(["the <|im_end|>", "{", "\n\n", "and\n", " the"]),
        min_size=1,
        max_size=3,
    ),
    mutation=st.none() | st.tuples(st.integers(0, 6), st.text(max_size=4)),
)
def test_whatever_is_put_in_place_says_what_the_template_wrote(tiny, answers, mutation):
    chat, known = list(ASKED), []
    for answer in answers:
        known.append(known_turn(tiny, chat, split(tiny, answer)))
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": "the"}]
    if mutation is not None:
        at, text = mutation[0] % len(chat), mutation[1]
        chat[at] = {**chat[at], "content": text}
    prompt = tiny.render_chat(chat, known=known)
    plain = tiny.render_chat(chat)
    assert said(tiny, prompt.token_ids) == said(tiny, plain.token_ids)
    check_spans(prompt)
    if mutation is None:
        expected = (
            {"used", "same"} if all("\ufffd" not in answer for answer in answers) else {"cut_character"}
        )
        assert {one.outcome for one in prompt.known} & expected
