"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from workmem.core.generation import Delta
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
from workmem.gateway.message_content import MessageContent
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
    ready = await render(
        service, chat.body, tenant=exchange.tenant, origins=chat.origins, passages=chat.passages
    )
    return json_response({"input_tokens": len(ready.read.rendered.token_ids)})


class _Reply:
    """The answer to one request."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._turn = asked.turns[0]
        self._known = asked.order.prompts[0].known
        self._model = asked.service.engine.info.name
        self._stopped_by: str | None = None
        self._content = MessageContent(asked.order.id)

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        async with aclosing(self._asked.generation.deltas()) as deltas:
            async for item in deltas:
                if item is not None:
                    for _ in self._take(item[1]):
                        pass
        return self._message(self._content.blocks) | self._end() | self._costs()

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a streamed answer."""
        has_started = False
        async with aclosing(self._asked.generation.deltas()) as deltas:
            async for item in deltas:
                if item is None:
                    yield PING
                    continue
                _, delta = item
                events = [] if has_started else [self._start(delta)]
                has_started = True
                if data := b"".join(map(named_event, [*events, *self._take(delta)])):
                    yield data
        last = {"type": "message_delta", "delta": self._end(), **self._costs()}
        yield named_event(last) + named_event({"type": "message_stop"})

    def _take(self, delta: Delta) -> Iterator[dict[str, Any]]:
        self._stopped_by = delta.stopped_by
        for piece in self._turn.take(delta.text, delta.finish_reason):
            match piece:
                case MadeCall():
                    yield from self._content.call(f"toolu_{piece.id.removeprefix('call_')}", piece.name)
                    yield from self._content.argue(piece.arguments)
                case Thought():
                    yield from self._content.think(piece.text)
                case _:
                    yield from self._content.say(piece)
        if delta.finish_reason is not None:
            yield from self._content.close()

    def _start(self, delta: Delta) -> dict[str, Any]:
        usage = {"input_tokens": len(self._asked.order.prompts[0].token_ids), "output_tokens": 0}
        if delta.usage is not None:
            usage = anthropic_usage(delta.usage, self._asked.canonical, self._known)
        start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return {"type": "message_start", "message": start}

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
        usage = anthropic_usage(usages[0], self._asked.canonical, self._known)
        return {"usage": usage, **transfer_body(usages, 1)}
