"""Running the application: uvicorn with bounds on everything a client may keep open."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from workmem.core.errors import ConfigError
from workmem.gateway.config import ServerConfig
from workmem.gateway.protocol import bounded_protocol

OnStarted = Callable[[str], None]
OnStopping = Callable[[int], None]
_LAST_WORD_S = 2
"""For clients to take the end of what was cut off."""


class Server(uvicorn.Server):
    """A uvicorn server that says where it listens once it does."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        on_started: OnStarted | None = None,
        on_stopping: OnStopping | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(config),
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
        self._shutdown_s = config.shutdown_s
        self._on_started = on_started
        self._on_stopping = on_stopping

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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests; let running ones finish for `shutdown_s`, or until a second signal; then end them.

        uvicorn's own, which follows, would cut them off without a word to their clients, and a second signal
        would keep it from closing the engine.
        """
        for listener in [*self.servers, *(sockets or [])]:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        running = self.server_state.tasks
        if running and self._on_stopping is not None:
            self._on_stopping(len(running))
        end = time.monotonic() + self._shutdown_s
        while running and not self.force_exit and time.monotonic() < end:
            await asyncio.wait(set(running), timeout=0.05)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(set(running), timeout=_LAST_WORD_S)
        self.force_exit = False
        self.config.timeout_graceful_shutdown = _LAST_WORD_S
        await super().shutdown(sockets)


def serve(
    app: ASGIApp,
    config: ServerConfig,
    on_started: OnStarted | None = None,
    on_stopping: OnStopping | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish for `shutdown_s`; a second SIGINT ends them.

    `on_started` gets the base URL, `on_stopping` how many requests the stop waits for. Raises ConfigError when the address cannot be bound.
    """
    listener = listen(config)
    try:
        Server(app, config, on_started, on_stopping).run(sockets=[listener])
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
        is_taken = error.errno == errno.EADDRINUSE
        field = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        advice = {
            "port": "Choose another port (0 takes a free one)",
            "host": "Name an address of this machine: 127.0.0.1, or 0.0.0.0 for all of them",
        }[field]
        raise ConfigError(
            f"$.server.{field}: cannot listen on {config.host}:{config.port}: {error.strerror}. "
            f"{advice}{', or stop what uses it' if is_taken else ''}."
        ) from error
    return listener
