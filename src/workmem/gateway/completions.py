"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from workmem.core.errors import ClientError
from workmem.core.generation import Delta, Engine, RenderedPrompt, Span, TokenLogprob
from workmem.gateway.exchange import Answer, Exchange, header_map, state_of
from workmem.gateway.explain import explain_in_header
from workmem.gateway.failures import json_response
from workmem.gateway.generation import Generation, Order, Service, start
from workmem.gateway.models import require_model
from workmem.gateway.replies import completion_logprobs, transfer_body, usage_body
from workmem.gateway.sse import DONE, KEEPALIVE, EventStream, event
from workmem.prompt.decode import convert, decode_json
from workmem.prompt.hint_dialects import hints_of
from workmem.prompt.openai import CHOICES_MAX, CompletionRequest
from workmem.prompt.sampling import completion_sampling
from workmem.prompt.sessions import history_of


async def completions(exchange: Exchange) -> Answer:
    """Complete one or several prompts, whole or streamed."""
    service: Service = state_of(exchange.request, "service")
    raw = decode_json(exchange.body)
    request = convert(raw, CompletionRequest)
    require_model(service.engine, request.model)
    sampling = completion_sampling(request)
    prompts = await asyncio.to_thread(_prompts, service.engine, request.prompt)
    n = request.n or 1
    if len(prompts) * n > CHOICES_MAX:
        raise ClientError(
            f"{len(prompts)} prompts times n={n} exceeds {CHOICES_MAX} completions.", param="prompt"
        )
    headers = header_map(exchange.request)
    hints = hints_of(headers, raw)
    caller = service.callers.who(
        headers,
        raw,
        tenant=exchange.tenant,
        model=request.model,
        history=history_of(raw),
    )
    order = Order(
        id=f"cmpl-{uuid.uuid4().hex}",
        request_id=exchange.request_id,
        created=int(time.time()),
        prompts=prompts,
        n=n,
        sampling=sampling,
        caller=caller,
        priority=-hints.priority if request.priority is None else request.priority,
        reuse=request.allows_reuse,
        handoff=request.handoff,
        hints=hints,
    )
    kept = None
    if len(prompts) == 1:
        kept = service.explainer.recent.add(
            exchange.body, raw, None, space=exchange.tenant, session=order.caller.session
        )
        explain_in_header(exchange, service.explainer, kept)
    reply = _Reply(service, request, order, await start(service, order, exchange, kept))
    if request.stream:
        return EventStream(reply.events(), service.request_timeout_s)
    return json_response(await reply.whole())


def _prompts(engine: Engine, prompt: str | list[str | int | list[int]]) -> list[RenderedPrompt]:
    if isinstance(prompt, str):
        return [_raw(engine.encode(prompt), "prompt")]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids:
        if len(ids) != len(prompt):
            raise ClientError("prompt mixes token ids with texts or lists: send one kind.", param="prompt")
        return [_raw(ids, "prompt")]
    return [
        _raw(engine.encode(item) if isinstance(item, str) else list(item), f"prompt[{index}]")
        for index, item in enumerate(prompt)
        if not isinstance(item, int)
    ]


def _raw(token_ids: list[int], path: str) -> RenderedPrompt:
    if not token_ids:
        raise ClientError(f"{path} is empty: a completion needs at least one token.", param=path)
    return RenderedPrompt(token_ids=token_ids, spans=(Span(path, 0, len(token_ids)),))


class _Reply:
    """The answer to one completion request."""

    def __init__(
        self, service: Service, request: CompletionRequest, order: Order, generation: Generation
    ) -> None:
        self._request = request
        self._order = order
        self._generation = generation
        self._model = service.engine.info.name
        count = len(order.prompts) * order.n
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(count)]
        self._offsets = [0] * count
        self._reasons: list[str | None] = [None] * count

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        async with aclosing(self._generation.deltas()) as deltas:
            async for item in deltas:
                if item is None:
                    continue
                index, delta = item
                self._texts[index].append(delta.text)
                self._logprobs[index].extend(delta.logprobs)
                self._reasons[index] = delta.finish_reason
        wanted = self._request.logprobs is not None
        choices = [
            {
                "index": index,
                "text": "".join(texts),
                "logprobs": completion_logprobs(self._logprobs[index], 0) if wanted else None,
                "finish_reason": self._reasons[index],
            }
            for index, texts in enumerate(self._texts)
        ]
        return self._head() | {"choices": choices, **self._costs()}

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a streamed answer."""
        with_usage = self._request.wants_usage
        head = self._head() | ({"usage": None} if with_usage else {})
        async with aclosing(self._generation.deltas()) as deltas:
            async for item in deltas:
                if item is None:
                    yield KEEPALIVE
                    continue
                index, delta = item
                if delta.text or delta.logprobs or delta.finish_reason is not None:
                    yield event(head | {"choices": [self._chunk(index, delta)]})
        if with_usage:
            yield event(head | {"choices": [], **self._costs()})
        yield DONE

    def _chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = None
        if self._request.logprobs is not None and delta.logprobs:
            logprobs = completion_logprobs(delta.logprobs, self._offsets[index])
            self._offsets[index] += sum(len(item.token) for item in delta.logprobs)
        return {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _costs(self) -> dict[str, Any]:
        usages, n = self._generation.usages, self._order.n
        return {"usage": usage_body(usages, n), **transfer_body(usages, n)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._order.id,
            "object": "text_completion",
            "created": self._order.created,
            "model": self._model,
        }
