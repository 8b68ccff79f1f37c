"""An answer of another server on its way through: sent byte for byte, looked at for metrics."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp
from starlette.types import Receive, Scope, Send

from workmem.gateway.failures import ClientGone, error_body
from workmem.gateway.metrics import Metrics
from workmem.gateway.sse import event
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


class PassThrough:
    """An answer on its way through."""

    def __init__(
        self, answer: aiohttp.ClientResponse, metrics: Metrics, arrived: float, timeout_s: float
    ) -> None:
        self.status_code = answer.status
        self._answer = answer
        self._metrics = metrics
        self._arrived = arrived
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, byte for byte."""
        del receive
        answer = self._answer
        headers = [(k.lower(), v) for k, v in answer.raw_headers if k.lower().decode() not in _NOT_RETURNED]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        peek = UsagePeek(answer.headers.get("content-type", ""))
        first: float | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                async for data in answer.content.iter_any():
                    first = first or time.monotonic()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    peek.feed(data)
        except (aiohttp.ClientError, TimeoutError) as error:
            await self._broke_off(scope, send, error)
        if answer.method == "POST":
            self._count(peek, first)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _broke_off(self, scope: Scope, send: Send, error: Exception) -> None:
        log.warning("upstream %s broke off: %s", self._answer.url.host, error)
        if self._answer.headers.get("content-type", "").startswith("text/event-stream"):
            body = error_body("The upstream server broke off.", kind="server_error", code="upstream_error")
            # A blank line first: the last event may be incomplete.
            await send({"type": "http.response.body", "body": b"\n\n" + event(body), "more_body": True})
            return
        # Half a body must not look whole: cut the connection instead of ending it.
        abort = scope.get("workmem.abort")
        if abort is not None:
            abort()
            await asyncio.sleep(0)
        raise ClientGone from error

    def _count(self, peek: UsagePeek, first: float | None) -> None:
        metrics, now = self._metrics, time.monotonic()
        reason = "stop" if self._answer.status == 200 else "error"
        metrics.success.labels(reason).inc()
        metrics.e2e.observe(now - self._arrived)
        if first is not None:
            metrics.ttft.observe(first - self._arrived)
        usage = peek.usage()
        if usage is None:
            return
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.generation_tokens.inc(usage.completion_tokens)
        for source, tokens in usage.by_source.items():
            metrics.by_source.labels(source).inc(tokens)
        if first is not None and usage.completion_tokens > 1:
            metrics.tpot.observe((now - first) / (usage.completion_tokens - 1))
