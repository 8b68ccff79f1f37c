"""The output of a response as it grows: items, and the events that tell of them.

An item ends before the next one begins: thinking, then text, then calls, and text again where the model goes on.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from workmem.core.generation import Delta
from workmem.gateway.replies import chat_logprobs
from workmem.gateway.turn import MadeCall, Turn
from workmem.prompt.responses_tools import OfferedTools, custom_input

Event = dict[str, Any]
"""An event without its number: the stream counts."""


class ResponseOutput:
    """Takes deltas of the engine, and keeps the items they make."""

    def __init__(self, turn: Turn, tools: OfferedTools, *, with_logprobs: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._turn = turn
        self._tools = tools
        self._with_logprobs = with_logprobs
        self._logprobs: list[Any] = []
        """Of tokens whose text was not told yet."""
        self._open: dict[str, Any] | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the model had more to say than it was allowed to."""
        return self._turn.finish_reason == "length"

    def take(self, delta: Delta) -> Iterator[Event]:
        """What `delta` brings."""
        if self._with_logprobs:
            self._logprobs += chat_logprobs(delta.logprobs)["content"]
        for piece in self._turn.take(delta.text, delta.finish_reason):
            if isinstance(piece, MadeCall):
                yield from self._close("completed")
                yield from self._call(piece)
            elif isinstance(piece, str) and piece:
                yield from self._say(piece)
        if delta.finish_reason is not None:
            if not self.items:
                # An answer of nothing is a message that says nothing.
                yield from self._say("")
            yield from self._close("incomplete" if self.is_cut else "completed")

    def _say(self, text: str) -> Iterator[Event]:
        if self._open is None:
            yield from self._begin(
                {
                    "id": _new("msg"),
                    "type": "message",
                    "status": "in_progress",
                    "role": "assistant",
                    "content": [],
                }
            )
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._at("response.content_part.added", part=part)
            self._last()["content"] = [{**part, "logprobs": []}]
        part = self._last()["content"][0]
        told, self._logprobs = self._logprobs, []
        part["text"] += text
        part["logprobs"] += told
        if text:
            yield self._at("response.output_text.delta", delta=text, logprobs=told)

    def _close(self, status: str) -> Iterator[Event]:
        item, self._open = self._open, None
        if item is None:
            return
        part = item["content"][0]
        part["logprobs"] += self._logprobs
        self._logprobs = []
        yield self._at("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._at("response.content_part.done", part=part)
        yield from self._end(status)

    def _call(self, call: MadeCall) -> Iterator[Event]:
        route = self._tools.route(call.name)
        kind, field, event, text = "function_call", "arguments", "function_call_arguments", call.arguments
        if route.is_custom:
            kind, field, event = "custom_tool_call", "input", "custom_tool_call_input"
            text = custom_input(call.arguments)
        item: dict[str, Any] = {
            "id": _new("ctc" if route.is_custom else "fc"),
            "type": kind,
            "status": "in_progress",
            "call_id": call.id,
            "name": route.name,
            field: "",
        }
        if route.namespace is not None:
            item["namespace"] = route.namespace
        yield from self._begin(item)
        self._open = None
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        yield {"type": f"response.{event}.delta", **place, "delta": text}
        item[field] = text
        yield {"type": f"response.{event}.done", **place, "name": route.name, field: text}
        yield from self._end("completed")

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self.items.append(item)
        self._open = item
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": dict(item),
        }

    def _end(self, status: str) -> Iterator[Event]:
        item = self._last()
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _at(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self._last()["id"], "output_index": len(self.items) - 1, "content_index": 0}
        return {"type": kind, **place, **fields}

    def _last(self) -> dict[str, Any]:
        return self.items[-1]


def _new(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
