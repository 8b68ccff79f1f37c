"""Requests of the Responses API as chats: what becomes what, and what is refused where."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.core.errors import ClientError
from workmem.prompt.decode import convert
from workmem.prompt.messages import plain_content
from workmem.prompt.openai import ChatRequest
from workmem.prompt.responses_chat import (
    as_chat,
    placed_input,
    read_request,
    reference_id,
    stored_item,
)
from workmem.prompt.thought_carrier import carried, carry


def translated(body):
    body = {"model": "m", **body}
    request = read_request(body)
    return as_chat(body, request, placed_input(request))


def chat_of(*items, **fields):
    return translated({"input": list(items), **fields}).chat


def messages_of(*items, **fields):
    chat = chat_of(*items, **fields)
    return plain_content(chat["messages"], convert(chat, ChatRequest).messages)


def user(text):
    return {"role": "user", "content": text}


def said(text, **fields):
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "id": "msg_1", "content": [part], **fields}


def call(name="look", call_id="c1", arguments='{"a": 1}', **fields):
    return {"type": "function_call", "name": name, "call_id": call_id, "arguments": arguments, **fields}


def output(text="seen", call_id="c1"):
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def tool_call(name="look", call_id="c1", arguments='{"a": 1}'):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_string_is_a_message_of_the_user_behind_the_instructions():
    made = translated({"input": "Hi", "instructions": "Be kind."})
    assert made.chat["messages"] == [{"role": "system", "content": "Be kind."}, user("Hi")]
    assert made.origins == {"messages[0].content": "instructions", "messages[1].content": "input"}


def test_a_turn_of_the_model_is_one_message():
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    made = translated(
        {
            "input": [
                user("Hi"),
                reasoning,
                said("Looking."),
                call(),
                call(call_id="c2"),
                output(),
                output([{"type": "input_text", "text": "also"}], "c2"),
                said("Done."),
            ]
        }
    )
    assert made.chat["messages"] == [
        user("Hi"),
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "Hm.",
            "tool_calls": [tool_call(), tool_call(call_id="c2")],
        },
        {"role": "tool", "content": "seen", "tool_call_id": "c1"},
        {"role": "tool", "content": "also", "tool_call_id": "c2"},
        {"role": "assistant", "content": "Done."},
    ]
    assert made.origins == {
        "messages[0].content": "input[0].content",
        "messages[1].content": "input[2].content[0].text",
        "messages[1].reasoning_content": "input[1].content",
        "messages[1].tool_calls[0].function.arguments": "input[3].arguments",
        "messages[1].tool_calls[1].function.arguments": "input[4].arguments",
        "messages[2].content": "input[5].output",
        "messages[3].content": "input[6].output[0].text",
        "messages[4].content": "input[7].content[0].text",
    }


@pytest.mark.parametrize(
    ("items", "contents"),
    [
        ([said("One."), said("Two.")], ["One.", "Two."]),
        ([said("One."), call(), said("Two."), output()], ["One.\nTwo.", "seen"]),
        ([call(), call(call_id="c2")], [""]),
        ([said("One."), user("Hi"), said("Two.")], ["One.", "Hi", "Two."]),
    ],
)
def test_what_makes_a_new_message_of_the_model(items, contents):
    assert [message["content"] for message in messages_of(*items)] == contents


def test_a_turn_with_nothing_but_calls_is_told_by_its_first_call():
    made = translated({"input": [user("Hi"), call(), output()]})
    assert made.origins["messages[1].content"] == "input[1]"


def test_several_parts_are_joined_as_in_a_chat_and_told_by_their_content():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    made = translated({"input": [{"role": "developer", "content": parts}]})
    assert made.origins == {
        "messages[0].content": "input[0].content",
        "messages[0].content[0]": "input[0].content[0].text",
        "messages[0].content[1]": "input[0].content[1].text",
    }
    assert made.passages == {"messages[0].content": ["a", "b"]}
    same = plain_content(
        [{"role": "developer", "content": [{"type": "text", "text": t} for t in "ab"]}],
        convert({"model": "m", "messages": made.chat["messages"]}, ChatRequest).messages,
    )
    assert (
        messages_of({"role": "developer", "content": parts})
        == same
        == [{"role": "developer", "content": "a\nb"}]
    )


def test_thinking_comes_back_from_a_client_that_keeps_only_what_is_encrypted():
    item = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": carry("Hm — so.")}
    made = translated({"input": [user("Hi"), item, said("Yes.")]})
    assert made.chat["messages"][1]["reasoning_content"] == "Hm — so."
    assert made.origins["messages[1].reasoning_content"] == "input[1].encrypted_content"
    assert not made.left_out


@pytest.mark.parametrize("sealed", ["gAAAA", "workmem-plain:%", "workmem-plain:_w=="])
def test_thinking_that_others_encrypted_is_left_out_and_told(sealed):
    made = translated(
        {"input": [user("Hi"), {"type": "reasoning", "summary": [], "encrypted_content": sealed}]}
    )
    assert made.chat["messages"] == [user("Hi")]
    assert [(one.path, one.type) for one in made.left_out] == [("input[1]", "reasoning")]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_what_is_carried_comes_back(text):
    assert carried(carry(text)) == text


LOOK = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object"},
    "strict": True,
}
PATCH = {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [LOOK, PATCH]}


def test_functions_keep_what_a_chat_has_and_their_order_of_keys():
    odd = {**LOOK, "defer_loading": False, "description": None}
    made = translated({"input": "Hi", "tools": [LOOK, odd | {"name": "other"}]})
    assert json.dumps(made.chat["tools"][0]["function"]) == json.dumps(
        {"name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}
    )
    assert made.chat["tools"][1]["function"] == {
        "name": "other",
        "parameters": {"type": "object"},
        "strict": True,
    }
    assert made.origins["tools[1]"] == "tools[1]"


def test_custom_tools_take_one_text_and_go_back_as_custom_tools():
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    made = translated({"input": "Hi", "tools": [{**PATCH, "format": grammar}]})
    function = made.chat["tools"][0]["function"]
    assert function["description"] == "Patches.\n\nThe input must match this grammar (lark):\nstart: /a+/"
    assert function["parameters"]["required"] == ["input"]
    assert made.tools.route("patch").is_custom
    history = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'é"\n'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
    ]
    asked, told = messages_of(user("Hi"), *history)[1:]
    assert asked["tool_calls"] == [tool_call("patch", arguments='{"input": "é\\"\\n"}')]
    assert told == {"role": "tool", "content": "ok", "tool_call_id": "c1"}


def test_namespaces_are_opened_and_closed_again():
    made = translated({"input": "Hi", "tools": [LOOK, AGENTS]})
    functions = [tool["function"] for tool in made.chat["tools"]]
    assert [function["name"] for function in functions] == ["look", "agents__look", "agents__patch"]
    assert [function["description"] for function in functions] == ["Looks.", "Agents.\n\nLooks.", "Patches."]
    assert made.origins["tools[2]"] == "tools[1].tools[1]"
    route = made.tools.route("agents__patch")
    assert (route.name, route.namespace, route.is_custom) == ("patch", "agents", True)
    assert made.tools.route("patch") == route
    assert made.tools.route("look").namespace is None
    assert made.tools.route("nothing").name == "nothing"
    asked = messages_of(user("Hi"), call(namespace="agents"))[1]
    assert asked["tool_calls"][0]["function"]["name"] == "agents__look"


def test_two_tools_that_the_model_could_not_tell_apart_are_refused():
    with pytest.raises(ClientError, match="another tool 'agents__look'") as caught:
        translated({"input": "Hi", "tools": [AGENTS, {**LOOK, "name": "agents__look"}]})
    assert caught.value.param == "tools[1].name"


def test_tools_that_a_server_would_run_are_left_out_and_told():
    made = translated(
        {"input": "Hi", "tools": [{"type": "web_search"}, LOOK, {"type": "mcp", "server_label": "x"}]}
    )
    assert [tool["function"]["name"] for tool in made.chat["tools"]] == ["look"]
    assert made.origins["tools[0]"] == "tools[1]"
    assert [(one.path, one.type) for one in made.left_out] == [
        ("tools[0]", "web_search"),
        ("tools[2]", "mcp"),
    ]
    assert made.tools.shown == [LOOK]


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("required", "required"),
        ({"type": "function", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "agents__patch"}}),
        (
            {"type": "function", "name": "look", "namespace": "agents"},
            {"type": "function", "function": {"name": "agents__look"}},
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "look"}, {"type": "web_search"}],
            },
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "look"}}],
                },
            },
        ),
    ],
)
def test_choices_of_tools(choice, chosen):
    made = translated({"input": "Hi", "tools": [LOOK, AGENTS, {"type": "web_search"}], "tool_choice": choice})
    assert made.chat["tool_choice"] == chosen
    convert(made.chat, ChatRequest)


@pytest.mark.parametrize(
    ("choice", "text", "param"),
    [
        ("sometimes", "sometimes", "tool_choice"),
        ({"type": "web_search_preview"}, "web_search_preview", "tool_choice.type"),
        ({"type": "function", "name": "fly"}, "'fly', which is not among tools", "tool_choice.name"),
        ({"type": "function"}, "name", "tool_choice.name"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "length", "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "none", "tool_choice.tools"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "fly"}]},
            "fly",
            "tool_choice.tools[0].name",
        ),
    ],
)
def test_choices_that_cannot_be_met(choice, text, param):
    with pytest.raises(ClientError, match=text) as caught:
        translated({"input": "Hi", "tools": [LOOK, AGENTS], "tool_choice": choice})
    assert caught.value.param == param


def test_options_of_a_chat():
    chat = chat_of(
        user("Hi"),
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        parallel_tool_calls=False,
        seed=3,
        workmem={"reuse": False},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}},
    )
    request = convert(chat, ChatRequest)
    assert (request.max_completion_tokens, request.temperature, request.top_p, request.seed) == (
        9,
        0.5,
        0.9,
        3,
    )
    assert (request.logprobs, request.top_logprobs, request.parallel_tool_calls) == (True, 2, False)
    assert request.response_format.json_schema.schema_ == {"type": "object"}
    assert request.chat_template_kwargs == {"reasoning_effort": "low"}
    assert not request.allows_reuse


def test_a_client_s_own_words_to_the_template_come_first():
    chat = chat_of(user("Hi"), reasoning={"effort": "low"}, chat_template_kwargs={"reasoning_effort": "high"})
    assert chat["chat_template_kwargs"] == {"reasoning_effort": "high"}


@pytest.mark.parametrize(
    ("body", "text", "param"),
    [
        ({}, "nothing to answer", "input"),
        ({"input": []}, "nothing to answer", "input"),
        ({"input": 3}, "Expected", "input"),
        ({"input": [3]}, "Expected `object`, got `int`", "input[0]"),
        ({"input": [{"type": "message"}]}, "role", "input[0].role"),
        ({"input": [{"type": "mcp_call", "id": "x"}]}, "choose one of 'message'", "input[0].type"),
        ({"input": [{"role": "tool", "content": ""}]}, "choose one of 'assistant'", "input[0].role"),
        (
            {"input": [user([{"type": "input_image", "image_url": "x"}])]},
            "text only",
            "input[0].content[0].type",
        ),
        ({"input": [user([{"type": "video"}])]}, "video", "input[0].content[0].type"),
        (
            {"input": [user([{"type": "input_text", "text": 1}])]},
            "Expected `str`",
            "input[0].content[0].text",
        ),
        ({"input": [call(arguments={})]}, "Expected `str`", "input[0].arguments"),
        ({"input": [output([{"type": "input_file"}])]}, "text only", "input[0].output[0].type"),
        ({"input": [{"id": "msg_9"}]}, "not held", "input[0].id"),
        ({"input": "Hi", "tools": [3]}, "Expected", "tools[0]"),
        ({"input": "Hi", "tools": [{"type": "function"}]}, "name", "tools[0].name"),
        ({"input": "Hi", "tools": [{**AGENTS, "tools": [{"type": "x"}]}]}, "'x'", "tools[0].tools[0].type"),
        ({"input": "Hi", "background": True}, "background", "background"),
        ({"input": "Hi", "conversation": "conv_1"}, "previous_response_id", "conversation"),
        ({"input": "Hi", "prompt": {"id": "p"}}, "instructions", "prompt"),
        ({"input": "Hi", "max_output_tokens": 0}, ">= 1", "max_output_tokens"),
        ({"input": "Hi", "text": {"format": {"type": "xml"}}}, "json_schema", "text.format.type"),
        (
            {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "s"}}},
            "schema",
            "text.format.schema",
        ),
        ({"input": "Hi", "truncation": "some"}, "choose one of 'auto'", "truncation"),
        ({"input": "Hi", "metadata": {"a": 1}}, "Expected `str`", "metadata[...]"),
    ],
)
def test_what_is_wrong_is_told_by_its_path(body, text, param):
    with pytest.raises(ClientError, match=text) as caught:
        translated(body)
    assert caught.value.param == param


def test_a_truncation_that_does_not_take_place_is_told():
    made = translated({"input": "Hi", "truncation": "auto"})
    assert [(one.path, one.type) for one in made.left_out] == [("truncation", "auto")]


def test_references_are_told_from_items():
    assert reference_id({"type": "item_reference", "id": "msg_1"}) == "msg_1"
    assert reference_id({"id": "msg_1"}) == "msg_1"
    assert reference_id({"id": "msg_1", "role": "user", "content": ""}) is None
    assert reference_id(3) is None
    assert reference_id({"type": "item_reference", "id": 4}) is None


ITEMS = [
    user("Hi"),
    said("Yes."),
    {"role": "assistant", "content": "Yes."},
    call(),
    output(),
    call(namespace="agents"),
    {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "y"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {
        "role": "developer",
        "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
    },
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(ITEMS), min_size=1, max_size=8))
def test_a_stored_item_means_what_it_meant(items):
    stored = [stored_item(item, f"{number:x}") for number, item in enumerate(items)]
    assert all(isinstance(item["id"], str) and item["type"] for item in stored)
    assert messages_of(*stored) == messages_of(*items)
    assert [stored_item(item, "other") for item in stored] == stored


@settings(deadline=None)
@given(st.lists(st.sampled_from(ITEMS), min_size=1, max_size=8))
def test_every_origin_is_a_place_of_the_body(items):
    body = {"input": items, "instructions": "Be kind.", "tools": [LOOK, AGENTS]}
    for place, path in translated(body).origins.items():
        assert place.split("[")[0] in ("messages", "tools")
        value = body
        for step in path.replace("[", ".[").split("."):
            value = value[int(step[1:-1])] if step.startswith("[") else value[step]


WORDS = st.sampled_from(
    [
        *(
            "type",
            "role",
            "content",
            "text",
            "id",
            "name",
            "input",
            "output",
            "call_id",
            "arguments",
            "tools",
        ),
        *("message", "function", "function_call", "function_call_output", "custom_tool_call", "reasoning"),
        *("item_reference", "namespace", "custom", "input_text", "output_text", "user", "assistant", "auto"),
        *("summary", "encrypted_content", "allowed_tools", "mode", "required", "format", "json_schema"),
    ]
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "é"]) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=12,
)


def place_of(body, path):
    """The deepest value that `path` leads to."""
    value = body
    for step in path.replace("[...]", "").replace("[", ".[").split("."):
        try:
            value = value[int(step[1:-1])] if step.startswith("[") else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            return False
    return True


FIELDS = ("input", "tools", "tool_choice", "text", "reasoning", "include", "instructions", "metadata")


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({"model": st.just("m")}, optional=dict.fromkeys(FIELDS, JUNK)))
def test_anything_is_translated_or_refused_by_a_path(body):
    _is_translated_or_refused(body)


MANGLED = st.tuples(
    st.sampled_from([*ITEMS, LOOK, PATCH, AGENTS]), st.dictionaries(WORDS, JUNK, max_size=2)
).map(lambda pair: {**pair[0], **pair[1]})


@settings(max_examples=300, deadline=None)
@given(st.lists(MANGLED, max_size=4), st.lists(MANGLED, max_size=3), JUNK)
def test_nearly_right_items_are_translated_or_refused_by_a_path(items, tools, choice):
    _is_translated_or_refused({"model": "m", "input": items, "tools": tools, "tool_choice": choice})


def _is_translated_or_refused(body):
    before = json.dumps(body)
    at = "model"
    try:
        chat = translated(body).chat
    except ClientError as error:
        at = error.param or "?"
    else:
        request = convert(chat, ChatRequest)
        plain_content(chat["messages"], request.messages)
    # A field that is missing has no place; what it is missing in has one.
    above = at.rpartition(".")[0]
    assert place_of(body, at) or at in FIELDS or (above and place_of(body, above)), at
    assert json.dumps(body) == before
