"""Running the application: uvicorn with bounds on everything a client may keep open."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from workmem.core.errors import ConfigError
from workmem.gateway.config import ServerConfig

OnStarted = Callable[[str], None]


class Server(uvicorn.Server):
    """A uvicorn server that says where it listens once it does."""

    def __init__(self, app: ASGIApp, config: ServerConfig, on_started: OnStarted | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(config),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=config.connections_max,
                timeout_keep_alive=config.idle_connection_s,
                timeout_graceful_shutdown=config.shutdown_s,
            )
        )
        self._host = config.host
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Stop on SIGINT and SIGTERM, and then return: what the caller still has to close, it can.

        uvicorn's own would raise the signal again and end the process before that.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then call back with the base URL."""
        await super().startup(sockets=sockets)
        if self.started and sockets and self._on_started is not None:
            host = f"[{self._host}]" if ":" in self._host else self._host
            self._on_started(f"http://{host}:{sockets[0].getsockname()[1]}")


def serve(app: ASGIApp, config: ServerConfig, on_started: OnStarted | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish for `shutdown_s`.

    `on_started` gets the base URL. Raises ConfigError when the address cannot be bound.
    """
    listener = listen(config)
    try:
        Server(app, config, on_started).run(sockets=[listener])
    finally:
        listener.close()


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket on the configured address; the caller closes it."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(min(config.connections_max, 2048))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"$.server.port: cannot listen on {config.host}:{config.port}: {error.strerror}. "
            "Stop what uses it, or choose another port (0 takes a free one)."
        ) from error
    return listener


def _protocol(config: ServerConfig) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP protocol, with a deadline for headers and a way to cut a connection off."""

    class BoundedProtocol(HttpToolsProtocol):
        _headers_due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_came()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._expect_headers()

        def on_headers_complete(self) -> None:
            self._headers_came()
            self.scope["workmem.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
            super().on_headers_complete()

        def _expect_headers(self) -> None:
            self._headers_came()
            self._headers_due = self.loop.call_later(config.read_timeout_s, self._too_slow)

        def _headers_came(self) -> None:
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due = None

        def _too_slow(self) -> None:
            # Nothing was asked, so nothing is owed but a reason; abort would lose it.
            if not self.transport.is_closing():
                self.transport.write(
                    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
                )
                self.transport.close()

    return BoundedProtocol
