"""One request to one server: what came back, or how it failed."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

import aiohttp
import msgspec
import yarl

from workmem.gateway.config import UpstreamConfig
from workmem.gateway.servers import UpstreamServer

log = logging.getLogger("workmem.gateway")

AHEAD_BYTES_MAX = 4 * 1024 * 1024
"""Of an answer in one piece that are read before any goes on: one that breaks off earlier can still be had elsewhere."""

_GONE_S = 30
_WATCH = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 1000 * _GONE_S}


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it goes out. `target`: path and query as the client wrote them."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    is_generation: bool = False
    """It has no side effect, so it may be asked of another server after one died with it."""


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """No answer. `unreachable`: no byte was sent; `broke_off`: it may have begun; `silent`: it may still be at it."""

    kind: Literal["unreachable", "broke_off", "silent"]
    text: str


class Hop:
    """An answer that has begun. `close` gives the connection back, and may be called again."""

    def __init__(self, server: UpstreamServer, answer: aiohttp.ClientResponse, sent: float) -> None:
        self.server = server
        self.answer = answer
        self.sent = sent
        """When the request went out, on the monotonic clock."""
        self.ahead = b""
        """What was read before it was asked for."""
        self.is_whole = False
        """Whether `ahead` is all."""
        self._is_closed = False
        server.in_flight += 1

    @property
    def is_stream(self) -> bool:
        """Whether it answers in events."""
        return self.answer.headers.get("content-type", "").startswith("text/event-stream")

    async def read_ahead(self) -> None:
        """Read a whole answer, or of a stream the first bytes. Raises aiohttp.ClientError or TimeoutError."""
        held = bytearray()
        while len(held) <= AHEAD_BYTES_MAX:
            data = await self.answer.content.readany()
            if not data:
                self.is_whole = True
                break
            held += data
            if self.is_stream:
                break
        self.ahead = bytes(held)

    async def chunks(self) -> AsyncGenerator[bytes]:
        """All of it, once. Raises aiohttp.ClientError or TimeoutError where it breaks off."""
        if self.ahead:
            yield self.ahead
        if not self.is_whole:
            async for data in self.answer.content.iter_any():
                yield data

    def close(self) -> None:
        """Let go of the server; what it still sends is not waited for."""
        if not self._is_closed:
            self._is_closed = True
            self.server.in_flight -= 1
            self.answer.close()


def watched_socket(info: tuple[int, int, int, str, tuple[Any, ...]]) -> socket.socket:
    """A socket on which a host that is gone without a word is noticed within `_GONE_S`, and not as a long silence."""
    made = socket.socket(info[0], info[1], info[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _WATCH.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


class Sender:
    """Sends by one client session. `open` before use, `close` after."""

    def __init__(self, config: UpstreamConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Start the client."""
        # A connection per request: a kept one may die just as it is used, and only then can it not
        # be told whether the server has begun. Beside a generation a connect costs nothing.
        connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=watched_socket)
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._config.connect_timeout_s, sock_read=self._config.read_timeout_s
        )
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    @property
    def client(self) -> aiohttp.ClientSession:
        """The session."""
        assert self._session is not None, "open() comes first"
        return self._session

    async def send(self, server: UpstreamServer, request: Outgoing) -> Hop | Failed:
        """The answer of `server` once its headers, and of a generation what `read_ahead` reads, are here."""
        url = yarl.URL(f"{server.url}{request.target}", encoded=True)
        sent = time.monotonic()
        hop: Hop | None = None
        # Counted from here: a request that is still on its way keeps the server busy too.
        server.in_flight += 1
        try:
            answer = await self.client.request(
                request.method, url, headers=request.headers, data=request.body or None, allow_redirects=False
            )
            hop = Hop(server, answer, sent)
            if request.is_generation:
                await hop.read_ahead()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            server.down_until = time.monotonic() + self._config.retry_after_s
            server.last_error = f"{type(error).__name__}: {error}"
            log.warning("upstream %s unreachable: %s", server.url, error)
            return Failed(kind="unreachable", text=server.last_error)
        except TimeoutError:
            _let_go(hop)
            text = f"The upstream server was silent for {self._config.read_timeout_s:g} s."
            return Failed(kind="silent", text=text)
        except aiohttp.ClientError as error:
            _let_go(hop)
            log.warning("upstream %s broke off: %s", server.url, error)
            text = f"The upstream server broke off before it answered ({type(error).__name__})."
            return Failed(kind="broke_off", text=text)
        except BaseException:
            _let_go(hop)
            raise
        finally:
            server.in_flight -= 1
        server.down_until, server.last_error = 0.0, ""
        return hop


def _let_go(hop: Hop | None) -> None:
    if hop is not None:
        hop.close()
