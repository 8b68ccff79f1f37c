"""One HTTP request from its first byte to its last: the boundary that every endpoint shares.

`Boundary` authenticates, reads the body within its bounds, runs the endpoint while watching for the
client to leave, turns errors into answers, and lets go of everything the endpoint holds.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Protocol

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from workmem.core.errors import ClientError
from workmem.core.units import parse_bytes
from workmem.gateway.anthropic_shapes import is_anthropic
from workmem.gateway.config import ServerConfig
from workmem.gateway.failures import ClientGone, Refusal, describe, error_response
from workmem.gateway.keys import ApiKeys
from workmem.gateway.sse import error_event

log = logging.getLogger("workmem.gateway")
HEADER_BYTES_MAX = 64 * 1024
"""Of all headers of a request together, names and values."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Answer(Protocol):
    """Anything that can be sent: a starlette response, or a stream of ours."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        ...


class Exchange:
    """What an endpoint gets to work with."""

    def __init__(self, request: Request, *, request_id: str, tenant: str, body: bytes) -> None:
        self.request = request
        self.request_id = request_id
        """The client's `x-request-id` if it sent a usable one, else ours."""
        self.tenant = tenant
        self.body = body
        self.client_path: Callable[[str], str] = str
        """From a path in what was made of the body to the client's own, for errors that name a field."""
        self.headers: dict[str, str] = {}
        """Put on the answer, beside those that it has."""
        self.on_answer: Callable[[], Awaitable[None]] | None = None
        """Awaited before the first byte of the answer is sent; it may still set `headers`."""
        self.held = AsyncExitStack()
        """What must be closed when the exchange ends, however it ends."""

    @property
    def path(self) -> str:
        """That was asked for."""
        return self.request.scope["path"]


Endpoint = Callable[[Exchange], Awaitable[Answer]]


class Boundary:
    """ASGI application around one endpoint."""

    def __init__(self, endpoint: Endpoint, config: ServerConfig, keys: ApiKeys) -> None:
        self._endpoint = endpoint
        self._config = config
        self._keys = keys
        self._body_bytes_max = parse_bytes(config.body_bytes_max)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope, receive)
        request_id = request_id_of(request.headers.get("x-request-id", ""))
        timed = _TimedSend(scope, send, request_id, self._config.send_timeout_s)
        try:
            _check_headers(scope["headers"])
            tenant = self._keys.tenant(request.headers)
            body = await self._read_body(request, receive)
        except Refusal as refusal:
            if refusal.status in (408, 413):
                # The rest of the body is still on its way; the connection cannot be used again.
                refusal.headers["connection"] = "close"
            await error_response(refusal, scope["path"])(scope, receive, timed)
            return
        except ClientGone:
            return
        exchange = Exchange(request, request_id=request_id, tenant=tenant, body=body)
        timed.headers = exchange.headers
        work = asyncio.create_task(self._serve(exchange, scope, receive, timed))
        gone = asyncio.create_task(_disconnect(receive))
        is_cut_off = False
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if timed.is_complete:
                # The server reports a finished response as a disconnect; there is only tidying left.
                await asyncio.wait({work})
        except asyncio.CancelledError:
            # The server stops, and waits no longer.
            is_cut_off = True
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if is_cut_off:
            await timed.cut_off(Refusal(503, "The server is stopping; send it again.", code="stopping"))
            return
        if (
            not work.cancelled()
            and (error := work.exception()) is not None
            and not isinstance(error, ClientGone)
        ):
            raise error

    async def _serve(self, exchange: Exchange, scope: Scope, receive: Receive, send: _TimedSend) -> None:
        async with exchange.held:
            try:
                async with asyncio.timeout(self._config.request_timeout_s):
                    answer = await self._endpoint(exchange)
                    if exchange.on_answer is not None:
                        await exchange.on_answer()
            except Exception as error:
                # The engine is let go first: a slow reader of the answer must not keep it busy.
                await exchange.held.aclose()
                if isinstance(error, ClientError) and error.param is not None:
                    error.param = exchange.client_path(error.param)
                answer = error_response(error, exchange.path)
                if getattr(answer, "status_code", 0) >= 500:
                    # A refusal was foreseen, and its text says it all.
                    trace = None if isinstance(error, Refusal) else error
                    log.warning("request %s failed: %s", exchange.request_id, error, exc_info=trace)
            await answer(scope, receive, send)

    async def _read_body(self, request: Request, receive: Receive) -> bytes:
        length = request.headers.get("content-length", "")
        body: bytes | None = None
        if not length.isdecimal() or int(length) <= self._body_bytes_max:
            body = await self._collect(receive)
        if body is None:
            # A client that asked first (`expect`) has not sent anything yet.
            if "expect" not in request.headers:
                await _discard(receive, 8 * self._body_bytes_max)
            raise self._too_large()
        return body

    async def _collect(self, receive: Receive) -> bytes | None:
        """The body; None as soon as it is too large. Raises ClientGone, or Refusal when it is too slow."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.read_timeout_s):
                while len(body) <= self._body_bytes_max:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if not message.get("more_body", False):
                        return bytes(body) if len(body) <= self._body_bytes_max else None
        except TimeoutError as error:
            limit = self._config.read_timeout_s
            text = f"The request body did not arrive within {limit:g} s (server.read_timeout_s)."
            raise Refusal(408, text, code="request_timeout") from error
        return None

    def _too_large(self) -> Refusal:
        text = f"The request body is larger than {self._config.body_bytes_max} (server.body_bytes_max)."
        return Refusal(413, text, code="request_too_large")


def request_id_of(given: str) -> str:
    """`given` if it is safe to put into headers and logs, else an id of our own.

    A plain UUID: some servers behind us refuse every other `x-request-id`.
    """
    return given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4())


async def _discard(receive: Receive, bytes_max: int) -> None:
    """Read on for a moment.

    Most clients look for an answer only after they have sent everything; closing on one that still
    sends would replace our answer by a broken connection.
    """
    seen = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(2.0):
            while seen < bytes_max:
                message = await receive()
                seen += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _TimedSend:
    """Sends with a deadline per message, and stamps the request id on the headers.

    The transport buffers a bounded number of bytes and then makes us wait; a client that keeps us
    waiting too long is cut off, so that it cannot hold an answer in memory.
    """

    def __init__(self, scope: Scope, send: Send, request_id: str, timeout_s: float) -> None:
        self._abort: Callable[[], None] | None = scope.get("workmem.abort")
        self._send = send
        self._request_id = request_id
        self._timeout_s = timeout_s
        self._scope = scope
        self._has_started = False
        self._is_stream = False
        self.is_complete = False
        self.headers: dict[str, str] = {}

    async def cut_off(self, error: Refusal) -> None:
        """End an answer that will not be finished, so that it does not look whole."""
        with suppress(ClientGone):
            if self.is_complete:
                return
            if not self._has_started:
                await error_response(error, self._scope["path"])(self._scope, _nothing, self)
            elif self._is_stream:
                # A blank line first: what was passed on may have ended in the middle of an event.
                last = b"\n\n" + error_event(describe(error, self._scope["path"])[1])
                await self({"type": "http.response.body", "body": last, "more_body": False})
            elif self._abort is not None:
                self._abort()
                await asyncio.sleep(0)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            if is_anthropic(self._scope["path"]):
                headers.setdefault("request-id", self._request_id)
            headers.update(self.headers)
            self._has_started = True
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        try:
            async with asyncio.timeout(self._timeout_s):
                self.is_complete = message["type"] == "http.response.body" and not message.get("more_body")
                await self._send(message)
        except TimeoutError as error:
            log.warning(
                "request %s: client took no byte for %g s, dropped", self._request_id, self._timeout_s
            )
            if self._abort is not None:
                self._abort()
                await asyncio.sleep(0)  # Lets the server notice, or it would call our answer incomplete.
            raise ClientGone from error


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _check_headers(headers: list[tuple[bytes, bytes]]) -> None:
    if sum(len(name) + len(value) for name, value in headers) > HEADER_BYTES_MAX:
        name, value = max(headers, key=lambda header: len(header[1]))
        text = f"Headers have more than {HEADER_BYTES_MAX} bytes, {name.decode('latin-1')[:64]} alone {len(value)}."
        raise Refusal(431, text, code="headers_too_large")


def header_map(request: Request) -> dict[str, str]:
    """Header names in lower case, last one wins."""
    return {name.lower(): value for name, value in request.headers.items()}


def state_of(request: Request, name: str) -> Any:
    """A service that `build_app` put into the application's state."""
    return getattr(request.app.state, name)
