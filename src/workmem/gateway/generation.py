"""The completions of one HTTP request: n choices of each prompt, run side by side and merged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from workmem.core.errors import EngineError
from workmem.core.generation import (
    Caller,
    Delta,
    Engine,
    GenerateRequest,
    Handoff,
    RenderedPrompt,
    SamplingParams,
    Usage,
)
from workmem.gateway.callers import Callers
from workmem.gateway.exchange import Exchange
from workmem.gateway.explain import RequestLog, RequestRecord
from workmem.gateway.explainer import Explainer
from workmem.gateway.metrics import Metrics
from workmem.gateway.recent_requests import Kept, Outcome
from workmem.gateway.transcripts import TurnMemory
from workmem.index.history import PromptHistory
from workmem.prompt.canonical.choice import RuleChoice
from workmem.prompt.hints import Hints
from workmem.prompt.sampling import seed_of_choice

_DELTAS_WAITING_MAX = 64
"""Between engine and client; a client slower than that slows the pump, never memory."""


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """What the completion endpoints work with."""

    engine: Engine
    history: PromptHistory
    request_log: RequestLog
    explainer: Explainer
    metrics: Metrics
    callers: Callers
    transcripts: TurnMemory
    keepalive_s: float
    request_timeout_s: float
    rules: RuleChoice
    """What is done to a prompt before it is rendered."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to generate: `n` choices of each of `prompts`."""

    id: str
    request_id: str
    created: int
    prompts: Sequence[RenderedPrompt]
    n: int
    sampling: SamplingParams
    caller: Caller
    priority: int = 0
    reuse: bool = True
    handoff: Handoff | None = None
    hints: Hints | None = None
    keep: Callable[[str, list[int], str], None] | None = None
    """Told of each choice that ends by itself: its text, its tokens, and its finish reason."""

    def requests(self) -> list[GenerateRequest]:
        """One per choice; position p * n + c is choice c of prompt p, as OpenAI counts."""
        count = len(self.prompts) * self.n
        return [
            GenerateRequest(
                id=self.id if count == 1 else f"{self.id}-{index}",
                token_ids=self.prompts[index // self.n].token_ids,
                sampling=seed_of_choice(self.sampling, index % self.n),
                caller=self.caller,
                priority=self.priority,
                reuse=self.reuse,
                handoff=self.handoff,
                # Said once, whatever was asked for.
                hints=tuple(self.hints.actions) if self.hints is not None and index == 0 else (),
            )
            for index in range(count)
        ]


class _Ended(msgspec.Struct, frozen=True):
    error: Exception | None = None


class Generation:
    """Runs an `Order`. `open` it, take what `deltas` yields, and `close` it in any case; see `start`."""

    def __init__(self, service: Service, order: Order, kept: Kept | None = None) -> None:
        self._service = service
        self._order = order
        self._kept = kept
        self._requests = order.requests()
        self._queue: asyncio.Queue[tuple[int, Delta | _Ended]] = asyncio.Queue(_DELTAS_WAITING_MAX)
        self._pumps: list[asyncio.Task[None]] = []
        self._running = 0
        self._peeked: list[tuple[int, Delta]] = []
        self._arrived = time.monotonic()
        self.usages: dict[int, Usage] = {}
        """By choice, filled as choices finish."""

    async def open(self) -> None:
        """Start, and wait for the first delta, so that what goes wrong before it has its own status."""
        self._remember()
        self._pumps = [
            asyncio.create_task(self._pump(index, request)) for index, request in enumerate(self._requests)
        ]
        self._running = len(self._pumps)
        first = await self._next()
        if first is not None:
            self._peeked.append(first)

    async def close(self) -> None:
        """Cancel what still runs, and wait until the engine has let go of it."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta] | None]:
        """(choice, delta) as they come; None marks `keepalive_s` of silence."""
        for item in self._peeked:
            yield item
        while self._running:
            try:
                async with asyncio.timeout(self._service.keepalive_s):
                    entry = await self._queue.get()
            except TimeoutError:
                yield None
                continue
            item = self._settle(*entry)
            if item is not None:
                yield item

    async def _next(self) -> tuple[int, Delta] | None:
        """The next delta of any choice; None after the last. Raises what a choice failed with."""
        while self._running:
            item = self._settle(*await self._queue.get())
            if item is not None:
                return item
        return None

    def _settle(self, index: int, item: Delta | _Ended) -> tuple[int, Delta] | None:
        if isinstance(item, Delta):
            return index, item
        self._running -= 1
        if item.error is not None:
            raise item.error
        return None

    async def _pump(self, index: int, request: GenerateRequest) -> None:
        deltas = self._service.engine.generate(request)
        watch = _Watch(self._service.metrics, self._arrived)
        ended = _Ended(EngineError(f"The engine ended request {request.id} without a finish reason."))
        texts: list[str] = []
        token_ids: list[int] = []
        try:
            async for delta in deltas:
                watch.see(delta)
                texts.append(delta.text)
                token_ids += delta.token_ids
                if delta.finish_reason is not None:
                    ended = self._finish(index, request, delta, watch.first_token_s)
                    if ended.error is None and self._order.keep is not None:
                        # Before the client knows that the turn is whole, and can send it back.
                        self._order.keep("".join(texts), token_ids, delta.finish_reason)
                if ended.error is None or delta.finish_reason is None:
                    await self._queue.put((index, delta))
                if delta.finish_reason is not None:
                    break
        except Exception as error:  # noqa: BLE001 - handed to the request boundary, which answers with it
            ended = _Ended(error)
        finally:
            close = getattr(deltas, "aclose", None)
            if close is not None:
                await close()
        await self._queue.put((index, ended))

    def _finish(
        self, index: int, request: GenerateRequest, delta: Delta, first_token_s: float | None
    ) -> _Ended:
        if delta.finish_reason == "cancelled":
            return _Ended(EngineError(f"The server cancelled request {request.id}; it can be sent again."))
        if delta.usage is None:
            return _Ended(EngineError(f"The engine finished request {request.id} without its usage."))
        self.usages[index] = delta.usage
        if index == 0 and self._order.hints is not None:
            told = (*self._order.hints.outcomes, *delta.usage.hints)
            self.usages[index] = msgspec.structs.replace(delta.usage, hints=told)
        if index % self._order.n == 0:
            usage = delta.usage
            self._service.history.finish(
                request.id, usage.sources, approximate=usage.approximate, handoff=usage.handoff
            )
            outcome = Outcome(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
            )
            kept = self._kept if index == 0 else None
            self._service.explainer.finished(kept, outcome, first_token_s=first_token_s)
        return _Ended()

    def _remember(self) -> None:
        order, service = self._order, self._service
        space = f"{service.engine.info.fingerprint}/{order.caller.tenant}"
        ids = [self._requests[index * order.n].id for index in range(len(order.prompts))]
        for prompt_id, prompt in zip(ids, order.prompts, strict=True):
            service.history.add(prompt_id, space, prompt.token_ids, prompt.spans, float(order.created))
        if self._kept is not None:
            service.explainer.recent.name(self._kept, ids[0])
        service.request_log.add(
            RequestRecord(order.id, order.request_id, tuple(ids), order.caller, order.created)
        )


async def start(service: Service, order: Order, exchange: Exchange, kept: Kept | None = None) -> Generation:
    """Run `order` up to its first delta. `exchange` holds the generation and closes it.

    `kept` is what is remembered of the request, so that what becomes of it can be explained.
    Raises what the engine refuses the request with, before any status is sent.
    """
    generation = Generation(service, order, kept)
    exchange.held.push_async_callback(generation.close)
    await generation.open()
    return generation


class _Watch:
    """Times one choice."""

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._first: float | None = None

    @property
    def first_token_s(self) -> float | None:
        """From arrival to the first token."""
        return None if self._first is None else self._first - self._arrived

    def see(self, delta: Delta) -> None:
        """Record what `delta` tells."""
        now = time.monotonic()
        if self._first is None and (delta.token_ids or delta.text):
            self._first = now
            self._metrics.ttft.observe(now - self._arrived)
        if delta.finish_reason is None:
            return
        metrics, usage = self._metrics, delta.usage
        metrics.success.labels(delta.finish_reason).inc()
        metrics.e2e.observe(now - self._arrived)
        if usage is None:
            return
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.generation_tokens.inc(usage.completion_tokens)
        for run in usage.sources:
            metrics.by_source.labels(run.source).inc(run.tokens)
        if self._first is not None and usage.completion_tokens > 1:
            metrics.tpot.observe((now - self._first) / (usage.completion_tokens - 1))
