"""Holding a second answer against what was sent of a first one."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.gateway.sent import Course, Diverged, Replay, Sent, before_failure, is_half


def chunk(delta=None, finish=None, ident="first", **fields):
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return {"id": ident, "created": 1, "choices": [choice], **fields}


def sent_of(*bodies, is_exact=True):
    sent = Sent(is_exact=is_exact)
    for body in bodies:
        sent.see(f"data: {json.dumps(body)}\n\n".encode())
    return sent


def rest_of(sent, *bodies):
    replay = Replay(sent)
    out = [rest for body in bodies if (rest := replay.trim(body)) is not None]
    replay.end()
    return out


def text_of(bodies):
    return "".join(body["choices"][0]["delta"].get("content") or "" for body in bodies if body["choices"])


ROLE = {"role": "assistant", "content": ""}


def test_a_piece_is_cut_where_the_first_answer_ended_and_keeps_its_id():
    sent = sent_of(chunk(ROLE), chunk({"content": "Hel"}), chunk({"content": "lo w"}))
    again = [
        chunk(ROLE, ident="second"),
        chunk({"content": "Hello world"}, ident="second"),
        chunk({}, "stop", "second"),
    ]
    out = rest_of(sent, *again)
    assert text_of(out) == "orld"
    assert [body["id"] for body in out] == ["first", "first"]
    assert out[-1]["choices"][0]["finish_reason"] == "stop"


def split_at(text, cuts):
    bounds = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(bounds)]


CUTS = st.lists(st.integers(0, 30), max_size=8)


@settings(deadline=None)
@given(st.text(max_size=30), CUTS, CUTS, st.integers(0, 30), st.booleans())
def test_however_both_are_cut_the_whole_is_the_answer_once(text, cuts, other_cuts, sent_chars, is_chat):
    def body(piece, ident):
        choice = {"delta": {"content": piece}} if is_chat else {"text": piece}
        return {"id": ident, "created": 7, "choices": [{"index": 0, "finish_reason": None} | choice]}

    def said(bodies):
        choices = [one["choices"][0] for one in bodies]
        return "".join((one["delta"].get("content") if is_chat else one["text"]) or "" for one in choices)

    first = [body(piece, "a") for piece in split_at(text, cuts)]
    kept, count = [], 0
    for one in first:
        if count + len(said([one])) > sent_chars:
            break
        kept.append(one)
        count += len(said([one]))
    out = rest_of(sent_of(*kept), *(body(piece, "b") for piece in split_at(text, other_cuts)))
    assert said(kept) + said(out) == text
    assert all(one["id"] == "a" for one in out) or not kept


@pytest.mark.parametrize("again", [["Help", "!"], ["Hel"], ["hello"]])
def test_another_text_or_a_shorter_one_is_not_gone_on_with(again):
    sent = sent_of(chunk({"content": "Hello"}))
    with pytest.raises(Diverged):
        rest_of(sent, *(chunk({"content": piece}) for piece in again), chunk({}, "stop"))


def call(index, name="", arguments="", **fields):
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return chunk({"tool_calls": [{"index": index, "function": function, **fields}]})


def test_tool_calls_go_on_under_the_first_id():
    sent = sent_of(call(0, "look", '{"a": ', id="call_1", type="function"), call(0, "", "1"))
    out = rest_of(sent, call(0, "look", '{"a": 1, "b": 2}', id="call_9"), call(1, "look", "{}", id="call_8"))
    entries = [body["choices"][0]["delta"]["tool_calls"][0] for body in out]
    assert entries[0] == {"index": 0, "function": {"arguments": ', "b": 2}'}}
    assert (entries[1]["id"], entries[1]["function"]["name"]) == ("call_8", "look")


@pytest.mark.parametrize("other", [("find", '{"a": 1}'), ("look", '{"a": 2}')])
def test_other_calls_are_not_gone_on_with(other):
    sent = sent_of(call(0, "look", '{"a": 1'))
    with pytest.raises(Diverged):
        rest_of(sent, call(0, *other))


@pytest.mark.parametrize(
    "sent",
    [[call(0, "f")], [call(0, "f", "{")], [call(0, "f"), call(0, "", "{")], [call(0, "", "{")]],
)
def test_a_call_does_not_become_one_of_another_function(sent):
    with pytest.raises(Diverged):
        rest_of(sent_of(*sent), call(0, "fgh", "{}"))
    with pytest.raises(Diverged):
        rest_of(sent_of(*sent), call(0, "f"), call(0, "gh", "{}"))


def test_a_name_may_come_again_in_pieces_but_before_its_arguments():
    sent = sent_of(call(0, "look", "{"))
    (out,) = rest_of(sent, call(0, "lo"), call(0, "ok"), call(0, "", "{}"))
    assert out["choices"][0]["delta"]["tool_calls"] == [{"index": 0, "function": {"arguments": "}"}}]
    with pytest.raises(Diverged):
        rest_of(sent, call(0, "lo", "{}"), call(0, "ok"))
    # Of a call that had nothing but its id, the name is new.
    (out,) = rest_of(sent_of(call(0, id="call_1")), call(0, "look", "{}"))
    assert out["choices"][0]["delta"]["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}


def test_another_choice_is_not_gone_on_with():
    other = {"id": "b", "choices": [{"index": 1, "delta": {"content": "Hello"}, "finish_reason": None}]}
    with pytest.raises(Diverged):
        rest_of(sent_of(chunk({"content": "Hello"})), other)


def test_reasoning_and_text_are_told_apart():
    sent = sent_of(chunk({"reasoning_content": "hm"}), chunk({"content": "A"}))
    out = rest_of(sent, chunk({"reasoning_content": "hm"}), chunk({"content": "AB"}))
    assert text_of(out) == "B"
    with pytest.raises(Diverged):
        rest_of(sent, chunk({"reasoning_content": "h"}), chunk({"content": "AB"}))


def test_an_answer_that_had_finished_lacks_only_its_usage():
    usage = {"id": "b", "choices": [], "usage": {"prompt_tokens": 3}}
    sent = sent_of(chunk({"content": "Hi"}), chunk({}, "stop"))
    assert rest_of(sent, chunk({"content": "Hi"}), chunk({}, "stop"), usage) == [usage | {"id": "first"}]
    with pytest.raises(Diverged):
        rest_of(sent, chunk({"content": "Hi"}), chunk({}, "length"))
    with pytest.raises(Diverged):
        rest_of(sent, chunk({"content": "Hi!"}))
    assert (
        rest_of(sent_of(chunk({"content": "Hi"}), chunk({}, "stop"), usage), chunk({"content": "Hi"}), usage)
        == []
    )


def test_usage_before_the_text_has_come_again_is_a_shorter_answer():
    with pytest.raises(Diverged):
        rest_of(sent_of(chunk({"content": "Hi"})), {"choices": [], "usage": {"prompt_tokens": 3}})


def test_a_drawn_answer_can_be_drawn_anew_until_some_of_it_is_out():
    assert not sent_of(chunk(ROLE), is_exact=False).is_lost
    assert sent_of(chunk(ROLE), chunk({"content": "x"}), is_exact=False).is_lost
    assert sent_of(call(0, "f"), is_exact=False).is_lost
    assert (
        text_of(rest_of(sent_of(chunk(ROLE), is_exact=False), chunk(ROLE), chunk({"content": "Any"})))
        == "Any"
    )


@pytest.mark.parametrize(
    "odd",
    [
        {"error": {"message": "x"}},
        {"choices": 3},
        chunk({"content": "a"}) | {"choices": 2 * chunk()["choices"]},
        {"choices": [{"index": 1, "delta": {"content": "a"}}]},
        {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [1]}}]},
        {"choices": [{"index": 0, "delta": {"audio": "a"}}]},
        {"choices": [4]},
    ],
)
def test_what_cannot_be_compared_is_not_gone_on_with(odd):
    assert sent_of(chunk({"content": "Hi"}), odd).is_lost


def test_bytes_that_are_no_json_are_not_gone_on_with():
    sent = Sent(is_exact=True)
    sent.see(b": a comment\n\nevent: x\ndata: {nonsense\n\n")
    assert sent.is_lost
    several = Sent(is_exact=True, is_single=False)
    assert several.is_lost


def test_the_end_is_seen():
    sent = sent_of(chunk({"content": "Hi"}))
    assert not sent.course.is_done
    sent.see(b"data: [DONE]\n\n")
    assert sent.course.is_done


@pytest.mark.parametrize(
    ("data", "is_cut"),
    [
        (chunk({"content": "a"}), True),
        (chunk({"content": '"finish_reason": "stop", "error": {}'}), True),
        (chunk({}, "stop"), False),
        (chunk({}, ""), True),
        ({"choices": [], "usage": {}}, False),
        ({"choices": [{"text": "a"}], "error": None}, True),
    ],
)
@pytest.mark.parametrize("tight", [True, False])
def test_a_stream_that_began_and_does_not_say_why_it_ends_is_cut(data, is_cut, tight):
    course = Course()
    course.see(json.dumps(data, separators=(",", ":") if tight else None).encode())
    assert course.is_cut is is_cut
    for end in (b"[DONE]", b'{"error": {"message": "x"}}'):
        course = Course()
        course.see(json.dumps(chunk({"content": "a"})).encode())
        course.see(end)
        assert not course.is_cut


@pytest.mark.parametrize(
    ("error", "is_failure"),
    [
        ({"error": {"code": 500}}, True),
        ({"error": {"code": "503"}}, True),
        ({"error": {"code": 400}}, False),
        ({"error": {"code": "upstream_error"}}, False),
        ({"error": {"code": 500}, "choices": [{"text": "a"}]}, False),
        ({"error": "500"}, False),
        ({"error": {"code": 50000}}, False),
    ],
)
@pytest.mark.parametrize("head", [b"", b"event: error\r\n", b"event: error\n"])
def test_a_failure_is_cut_off_with_all_of_its_event(error, is_failure, head):
    gap = b"\r\n\r\n" if b"\r" in head else b"\n\n"
    first = b"data: " + json.dumps(chunk({"content": "a"})).encode() + gap
    last = head + b"data: " + json.dumps(error).encode() + gap
    done = b"data: [DONE]" + gap
    assert before_failure(first + last + done) == (first if is_failure else first + last + done)
    assert before_failure(last) == (b"" if is_failure else last)


def test_half_an_event_is_told_from_one_without_its_blank_line():
    for whole in (b"data: [DONE]", b'data: {"a": 1}\n', b'data: {"a"\n\n', b"data: {}\r\n\r\n"):
        assert not is_half(whole)
    for half in (b'data: {"a"', b"dat"):
        assert is_half(half)
