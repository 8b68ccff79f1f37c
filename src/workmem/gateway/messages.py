"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from workmem.gateway.anthropic_shapes import (
    PING,
    anthropic_usage,
    named_event,
    stop_reason,
)
from workmem.gateway.asking import Asked, ask, read_wire, render
from workmem.gateway.exchange import Answer, Exchange, state_of
from workmem.gateway.failures import json_response
from workmem.gateway.generation import Service
from workmem.gateway.replies import transfer_body
from workmem.gateway.sse import EventStream
from workmem.gateway.turn import MadeCall
from workmem.prompt.dialects.messages import MESSAGES
from workmem.prompt.messages_to_chat import chat_of_count, chat_of_messages
from workmem.prompt.thinking import Thought


async def messages(exchange: Exchange) -> Answer:
    """Answer a message, whole or streamed."""
    wire = read_wire(exchange, MESSAGES)
    chat = chat_of_messages(wire.body)
    asked = await ask(
        exchange,
        wire,
        chat.body,
        answer_id=f"msg_{uuid.uuid4().hex}",
        origins=chat.origins,
        passages=chat.passages,
        is_cut_to_fit=True,
    )
    reply = _Reply(asked)
    if asked.request.stream:
        return EventStream(reply.events(), asked.service.request_timeout_s)
    return json_response(await reply.whole())


async def count_tokens(exchange: Exchange) -> Answer:
    """Say how many tokens a message's prompt has."""
    service: Service = state_of(exchange.request, "service")
    chat = chat_of_count(read_wire(exchange, MESSAGES).body)
    ready = await render(service, chat.body, origins=chat.origins, passages=chat.passages)
    return json_response({"input_tokens": len(ready.rendered.token_ids)})


class _Reply:
    """The answer to one request."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._turn = asked.turns[0]
        self._model = asked.service.engine.info.name
        self._stopped_by: str | None = None
        self._blocks: list[dict[str, Any]] = []
        """The content so far."""

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        async with aclosing(self._asked.generation.deltas()) as deltas:
            async for item in deltas:
                if item is not None:
                    _, delta = item
                    self._stopped_by = delta.stopped_by
                    for piece in self._turn.take(delta.text, delta.finish_reason):
                        self._add(piece)
        return self._message(self._blocks) | self._end() | self._costs()

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a streamed answer."""
        has_started = False
        async with aclosing(self._asked.generation.deltas()) as deltas:
            async for item in deltas:
                if item is None:
                    yield PING
                    continue
                _, delta = item
                events: list[dict[str, Any]] = []
                if not has_started:
                    has_started = True
                    prompt = len(self._asked.order.prompts[0].token_ids)
                    usage = {"input_tokens": prompt, "output_tokens": 0}
                    if delta.usage is not None:
                        usage = anthropic_usage(delta.usage)
                    start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
                    events.append({"type": "message_start", "message": start})
                self._stopped_by = delta.stopped_by
                for piece in self._turn.take(delta.text, delta.finish_reason):
                    events += self._piece_events(piece)
                if data := b"".join(map(named_event, events)):
                    yield data
        last: list[dict[str, Any]] = list(self._close())
        last.append({"type": "message_delta", "delta": self._end(), **self._costs()})
        yield b"".join(map(named_event, [*last, {"type": "message_stop"}]))

    def _piece_events(self, piece: str | Thought | MadeCall) -> Iterator[dict[str, Any]]:
        before = len(self._blocks)
        if not self._goes_on(piece):
            yield from self._close()
        self._add(piece)
        index, block = len(self._blocks) - 1, self._blocks[-1]
        match piece:
            case MadeCall():
                start = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            case Thought():
                start = {"type": "thinking", "thinking": "", "signature": ""}
                delta = {"type": "thinking_delta", "thinking": piece.text}
            case _:
                start = {"type": "text", "text": ""}
                delta = {"type": "text_delta", "text": piece}
        if len(self._blocks) > before:
            yield {"type": "content_block_start", "index": index, "content_block": start}
        yield {"type": "content_block_delta", "index": index, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._blocks:
            return
        index, block = len(self._blocks) - 1, self._blocks[-1]
        if block["type"] == "thinking":
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}

    def _goes_on(self, piece: str | Thought | MadeCall) -> bool:
        """Whether the last block is the one that `piece` belongs to."""
        kind = "thinking" if isinstance(piece, Thought) else "text" if isinstance(piece, str) else ""
        return bool(self._blocks) and self._blocks[-1]["type"] == kind

    def _add(self, piece: str | Thought | MadeCall) -> None:
        if isinstance(piece, MadeCall):
            call_id = f"toolu_{piece.id.removeprefix('call_')}"
            call = {
                "type": "tool_use",
                "id": call_id,
                "name": piece.name,
                "input": json.loads(piece.arguments),
            }
            self._blocks.append(call)
            return
        key, text = ("thinking", piece.text) if isinstance(piece, Thought) else ("text", piece)
        if not self._goes_on(piece):
            self._blocks.append({"type": key, key: ""})
        block = self._blocks[-1]
        block[key] += text
        if key == "thinking":
            # Nothing here reads it; clients want one.
            block["signature"] = self._asked.order.id

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._asked.order.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _end(self) -> dict[str, Any]:
        reason = stop_reason(self._turn.finish_reason, self._stopped_by)
        asked_for = self._asked.request.max_tokens
        if reason == "max_tokens" and self._asked.order.sampling.max_tokens != asked_for:
            reason = "model_context_window_exceeded"
        return {
            "stop_reason": reason,
            "stop_sequence": self._stopped_by if reason == "stop_sequence" else None,
        }

    def _costs(self) -> dict[str, Any]:
        usages = self._asked.generation.usages
        return {"usage": anthropic_usage(usages[0]), **transfer_body(usages, 1)}
