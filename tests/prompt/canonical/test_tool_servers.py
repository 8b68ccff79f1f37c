"""Tools as a real MCP server lists them: an upgrade that means the same, and any order, are one text."""

import json
import random
from pathlib import Path

import msgspec
from tests.prompt.canonical.bodies import shuffled

from workmem.prompt.canonical.canonicalise import canonicalise
from workmem.prompt.dialects.chat import CHAT
from workmem.prompt.dialects.messages import MESSAGES
from workmem.prompt.dialects.responses import RESPONSES

MEMORY = Path(__file__).parents[2] / "data" / "mcp_memory_tools.json"
"""`tools/list` of @modelcontextprotocol/server-memory 2025.8.4, MIT."""
encode = msgspec.json.encode


def listed():
    return json.loads(MEMORY.read_text(encoding="utf-8"))["tools"]


def body_of(tools, dialect):
    """As a client of `dialect` offers them."""
    if dialect is MESSAGES:
        offered = [
            {"name": t["name"], "description": t["description"], "input_schema": t["inputSchema"]}
            for t in tools
        ]
    else:
        flat = [
            {"name": t["name"], "description": t["description"], "parameters": t["inputSchema"]}
            for t in tools
        ]
        offered = [
            {"type": "function", "function": one} if dialect is CHAT else {"type": "function", **one}
            for one in flat
        ]
    return {"tools": offered, dialect.history_key: []}


def upgraded(tools):
    """As a newer release lists the same tools: other key order, and `$schema`."""
    return [
        {
            "inputSchema": shuffled(
                {**tool["inputSchema"], "$schema": "http://json-schema.org/draft-07/schema#"}, number
            ),
            "description": tool["description"],
            "name": tool["name"],
        }
        for number, tool in enumerate(tools)
    ]


def test_an_upgrade_of_key_order_and_schema_edition_leaves_every_tool_identical():
    for dialect in (CHAT, MESSAGES, RESPONSES):
        before = canonicalise(body_of(listed(), dialect), dialect).body["tools"]
        after = canonicalise(body_of(upgraded(listed()), dialect), dialect).body["tools"]
        assert [encode(one) == encode(other) for one, other in zip(before, after, strict=True)] == [True] * 9


def test_the_list_in_twenty_orders_is_one_text_and_lists_the_same_tools():
    seen = set()
    for seed in range(20):
        tools = listed()
        random.Random(seed).shuffle(tools)
        found = canonicalise(body_of(tools, CHAT), CHAT).body["tools"]
        seen.add(encode(found))
        was = {tool["name"]: tool for tool in listed()}
        for tool in found:
            # Sets aside, which are sorted, it says what the server said.
            schema = was[tool["function"]["name"]]["inputSchema"]
            assert encode(tool["function"]["parameters"], order="sorted") == encode(
                _sets_sorted(schema), order="sorted"
            )
    assert len(seen) == 1


def _sets_sorted(schema):
    if isinstance(schema, dict):
        return {
            key: sorted(value) if key == "required" and isinstance(value, list) else _sets_sorted(value)
            for key, value in schema.items()
        }
    return [_sets_sorted(one) for one in schema] if isinstance(schema, list) else schema
