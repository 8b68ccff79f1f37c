"""An answer of another server on its way through: sent byte for byte, looked at for metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Protocol

import aiohttp
from starlette.types import Receive, Scope, Send

from workmem.gateway.failures import ClientGone, Refusal, describe
from workmem.gateway.metrics import Metrics
from workmem.gateway.sending import Hop
from workmem.gateway.sse import error_event
from workmem.gateway.usage_peek import UsagePeek

log = logging.getLogger("workmem.gateway")

# Of one connection and not of the message (RFC 9110, 7.6.1), or set anew on the other side.
NOT_FORWARDED = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "accept-encoding",
        "expect",
    ]
)
_NOT_RETURNED = NOT_FORWARDED - {"content-length"} | {"date", "server", "x-request-id"}


class OnEnd(Protocol):
    """Called once, with what was seen, whether the answer came whole, and when its first token passed, if that was seen."""

    def __call__(self, seen: UsagePeek, *, is_whole: bool, first: float | None) -> None:
        """See the class."""
        ...


class PassThrough:
    """The answer of `hop` on its way through; `chunks` are its bytes, where they do not come from `hop` alone."""

    def __init__(
        self,
        hop: Hop,
        chunks: AsyncIterator[bytes] | None,
        metrics: Metrics,
        arrived: float,
        timeout_s: float,
        on_end: OnEnd | None = None,
    ) -> None:
        self.status_code = hop.answer.status
        self._answer = hop.answer
        self._chunks = hop.chunks() if chunks is None else chunks
        self._metrics = metrics
        self._arrived = arrived
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._first: float | None = None
        self._peek = UsagePeek(hop.answer.headers.get("content-type", ""))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, byte for byte."""
        del receive
        is_whole = False
        try:
            is_whole = await self._pass(scope, send)
        finally:
            # Also where the client left or half a body was cut off.
            self._peek.close()
            if self._answer.method == "POST":
                self._count(is_whole=is_whole)
                if self._on_end is not None:
                    self._on_end(self._peek, is_whole=is_whole, first=self._first)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass(self, scope: Scope, send: Send) -> bool:
        """Everything but the end; False where a stream broke off and said so."""
        answer, peek = self._answer, self._peek
        headers = [(k.lower(), v) for k, v in answer.raw_headers if k.lower().decode() not in _NOT_RETURNED]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        try:
            async with asyncio.timeout(self._timeout_s):
                async for data in self._chunks:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    peek.feed(data)
                    if self._first is None and peek.has_token:
                        self._first = time.monotonic()
        except (aiohttp.ClientError, TimeoutError) as error:
            peek.has_failed = True
            await self._broke_off(scope, send, error)
            return False
        return True

    async def _broke_off(self, scope: Scope, send: Send, error: Exception) -> None:
        log.warning("upstream %s broke off: %s", self._answer.url.origin(), error)
        if self._peek.is_stream:
            broken = Refusal(502, "The upstream server broke off.", code="upstream_error")
            last = error_event(describe(broken, scope["path"])[1])
            # A blank line first: the last event may be incomplete.
            await send({"type": "http.response.body", "body": b"\n\n" + last, "more_body": True})
            return
        # Half a body must not look whole: cut the connection instead of ending it.
        abort = scope.get("workmem.abort")
        if abort is not None:
            abort()
            await asyncio.sleep(0)
        raise ClientGone from error

    def _count(self, *, is_whole: bool) -> None:
        metrics, peek, now = self._metrics, self._peek, time.monotonic()
        if self._answer.status >= 400 or peek.has_failed:
            metrics.success.labels("error").inc()
        for reason in peek.reasons:
            metrics.success.labels(reason).inc()
        if is_whole and peek.reasons:
            metrics.e2e.observe(now - self._arrived)
        # Of an answer in one piece nobody knows when its first token was there.
        if self._first is not None:
            metrics.ttft.observe(self._first - self._arrived)
        usage = peek.usage
        if usage is None:
            return
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.generation_tokens.inc(usage.completion_tokens)
        for source, tokens in usage.by_source.items():
            metrics.by_source.labels(source).inc(tokens)
        if self._first is not None and usage.completion_tokens > 1:
            metrics.tpot.observe((now - self._first) / (usage.completion_tokens - 1))
