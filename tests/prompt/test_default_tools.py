import copy
import json

import pytest

from workmem.core.errors import ClientError
from workmem.prompt.decode import convert
from workmem.prompt.default_tools import as_plain_chat, developer_as_system, render_tools_as_system
from workmem.prompt.forced_calls import forced_schema
from workmem.prompt.openai import ChatRequest
from workmem.prompt.tool_calls import ParsedCall, ToolCallParser

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"ä": {}}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"ä": 1}'}}


def test_tools_are_one_line_of_json_each_as_the_client_wrote_them():
    text = render_tools_as_system([TOOL, TOOL])
    assert text.splitlines()[2:4] == [json.dumps(TOOL["function"], ensure_ascii=False)] * 2


def test_tools_go_behind_the_system_message():
    chat = as_plain_chat(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"}], [TOOL]
    )
    assert chat.messages[0]["content"] == "Be kind.\n\n" + render_tools_as_system([TOOL])
    assert chat.paths == ["messages[0].content", "messages[1].content"]


def test_tools_make_a_system_message_where_there_is_none():
    chat = as_plain_chat([{"role": "user", "content": "x"}], [TOOL])
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert chat.paths == ["tools", "messages[0].content"]


def test_without_tools_a_plain_chat_is_left_alone():
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert as_plain_chat(messages).messages == messages


def test_a_call_is_written_as_the_parser_reads_it():
    chat = as_plain_chat([{"role": "assistant", "content": "Adding.", "tool_calls": [CALL, CALL]}])
    call = ParsedCall("add", '{"ä": 1}')
    parser = ToolCallParser(["add"])
    assert [*parser.feed(chat.messages[0]["content"]), *parser.finish()] == ["Adding.", call, call]


@pytest.mark.parametrize("arguments", ["{broken", "", None, {"a": 1}])
def test_odd_arguments_in_a_history_do_not_break_it(arguments):
    call = {"function": {"name": "add", "arguments": arguments}}
    text = as_plain_chat([{"role": "assistant", "content": None, "tool_calls": [call]}]).messages[0][
        "content"
    ]
    assert text.startswith('<tool_call>\n{"name": "add"')


def test_parallel_results_are_one_message_and_input_is_untouched():
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "user", "content": "and?"},
    ]
    before = copy.deepcopy(messages)
    chat = as_plain_chat(messages)
    assert messages == before
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "user", "user"]
    assert chat.messages[2]["content"] == (
        "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    )
    assert chat.paths == [f"messages[{i}].content" for i in (0, 1, 2, 4)]


def test_a_turn_stays_a_prefix_of_the_next():
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]}]
    longer = [*history, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "Done."}]
    assert as_plain_chat(longer, [TOOL]).messages[:3] == as_plain_chat(history, [TOOL]).messages


def test_developer_is_system():
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]
    assert [message["role"] for message in developer_as_system(messages)] == ["system", "user"]
    assert messages[0]["role"] == "developer"


def request(**fields):
    return convert({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)


def test_only_a_forced_choice_has_a_schema():
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        assert forced_schema(request(tools=[TOOL], **choice), [TOOL]) is None
    with pytest.raises(ClientError, match="at least one tool"):
        forced_schema(request(tool_choice="required"), [])


def test_references_inside_parameters_stay_valid():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "me": {"$ref": "#"}}}
    parameters = {"type": "object", "properties": {"node": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}
    tools = [TOOL, {"type": "function", "function": {"name": "walk", "parameters": parameters}}]
    schema = forced_schema(request(tools=tools, tool_choice="required"), tools)
    walk = schema["anyOf"][1]["properties"]["arguments"]
    assert walk == {"$ref": "#/$defs/t1"}
    moved = schema["$defs"]["t1"]
    assert moved["properties"]["node"] == {"$ref": "#/$defs/t1/$defs/Node"}
    assert moved["$defs"]["Node"]["properties"]["me"] == {"$ref": "#/$defs/t1"}
    llguidance = pytest.importorskip("llguidance")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    assert not llguidance.LLMatcher.validate_grammar(grammar)


def test_arguments_of_a_forced_call_are_closed_where_that_is_safe():
    inner = {"type": "object", "properties": {"a": {}}}
    parameters = {
        "type": "object",
        "properties": {
            "plain": inner,
            "list": {"type": "array", "items": inner},
            "open": inner | {"additionalProperties": True},
            "mixed": {"allOf": [inner, inner]},
        },
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    schema = forced_schema(request(tools=tools, tool_choice="required"), tools)
    arguments = schema["properties"]["arguments"]
    closed = inner | {"additionalProperties": False}
    assert arguments["additionalProperties"] is False
    assert arguments["properties"] == parameters["properties"] | {
        "plain": closed,
        "list": {"type": "array", "items": closed},
    }
