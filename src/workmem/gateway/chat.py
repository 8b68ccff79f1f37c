"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from workmem.core.errors import ClientError
from workmem.core.generation import TokenLogprob
from workmem.gateway.exchange import Answer, Exchange, header_map, state_of
from workmem.gateway.failures import json_response
from workmem.gateway.generation import Generation, Order, Service, start
from workmem.gateway.models import require_model
from workmem.gateway.replies import chat_logprobs, tool_call_body, transfer_body, usage_body
from workmem.gateway.sse import DONE, KEEPALIVE, EventStream, event
from workmem.prompt.decode import convert, decode_json
from workmem.prompt.forced_calls import forced_schema, offered_names
from workmem.prompt.identity import identify, with_session
from workmem.prompt.messages import plain_content
from workmem.prompt.openai import ChatRequest
from workmem.prompt.sampling import chat_sampling
from workmem.prompt.tool_calls import ParsedCall, Piece, ToolCallParser


async def chat_completions(exchange: Exchange) -> Answer:
    """Answer a chat, whole or streamed."""
    service: Service = state_of(exchange.request, "service")
    raw = decode_json(exchange.body)
    request = convert(raw, ChatRequest)
    require_model(service.engine, request.model)
    if request.functions or request.function_call is not None:
        raise ClientError("functions and function_call are gone from the API: use tools.", param="functions")
    tools: list[dict[str, Any]] = raw.get("tools") or []
    sampling = chat_sampling(request, forced_schema(request, tools))
    messages = plain_content(raw["messages"], request.messages)
    # A long chat takes milliseconds to render: other clients' streams must not wait for it.
    prompt = await asyncio.to_thread(
        service.engine.render_chat, messages, tools=tools, template_kwargs=request.chat_template_kwargs
    )
    caller = identify(header_map(exchange.request), raw, tenant=exchange.tenant)
    order = Order(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        request_id=exchange.request_id,
        created=int(time.time()),
        prompts=[prompt],
        n=request.n or 1,
        sampling=sampling,
        caller=with_session(caller, service.sessions, request.model, messages),
        priority=request.priority or 0,
        reuse=request.allows_reuse,
        handoff=request.handoff,
    )
    reply = _Reply(service, request, order, await start(service, order, exchange))
    if request.stream:
        return EventStream(reply.events(), service.request_timeout_s)
    return json_response(await reply.whole())


class _Choice:
    """One choice as it grows: what is text, what is a call."""

    def __init__(self, names: list[str], *, calls_max: int | None) -> None:
        self._parser = ToolCallParser(names) if names else None
        self._calls_max = calls_max
        self.text: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason = ""
        self.has_started = False

    def take(self, text: str, finish_reason: str | None) -> list[str | dict[str, Any]]:
        """New content, and new calls as entries of `tool_calls`, after `text`."""
        pieces: list[Piece]
        if self._parser is None:
            pieces = [text] if text else []
        else:
            pieces = self._parser.feed(text)
            if finish_reason is not None:
                pieces += self._parser.finish()
        out: list[str | dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, ParsedCall):
                if self._calls_max is not None and len(self.calls) >= self._calls_max:
                    continue  # parallel_tool_calls=false
                self.calls.append(
                    tool_call_body(f"call_{uuid.uuid4().hex[:24]}", piece.name, piece.arguments)
                )
                out.append({"index": len(self.calls) - 1, **self.calls[-1]})
            else:
                self.text.append(piece)
                out.append(piece)
        if finish_reason is not None:
            self.finish_reason = "tool_calls" if self.calls and finish_reason == "stop" else finish_reason
        return out

    def message(self) -> dict[str, Any]:
        """The finished message."""
        content = "".join(self.text)
        body: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.calls:
            body |= {"content": content or None, "tool_calls": self.calls}
        return body


class _Reply:
    """The answer to one chat request."""

    def __init__(self, service: Service, request: ChatRequest, order: Order, generation: Generation) -> None:
        self._request = request
        self._order = order
        self._generation = generation
        self._model = service.engine.info.name
        calls_max = 1 if request.parallel_tool_calls is False else None
        names = offered_names(request)
        self._choices = [_Choice(names, calls_max=calls_max) for _ in range(order.n)]

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
                "message": choice.message(),
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
            else:
                bodies.append({"tool_calls": [piece]})
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
        return {"usage": usage_body(usages, n), **transfer_body(usages, n)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._order.id,
            "object": kind,
            "created": self._order.created,
            "model": self._model,
            "system_fingerprint": None,
        }
