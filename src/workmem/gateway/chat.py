"""`POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from workmem.core.generation import TokenLogprob
from workmem.gateway.asking import Asked, ask, read_wire
from workmem.gateway.exchange import Answer, Exchange
from workmem.gateway.failures import json_response
from workmem.gateway.replies import chat_logprobs, tool_call_body, transfer_body, usage_body
from workmem.gateway.sse import DONE, KEEPALIVE, EventStream, event
from workmem.gateway.turn import MadeCall, Turn
from workmem.prompt.dialects.chat import CHAT
from workmem.prompt.thinking import Thought


async def chat_completions(exchange: Exchange) -> Answer:
    """Answer a chat, whole or streamed."""
    wire = read_wire(exchange, CHAT)
    asked = await ask(exchange, wire, wire.body, answer_id=f"chatcmpl-{uuid.uuid4().hex}")
    reply = _Reply(asked)
    if asked.request.stream:
        return EventStream(reply.events(), asked.service.request_timeout_s)
    return json_response(await reply.whole())


class _Reply:
    """The answer to one chat request."""

    def __init__(self, asked: Asked) -> None:
        self._request = asked.request
        self._order = asked.order
        self._generation = asked.generation
        self._model = asked.service.engine.info.name
        self._choices = asked.turns
        self._canonical = asked.canonical

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        async with aclosing(self._generation.deltas()) as deltas:
            async for item in deltas:
                if item is None:
                    continue
                index, delta = item
                self._choices[index].take(delta.text, delta.finish_reason)
                self._choices[index].logprobs.extend(delta.logprobs)
        choices = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": chat_logprobs(choice.logprobs) if self._request.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        body = self._head("chat.completion") | {"choices": choices}
        return body | self._costs()

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a streamed answer."""
        with_usage = self._request.wants_usage
        head = self._head("chat.completion.chunk") | ({"usage": None} if with_usage else {})
        async with aclosing(self._generation.deltas()) as deltas:
            async for item in deltas:
                if item is None:
                    yield KEEPALIVE
                    continue
                index, delta = item
                chunks = self._chunks(index, delta.text, delta.logprobs, delta.finish_reason)
                data = b"".join(event(head | {"choices": [chunk]}) for chunk in chunks)
                if data:
                    yield data
        if with_usage:
            yield event(head | {"choices": []} | self._costs())
        yield DONE

    def _chunks(
        self, index: int, text: str, logprobs: tuple[TokenLogprob, ...], finish_reason: str | None
    ) -> list[dict[str, Any]]:
        choice = self._choices[index]
        bodies: list[dict[str, Any]] = []
        if not choice.has_started:
            choice.has_started = True
            bodies.append({"role": "assistant", "content": ""})
        for piece in choice.take(text, finish_reason):
            if isinstance(piece, str):
                bodies.append({"content": piece})
            elif isinstance(piece, Thought):
                bodies.append({"reasoning_content": piece.text})
            else:
                bodies.append({"tool_calls": [{"index": piece.index, **_call(piece)}]})
        if self._request.logprobs and logprobs and not any("content" in body for body in bodies[-1:]):
            bodies.append({"content": ""})
        chunks: list[dict[str, Any]] = [
            {"index": index, "delta": body, "logprobs": None, "finish_reason": None} for body in bodies
        ]
        if self._request.logprobs and logprobs:
            chunks[-1]["logprobs"] = chat_logprobs(logprobs)
        if finish_reason is not None:
            last: dict[str, Any] = {
                "index": index,
                "delta": {},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            chunks.append(last)
        return chunks

    def _costs(self) -> dict[str, Any]:
        usages, n = self._generation.usages, self._order.n
        known = self._order.prompts[0].known
        return {"usage": usage_body(usages, n, self._canonical, known), **transfer_body(usages, n)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._order.id,
            "object": kind,
            "created": self._order.created,
            "model": self._model,
            "system_fingerprint": None,
        }


def _message(turn: Turn) -> dict[str, Any]:
    body: dict[str, Any] = {"role": "assistant", "content": turn.text, "refusal": None}
    if turn.thoughts:
        body["reasoning_content"] = turn.thinking
    if turn.calls:
        body |= {"content": turn.text or None, "tool_calls": [_call(call) for call in turn.calls]}
    return body


def _call(call: MadeCall) -> dict[str, Any]:
    return tool_call_body(call.id, call.name, call.arguments)
