"""Each lossless rule: what it does, and what it leaves alone."""

import copy
import itertools

import msgspec
import pytest

from workmem.prompt.canonical.canonicalise import canonicalise
from workmem.prompt.dialects.chat import CHAT
from workmem.prompt.dialects.messages import MESSAGES
from workmem.prompt.dialects.responses import RESPONSES

encode = msgspec.json.encode
HEADER = "x-anthropic-billing-header: cc_version=2.1.0.9f3; cc_entrypoint=cli; cch=4a1b2;"


def run(body, rule, dialect=CHAT):
    return canonicalise(copy.deepcopy(body), dialect, {rule})


def tool(name="read", **schema):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def schema_of(schema, rule="schema_key_order"):
    """What `rule` makes of a schema."""
    return run({"tools": [tool(**schema)]}, rule).body["tools"][0]["function"]["parameters"]


def test_keys_of_a_tool_are_put_in_the_order_in_which_they_read_best():
    mixed = {
        "function": {"parameters": {}, "strict": True, "name": "read", "description": "Reads."},
        "type": "function",
    }
    found = run({"tools": [mixed]}, "schema_key_order")
    assert list(found.body["tools"][0]) == ["type", "function"]
    assert list(found.body["tools"][0]["function"]) == ["name", "description", "parameters", "strict"]
    assert found.applied[0].paths == ("tools[0]",)


def test_properties_are_sorted_whatever_they_are_called():
    named = {"type": {"type": "string"}, "enum": {"enum": ["b", "a"]}, "default": {"b": 1, "a": 2}}
    found = schema_of({"properties": named})
    assert list(found["properties"]) == ["default", "enum", "type"]
    assert found["properties"]["enum"] == {"enum": ["b", "a"]}
    assert list(found["properties"]["default"]) == ["a", "b"]


@pytest.mark.parametrize("key", ["enum", "const", "default", "examples"])
def test_values_are_not_touched_at_any_depth(key):
    value = [{"z": 1, "a": {"required": ["z", "a"], "y": 0, "b": 0}}, 2, 1]
    assert encode(schema_of({key: value})) == encode({key: value})


@pytest.mark.parametrize("key", ["prefixItems", "oneOf", "anyOf", "allOf", "items"])
def test_lists_of_schemas_keep_their_order_and_what_is_in_them_is_sorted(key):
    found = schema_of({key: [{"title": "b", "type": "string"}, {"title": "a", "type": "null"}]})
    assert [list(one) for one in found[key]] == [["type", "title"], ["type", "title"]]
    assert [one["title"] for one in found[key]] == ["b", "a"]


def test_required_is_a_set_and_other_lists_are_not():
    found = schema_of({"required": ["b", "a", "b"], "x-order": ["b", "a"], "type": ["string", "null"]})
    assert found == {"type": ["string", "null"], "required": ["a", "b"], "x-order": ["b", "a"]}
    assert schema_of({"dependentRequired": {"q": ["b", "a"]}}) == {"dependentRequired": {"q": ["a", "b"]}}
    # A property of that name is a schema, and draft 3 had a boolean there.
    assert schema_of({"properties": {"required": {"enum": ["b", "a"]}}}) == {
        "properties": {"required": {"enum": ["b", "a"]}}
    }
    assert schema_of({"required": True}) == {"required": True}


def test_keys_that_no_schema_knows_are_sorted_at_every_depth_and_their_lists_are_not():
    found = schema_of({"x-a": {"z": {"b": 1, "a": [{"d": 1, "c": 2}, 0]}, "required": ["z", "a"]}})
    assert encode(found) == encode(
        {"x-a": {"required": ["z", "a"], "z": {"a": [{"c": 2, "d": 1}, 0], "b": 1}}}
    )


def test_all_orders_of_tools_come_out_as_one():
    tools = [tool(name) for name in ("read", "write", "list", "grep")]
    seen = {
        encode(run({"tools": list(order)}, "tool_order").body["tools"])
        for order in itertools.permutations(tools)
    }
    assert len(seen) == 1


def test_tools_of_one_name_keep_their_order_and_the_server_s_own_come_last():
    search = {"type": "web_search"}
    found = run(
        {"tools": [search, tool("b", title="1"), tool("a"), tool("b", title="2")]}, "tool_order", RESPONSES
    )
    assert not found.applied  # Chat's shape is no function of Responses.
    own = [
        {"type": "function", "name": name, "description": text}
        for name, text in (("b", "1"), ("a", ""), ("b", "2"))
    ]
    found = run({"tools": [search, *own]}, "tool_order", RESPONSES)
    assert found.body["tools"] == [own[1], own[0], own[2], search]
    assert [found.client_path(f"tools[{number}]") for number in range(4)] == [
        "tools[2]",
        "tools[1]",
        "tools[3]",
        "tools[0]",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "function", "function": {}},
        {"type": "function", "function": {"name": 5}},
        {"type": "function", "function": {"name": "a", "parameters": "none"}},
        {"type": "function", "function": {"name": "a", "description": ["x"]}},
    ],
)
def test_a_list_with_an_ill_formed_tool_keeps_its_order_so_that_it_is_refused_by_its_number(wrong):
    body = {"tools": [tool("z"), wrong]}
    assert run(body, "tool_order").body == body


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        ({"system": HEADER}, {}),
        ({"system": f"{HEADER}\nYou are Claude."}, {"system": "You are Claude."}),
        ({"system": f"{HEADER}\n\n  Indented"}, {"system": "  Indented"}),
        (
            {"system": [{"type": "text", "text": HEADER}, {"type": "text", "text": "You are Claude."}]},
            {"system": [{"type": "text", "text": "You are Claude."}]},
        ),
        ({"system": [{"type": "text", "text": HEADER}]}, {}),
    ],
)
def test_the_billing_header_goes_where_the_instructions_begin_with_it(body, rest):
    found = run(body, "attribution_header", MESSAGES)
    assert found.body == rest
    assert found.counts == {"attribution_header": 1}


@pytest.mark.parametrize(
    "body",
    [
        {"system": f"You are Claude.\n{HEADER}"},
        {"system": [{"type": "text", "text": "You are Claude."}, {"type": "text", "text": HEADER}]},
        {"system": [{"type": "image"}, {"type": "text", "text": HEADER}]},
        {"messages": [{"role": "user", "content": HEADER}]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": HEADER}]},
        {"system": "", "messages": [{"role": "system", "content": HEADER}]},
    ],
)
def test_the_billing_header_stays_anywhere_else(body):
    assert run(body, "attribution_header", MESSAGES).body == body


def test_the_billing_header_goes_on_the_way_through_openai_s_apis_too():
    user = {"role": "user", "content": "Hi"}
    found = run(
        {"messages": [{"role": "system", "content": f"{HEADER}\nBe brief."}, user]}, "attribution_header"
    )
    assert found.body["messages"] == [{"role": "system", "content": "Be brief."}, user]
    found = run({"messages": [{"role": "system", "content": HEADER}, user]}, "attribution_header")
    assert found.body["messages"] == [user]
    assert found.client_path("messages[0].content") == "messages[1].content"
    found = run({"instructions": f"{HEADER}\nBe brief.", "input": "Hi"}, "attribution_header", RESPONSES)
    assert found.body == {"instructions": "Be brief.", "input": "Hi"}


def test_two_requests_that_differ_in_the_header_alone_are_one():
    bodies = [
        {
            "system": [
                {"type": "text", "text": HEADER.replace("4a1b2", cch)},
                {"type": "text", "text": "Be brief."},
            ]
        }
        for cch in ("00000", "fffff")
    ]
    first, second = (encode(canonicalise(body, MESSAGES).body) for body in bodies)
    assert first == second
