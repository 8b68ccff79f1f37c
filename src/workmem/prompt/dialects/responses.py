"""OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from workmem.prompt.dialects.places import (
    CallPlace,
    Dialect,
    ResultPlace,
    TextPlace,
    ToolPlace,
    objects_in,
    texts_of,
)


def _tools(body: Mapping[str, Any]) -> Iterator[ToolPlace]:
    for index, tool in objects_in(body.get("tools")):
        if tool.get("type") == "function":
            path = f"tools[{index}]"
            yield ToolPlace(path, index, tool, tool, path, "parameters")


def _texts(body: Mapping[str, Any]) -> Iterator[TextPlace]:
    if isinstance(body.get("instructions"), str):
        yield TextPlace("instructions", "system", -1, body, "instructions")
    if isinstance(body.get("input"), str):
        yield TextPlace("input", "user", 0, body, "input")
    for turn, item in objects_in(body.get("input")):
        yield from _texts_of_item(item, f"input[{turn}]", turn)


def _texts_of_item(item: dict[str, Any], path: str, turn: int) -> Iterator[TextPlace]:
    kind = item.get("type", "message")
    if kind == "message" and "content" in item:
        role = item.get("role")
        role = "system" if role == "developer" else role if isinstance(role, str) else ""
        yield from texts_of(item, "content", f"{path}.content", role, turn)
    elif kind in ("function_call_output", "custom_tool_call_output") and "output" in item:
        yield from texts_of(item, "output", f"{path}.output", "tool", turn)
    elif kind == "reasoning":
        for key in ("summary", "content"):
            if key in item:
                for place in texts_of(item, key, f"{path}.{key}", "assistant", turn):
                    yield place._replace(kind="thinking")


def _calls(body: Mapping[str, Any]) -> Iterator[CallPlace]:
    for turn, item in objects_in(body.get("input")):
        if item.get("type") == "function_call":
            yield CallPlace(f"input[{turn}]", turn, item, "arguments", item, "call_id")


def _results(body: Mapping[str, Any]) -> Iterator[ResultPlace]:
    for turn, item in objects_in(body.get("input")):
        if item.get("type") == "function_call_output":
            yield ResultPlace(f"input[{turn}]", turn, item, "call_id")


RESPONSES = Dialect("responses", "/v1/responses", "input", _tools, _texts, _calls, _results)
