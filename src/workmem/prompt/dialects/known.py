"""Which dialect a request is written in: by its path, or by the looks of a body that has lost its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workmem.prompt.dialects.chat import CHAT
from workmem.prompt.dialects.messages import MESSAGES
from workmem.prompt.dialects.places import Dialect, objects_in
from workmem.prompt.dialects.responses import RESPONSES

DIALECTS = (CHAT, RESPONSES, MESSAGES)
_BY_PATH = {dialect.path: dialect for dialect in DIALECTS}
_OF_ANTHROPIC = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})


def dialect_of_path(path: str) -> Dialect | None:
    """The dialect of `/v1/...`; None where it is of no prompt that is known."""
    return _BY_PATH.get(path.removesuffix("/count_tokens").rstrip("/"))


def dialect_of_body(body: Mapping[str, Any]) -> Dialect | None:
    """The dialect that a body seems to be written in; None where nothing says."""
    if "input" in body or "previous_response_id" in body:
        return RESPONSES
    if not isinstance(body.get("messages"), list):
        return None
    if "system" in body or any("input_schema" in tool for _, tool in objects_in(body.get("tools"))):
        return MESSAGES
    for _, message in objects_in(body["messages"]):
        for _, block in objects_in(message.get("content")):
            if block.get("type") in _OF_ANTHROPIC:
                return MESSAGES
    return CHAT
