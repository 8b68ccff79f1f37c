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
from workmem.prompt.thinking import Thought
from workmem.prompt.thought_carrier import carry

Event = dict[str, Any]
"""An event without its number: the stream counts."""


_KINDS = {"message": ("msg", "output_text"), "reasoning": ("rs", "reasoning_text")}
"""Of items of text: how their ids begin, and what their part, and its events, are called."""


class ResponseOutput:
    """Takes deltas of the engine, and keeps the items they make.

    `is_carried`: thinking is put into `encrypted_content` too, as the client asked for.
    """

    def __init__(self, turn: Turn, tools: OfferedTools, *, with_logprobs: bool, is_carried: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._turn = turn
        self._tools = tools
        self._with_logprobs = with_logprobs
        self._is_carried = is_carried
        self._logprobs: list[Any] = []
        """Of tokens whose text was not told yet."""
        self._open: dict[str, Any] | None = None
        self._tokens_before_answer = 0

    @property
    def is_cut(self) -> bool:
        """Whether the model had more to say than it was allowed to."""
        return self._turn.finish_reason == "length"

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the end of its thoughts, marks included; 0 where it had none."""
        return self._tokens_before_answer if self._turn.thoughts else 0

    def take(self, delta: Delta) -> Iterator[Event]:
        """What `delta` brings."""
        if self._with_logprobs:
            self._logprobs += chat_logprobs(delta.logprobs)["content"]
        pieces = self._turn.take(delta.text, delta.finish_reason)
        if not self._turn.texts and not self._turn.calls:
            self._tokens_before_answer += len(delta.token_ids)
        for piece in pieces:
            if isinstance(piece, MadeCall):
                yield from self._close("completed")
                yield from self._call(piece)
            elif isinstance(piece, Thought):
                yield from self._say("reasoning", piece.text)
            elif piece:
                yield from self._say("message", piece)
        if delta.finish_reason is not None:
            if not self.items:
                # An answer of nothing is a message that says nothing.
                yield from self._say("message", "")
            yield from self._close("incomplete" if self.is_cut else "completed")

    def _say(self, kind: str, text: str) -> Iterator[Event]:
        prefix, part_kind = _KINDS[kind]
        if self._open is not None and self._open["type"] != kind:
            yield from self._close("completed")
        if self._open is None:
            item: dict[str, Any] = {"id": _new(prefix), "type": kind, "status": "in_progress"}
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            if kind == "message":
                item |= {"role": "assistant", "content": []}
                part |= {"annotations": [], "logprobs": []}
            else:
                item |= {"summary": [], "content": [], "encrypted_content": None}
            yield from self._begin(item)
            yield self._at("response.content_part.added", part=part)
            item["content"] = [{**part, "logprobs": []} if kind == "message" else dict(part)]
        self._last()["content"][0]["text"] += text
        if text:
            yield self._at(f"response.{part_kind}.delta", delta=text, **self._told(kind))

    def _told(self, kind: str) -> dict[str, Any]:
        """The log probabilities that a delta of text has, which only a message keeps."""
        told, self._logprobs = self._logprobs, []
        if kind != "message":
            return {}
        self._last()["content"][0]["logprobs"] += told
        return {"logprobs": told}

    def _close(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        kind, part = item["type"], item["content"][0]
        self._told(kind)
        logprobs = {"logprobs": part["logprobs"]} if kind == "message" else {}
        if kind == "reasoning" and self._is_carried:
            item["encrypted_content"] = carry(part["text"])
        yield self._at(f"response.{part['type']}.done", text=part["text"], **logprobs)
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
        item, self._open = self._last(), None
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _at(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self._last()["id"], "output_index": len(self.items) - 1, "content_index": 0}
        return {"type": kind, **place, **fields}

    def _last(self) -> dict[str, Any]:
        return self.items[-1]


def _new(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
