"""Server-sent events: headers after the first event is certain, an error event if it breaks later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from workmem.gateway.anthropic_shapes import named_event
from workmem.gateway.failures import ClientGone, describe

log = logging.getLogger("workmem.gateway")
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(value: Any) -> bytes:
    """`value` as one event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def error_event(body: dict[str, Any]) -> bytes:
    """The body of an error as the last event of a stream: named where its API names events."""
    return named_event(body) if "type" in body else event(body)


class EventStream:
    """Sends `events` until they end. `timeout_s` bounds the whole stream.

    `failed` makes the last event of an error; without it, that is the error in the shape of the API that was asked.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        timeout_s: float,
        *,
        failed: Callable[[Exception], bytes] | None = None,
    ) -> None:
        self._events = events
        self._timeout_s = timeout_s
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        del receive
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(self._events) as events:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientGone:
            raise
        # Request boundary: the status is out already, so what failed becomes the last event.
        except Exception as error:
            status, body, _ = describe(error, scope["path"])
            if status >= 500:
                log.warning("stream failed", exc_info=error)
            last = error_event(body) if self._failed is None else self._failed(error)
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
