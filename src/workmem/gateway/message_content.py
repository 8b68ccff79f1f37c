"""The content of a message of Anthropic's API as it grows: blocks, and the events that tell of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]


class MessageContent:
    """One block is open at a time: what is of another kind closes it. `close` the last one."""

    def __init__(self, signature: str) -> None:
        """`signature` is given to thoughts: nothing here reads it, but clients want one."""
        self.blocks: list[dict[str, Any]] = []
        self._signature = signature
        self._open: dict[str, Any] | None = None
        self._arguments: list[str] = []

    def think(self, text: str) -> Iterator[Event]:
        """The model thinks."""
        yield from self._add("thinking", text, {"signature": ""})

    def say(self, text: str) -> Iterator[Event]:
        """The model says something."""
        yield from self._add("text", text, {})

    def call(self, call_id: str, name: str) -> Iterator[Event]:
        """The model begins a call; its arguments follow."""
        yield from self.close()
        block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        yield from self._begin(block)

    def argue(self, fragment: str) -> Iterator[Event]:
        """Some of the JSON text of the arguments of the call that is open."""
        self._arguments.append(fragment)
        yield self._delta({"type": "input_json_delta", "partial_json": fragment})

    def close(self) -> Iterator[Event]:
        """The block that is open has ended."""
        block, self._open = self._open, None
        if block is None:
            return
        if block["type"] == "thinking":
            block["signature"] = self._signature
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        elif block["type"] == "tool_use":
            block["input"] = input_of("".join(self._arguments)) or {}
            self._arguments = []
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _add(self, kind: str, text: str, more: dict[str, Any]) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            yield from self._begin({"type": kind, kind: "", **more})
        self.blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        self.blocks.append(block)
        self._open = block
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def input_of(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call; None where they are no JSON object."""
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
