"""A real server on a free loopback port, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from starlette.types import ASGIApp

from workmem.gateway.config import ServerConfig
from workmem.gateway.serve import Server, listen


@contextmanager
def running(app: ASGIApp, config: ServerConfig | None = None, *, timeout_s: float = 30.0) -> Generator[str]:
    """Serve `app` and yield its base URL, without `/v1`; stop and join the thread on the way out."""
    config = config or ServerConfig(port=0, shutdown_s=2)
    listener = listen(config)
    started = threading.Event()
    urls: list[str] = []

    def on_started(url: str) -> None:
        urls.append(url)
        started.set()

    server = Server(app, config, on_started)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        if not started.wait(timeout_s):
            raise RuntimeError(f"the server did not start within {timeout_s:g} s")
        yield urls[0]
    finally:
        server.should_exit = True
        thread.join(timeout_s)
        listener.close()
        if thread.is_alive():
            raise RuntimeError(f"the server did not stop within {timeout_s:g} s")
