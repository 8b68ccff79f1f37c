"""Anthropic's Messages as a chat: the same meaning, and every path back."""

import copy
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workmem.core.errors import ClientError
from workmem.prompt.decode import convert
from workmem.prompt.dialects.messages import MESSAGES
from workmem.prompt.messages_to_chat import chat_of_count, chat_of_messages
from workmem.prompt.openai import ChatRequest

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "f", "description": "Does f.", "input_schema": {"type": "object", "properties": {}}}


def body(*messages, **fields):
    return {"model": "m", "max_tokens": 10, "messages": list(messages), **fields}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def text(value, **fields):
    return {"type": "text", "text": value, **fields}


def use(call_id="c1", name="f", **arguments):
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(content, call_id="c1", **fields):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def at(raw, path):
    """What stands at `path` of `raw`."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        raw = raw[int(index)] if index else raw[name]
    return raw


def messages_of(raw):
    return chat_of_messages(raw).body["messages"]


def test_system_text_and_turns():
    raw = body(
        user("Hi"), assistant([text("Yes"), text("?")]), user([text("a"), text("b")]), system="Be kind."
    )
    assert messages_of(raw) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        # What a model said is one text, however it was cut; what others say stands in lines of its own.
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "a\nb"},
    ]


def test_calls_and_results():
    raw = body(
        user("Go"),
        assistant([text("I call."), use(x=1, y="ü"), use("c2", name="g")]),
        user([text("and now?"), result("one"), result([text("two"), text("three")], "c2")]),
        tools=[TOOL, {**TOOL, "name": "g"}],
    )
    chat = chat_of_messages(raw)
    assert chat.body["messages"][1:] == [
        {
            "role": "assistant",
            "content": "I call.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"x": 1, "y": "ü"}'},
                },
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two\nthree"},
        {"role": "user", "content": "and now?"},
    ]
    assert chat.body["tools"][0] == {
        "type": "function",
        "function": {"name": "f", "description": "Does f.", "parameters": TOOL["input_schema"]},
    }
    assert chat.origins["messages[1].tool_calls[1].function.arguments"] == "messages[1].content[2].input"
    assert chat.origins["messages[2].content"] == "messages[2].content[1].content"
    assert chat.origins["messages[3].content[1]"] == "messages[2].content[2].content[1].text"
    assert chat.origins["messages[4].content"] == "messages[2].content[0].text"


def test_a_call_without_result_text_and_one_that_failed():
    raw = body(
        user("Go"),
        assistant([use(), use("c2"), use("c3")]),
        user(
            [
                {"type": "tool_result", "tool_use_id": "c1"},
                result("no such file", "c2", is_error=True),
                result("Error: gone", "c3", is_error=True),
            ]
        ),
    )
    assert [one["content"] for one in messages_of(raw)[2:]] == ["", "Error:\nno such file", "Error: gone"]


def test_thoughts_go_back_and_hidden_ones_are_passed_over():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        text("So."),
    ]
    chat = chat_of_messages(body(user("Hi"), assistant(blocks), user("And?")))
    assert chat.body["messages"][1] == {"role": "assistant", "content": "So.", "reasoning_content": "hm"}
    assert chat.origins["messages[1].reasoning_content"] == "messages[1].content[0].thinking"


def test_what_one_role_says_in_a_row_is_one_message():
    raw = body(
        user("a"), user([text("b")]), assistant("c"), assistant([use()]), user([result("d")]), user("e")
    )
    chat = chat_of_messages(raw)
    assert [(m["role"], m["content"]) for m in chat.body["messages"]] == [
        ("user", "a\nb"),
        ("assistant", "c"),
        ("tool", "d"),
        ("user", "e"),
    ]
    assert chat.origins["messages[0].content[1]"] == "messages[1].content[0].text"
    assert chat.passages["messages[0].content"] == ["a", "b"]


def test_instructions_in_the_history_stay_there():
    raw = body(
        user("a"), {"role": "system", "content": [text("b", **EPHEMERAL)], "output_config": {}}, system="s"
    )
    assert [m["role"] for m in messages_of(raw)] == ["system", "user", "system"]
    brief = {"role": "system", "content": "b", "clear_at": "next_user_message"}
    assert [m["role"] for m in messages_of(body(user("a"), brief))] == ["user", "system"]
    assert [m["content"] for m in messages_of(body(user("a"), brief, assistant("c"), user("d")))] == [
        "a",
        "c",
        "d",
    ]


def test_marks_for_a_cache_change_nothing():
    marked = body(
        user([text("a", **EPHEMERAL)]),
        system=[text("s", cache_control={"type": "ephemeral", "ttl": "1h"})],
        tools=[{**TOOL, **EPHEMERAL}],
        cache_control={"type": "ephemeral"},
    )
    plain = body(user([text("a")]), system=[text("s")], tools=[TOOL])
    assert chat_of_messages(marked) == chat_of_messages(plain)
    with pytest.raises(ClientError, match="At most 4") as caught:
        chat_of_messages({**marked, "messages": [user([text("a", **EPHEMERAL), text("b", **EPHEMERAL)])]})
    assert caught.value.param == "cache_control"


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, {}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"parallel_tool_calls": False}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ],
)
def test_tool_choice(choice, fields):
    chat = chat_of_messages(body(user("Hi"), tools=[TOOL], tool_choice=choice)).body
    assert {key: chat[key] for key in ("tool_choice", "parallel_tool_calls") if key in chat} == fields


def test_fields_of_sampling_and_of_ours():
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stream": True,
        "workmem": {"reuse": False},
        "seed": 1,
    }
    chat = chat_of_messages(
        body(
            user("Hi"),
            stop_sequences=["x"],
            thinking={"type": "disabled"},
            chat_template_kwargs={"mood": "calm"},
            metadata={"user_id": "u"},
            service_tier="auto",
            **fields,
        )
    ).body
    kwargs = {"enable_thinking": False, "mood": "calm"}
    assert chat == {
        "model": "m",
        "max_tokens": 10,
        "messages": [user("Hi")],
        "stop": ["x"],
        "chat_template_kwargs": kwargs,
        **fields,
    }


def test_a_deferred_tool_is_rendered_once_it_is_wanted():
    later = {**TOOL, "name": "later", "defer_loading": True}
    tools = [TOOL, later]

    def names(*messages):
        chat = chat_of_messages(body(user("Hi"), *messages, tools=tools))
        return [tool["function"]["name"] for tool in chat.body["tools"]], chat.origins

    assert names()[0] == ["f"]
    loaded = [assistant([use()]), user([result([{"type": "tool_reference", "tool_name": "later"}])])]
    found, origins = names(*loaded)
    assert (found, origins["tools[1]"]) == (["f", "later"], "tools[1]")
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}}
    assert names({"role": "system", "content": [added]})[0] == ["f", "later"]
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}
    found, origins = names({"role": "system", "content": [added, removed]})
    assert (found, origins["tools[0]"]) == (["later"], "tools[1]")
    new = {
        "type": "tool_addition",
        "tool": {"type": "tool_definition", "definition": {**TOOL, "name": "new"}},
    }
    found, origins = names({"role": "system", "content": [new]})
    assert (found, origins["tools[1]"]) == (["f", "new"], "messages[1].content[0].tool.definition")


@pytest.mark.parametrize(
    ("raw", "param", "says"),
    [
        (body(user([{"type": "image", "source": {}}])), "messages[0].content[0].type", "image"),
        (body(user([result([{"type": "image"}])])), "messages[0].content[0].content[0].type", "image"),
        (body(user([{"type": "document"}])), "messages[0].content[0].type", "document"),
        (body(user([{"type": "server_tool_use"}])), "messages[0].content[0].type", "choose one of"),
        (body(user([use()])), "messages[0].content[0].type", "'tool_use'"),
        (body(assistant([result("x")])), "messages[0].content[0].type", "'tool_result'"),
        (body({"role": "tool", "content": "x"}), "messages[0].role", "'user', 'assistant', 'system'"),
        (body(user("Hi"), assistant("{")), "messages[1].role", "prefill"),
        (body(user("")), "messages", "No message"),
        (body(), "messages", "length"),
        (body(user("Hi"), max_tokens=0), "max_tokens", ">= 1"),
        (body(user("Hi"), temperature=3), "temperature", "<= 2"),
        (body(user("Hi"), system=[{"type": "image"}]), "system[0].type", "'text'"),
        (body(user("Hi"), tools=[{"type": "bash_20250124", "name": "bash"}]), "tools[0]", "bash_20250124"),
        (body(user("Hi"), tools=[{**TOOL, "type": "other"}]), "tools[0]", "other"),
        (body(user("Hi"), tools=[TOOL, TOOL]), "tools[1].name", "must differ"),
        (
            body(user("Hi"), tools=[TOOL], tool_choice={"type": "tool", "name": "g"}),
            "tool_choice.name",
            "'g'",
        ),
        (body(user("Hi"), tool_choice={"type": "any"}), "tool_choice", "at least one"),
        (
            body(user([text("x", cache_control={"type": "hard"})])),
            "messages[0].content[0].cache_control.type",
            "hard",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_place(raw, param, says):
    with pytest.raises(ClientError, match=re.escape(says)) as caught:
        chat_of_messages(raw)
    assert caught.value.param == param


def test_max_tokens_is_needed_to_answer_and_not_to_count():
    raw = {"model": "m", "messages": [user("Hi")]}
    assert chat_of_count(raw).body == raw
    with pytest.raises(ClientError, match="max_tokens") as caught:
        chat_of_messages(raw)
    assert caught.value.param == "max_tokens"


WORDS = st.sampled_from(["", "a", "a b", "\n", "ü", "error"])
TEXT = st.builds(text, WORDS)
SCHEMA = st.dictionaries(
    st.sampled_from("xyz"), st.integers() | WORDS | st.lists(st.booleans(), max_size=2), max_size=3
)
CALLS = st.builds(lambda arguments, call_id: use(call_id, **arguments), SCHEMA, st.sampled_from(["c1", "c2"]))
THOUGHT = st.builds(lambda words: {"type": "thinking", "thinking": words, "signature": ""}, WORDS)
RESULTS = st.builds(result, WORDS | st.lists(TEXT, max_size=3), st.sampled_from(["c1", "c2"]))
TURNS = st.lists(
    st.builds(user, WORDS | st.lists(TEXT | RESULTS, max_size=4))
    | st.builds(assistant, WORDS | st.lists(TEXT | CALLS | THOUGHT, max_size=4))
    | st.builds(lambda content: {"role": "system", "content": content}, WORDS | st.lists(TEXT, max_size=2)),
    max_size=6,
)
BODIES = st.builds(
    lambda turns, system: body(*turns, user("end"), system=system, tools=[TOOL]),
    TURNS,
    WORDS | st.lists(TEXT, max_size=3),
)


@given(BODIES)
def test_a_chat_has_all_texts_and_each_knows_its_place(raw):
    before = copy.deepcopy(raw)
    chat = chat_of_messages(raw)
    assert raw == before
    convert(chat.body, ChatRequest)
    told = []
    for turn, message in enumerate(chat.body["messages"]):
        for key in ("reasoning_content", "content"):
            field = f"messages[{turn}].{key}"
            passages = chat.passages.get(field, [])
            told += [(chat.origins[f"{field}[{n}]"], passage) for n, passage in enumerate(passages)]
            cursor = 0
            for passage in passages:
                cursor = message[key].index(passage, cursor) + len(passage)
    for path, passage in told:
        assert at(raw, path) == passage
    # Places are the dialect's own, found by other means.
    assert sorted(told) == sorted((place.path, place.text) for place in MESSAGES.texts(raw) if place.text)
    calls = [call for message in chat.body["messages"] for call in message.get("tool_calls", ())]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [
        place.holder["input"] for place in MESSAGES.calls(raw)
    ]


@given(BODIES, st.data())
def test_an_append_never_changes_what_was_said_before(raw, data):
    whole = chat_of_messages(raw).body["messages"]
    more = data.draw(TURNS)
    raw["messages"] += [assistant("done"), *more, user("on")]
    assert chat_of_messages(raw).body["messages"][: len(whole)] == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "role", "content", "messages", "model", "max_tokens", "name", "tool_use_id"]
            ),
            inner
            | st.sampled_from(["user", "assistant", "text", "tool_use", "tool_result", "thinking", "any"]),
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(BODIES, st.data())
def test_any_json_is_a_chat_or_an_error_whose_path_is_there(raw, data):
    raw = copy.deepcopy(raw)
    holder, keys = raw, list(raw)
    for _ in range(data.draw(st.integers(0, 5))):
        key = data.draw(st.sampled_from(keys))
        if isinstance(holder[key], dict | list) and holder[key]:
            holder = holder[key]
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key = data.draw(st.sampled_from(keys))
    if data.draw(st.booleans()):
        holder[key] = data.draw(JSON)
    elif isinstance(holder, dict):
        del holder[key]
    try:
        chat = chat_of_messages(raw)
        convert(chat.body, ChatRequest)
    except ClientError as error:
        param = error.param or ""
        try:
            at(raw, param)
        except (KeyError, IndexError, TypeError):
            # Of a field that is missing, the object that lacks it is there.
            parent, _, name = param.rpartition(".")
            assert name not in at(raw, parent)
