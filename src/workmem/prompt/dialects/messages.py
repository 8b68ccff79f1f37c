"""Anthropic's Messages."""

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
        if "input_schema" in tool:
            path = f"tools[{index}]"
            yield ToolPlace(path, index, tool, tool, path, "input_schema")


def _texts(body: Mapping[str, Any]) -> Iterator[TextPlace]:
    if "system" in body:
        yield from texts_of(body, "system", "system", "system", -1)
    for turn, message in objects_in(body.get("messages")):
        role = message.get("role")
        yield from _content(message, f"messages[{turn}].content", role if isinstance(role, str) else "", turn)


def _content(message: dict[str, Any], path: str, role: str, turn: int) -> Iterator[TextPlace]:
    if isinstance(message.get("content"), str):
        yield TextPlace(path, role, turn, message, "content")
    for number, block in objects_in(message.get("content")):
        here = f"{path}[{number}]"
        if isinstance(block.get("text"), str):
            yield TextPlace(f"{here}.text", role, turn, block, "text")
        elif isinstance(block.get("thinking"), str):
            yield TextPlace(f"{here}.thinking", role, turn, block, "thinking", "thinking")
        elif block.get("type") == "tool_result" and "content" in block:
            yield from texts_of(block, "content", f"{here}.content", "tool", turn)


def _calls(body: Mapping[str, Any]) -> Iterator[CallPlace]:
    for turn, number, block in _blocks(body, "tool_use"):
        yield CallPlace(f"messages[{turn}].content[{number}]", turn, block, "input", block, "id")


def _results(body: Mapping[str, Any]) -> Iterator[ResultPlace]:
    for turn, number, block in _blocks(body, "tool_result"):
        yield ResultPlace(f"messages[{turn}].content[{number}]", turn, block, "tool_use_id")


def _blocks(body: Mapping[str, Any], kind: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    for turn, message in objects_in(body.get("messages")):
        for number, block in objects_in(message.get("content")):
            if block.get("type") == kind:
                yield turn, number, block


MESSAGES = Dialect("messages", "/v1/messages", "messages", _tools, _texts, _calls, _results)
