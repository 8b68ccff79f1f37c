"""OpenAI's Chat Completions."""

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

REASONING_KEYS = ("reasoning_content", "reasoning")
"""Under which servers of open models answer with thinking, and clients send it back."""


def _tools(body: Mapping[str, Any]) -> Iterator[ToolPlace]:
    for index, tool in objects_in(body.get("tools")):
        function = tool.get("function")
        if isinstance(function, dict):
            path = f"tools[{index}]"
            yield ToolPlace(path, index, tool, function, f"{path}.function", "parameters")


def _texts(body: Mapping[str, Any]) -> Iterator[TextPlace]:
    for turn, message in objects_in(body.get("messages")):
        path, role = f"messages[{turn}]", message.get("role")
        role = "system" if role == "developer" else role if isinstance(role, str) else ""
        for key in REASONING_KEYS:
            if isinstance(message.get(key), str):
                yield TextPlace(f"{path}.{key}", role, turn, message, key, "thinking")
        if "content" in message:
            yield from texts_of(message, "content", f"{path}.content", role, turn)


def _calls(body: Mapping[str, Any]) -> Iterator[CallPlace]:
    for turn, message in objects_in(body.get("messages")):
        for number, call in objects_in(message.get("tool_calls")):
            function = call.get("function")
            if isinstance(function, dict):
                path = f"messages[{turn}].tool_calls[{number}].function"
                yield CallPlace(path, turn, function, "arguments", call, "id")


def _results(body: Mapping[str, Any]) -> Iterator[ResultPlace]:
    for turn, message in objects_in(body.get("messages")):
        if message.get("role") == "tool":
            yield ResultPlace(f"messages[{turn}]", turn, message, "tool_call_id")


CHAT = Dialect("chat", "/v1/chat/completions", "messages", _tools, _texts, _calls, _results)
