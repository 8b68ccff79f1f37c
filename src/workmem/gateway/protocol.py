"""Uvicorn's HTTP protocol with a deadline and a bound for headers, and a way to cut a connection off."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from workmem.gateway.config import ServerConfig
from workmem.gateway.exchange import HEADER_BYTES_MAX
from workmem.gateway.failures import error_body


def bounded_protocol(config: ServerConfig) -> type[asyncio.Protocol]:
    """The protocol with the deadline of `config`."""
    return type("ConfiguredProtocol", (_BoundedProtocol,), {"read_timeout_s": config.read_timeout_s})


class _BoundedProtocol(HttpToolsProtocol):
    """Refuses, in OpenAI's shape, what never becomes a request."""

    read_timeout_s = 20.0
    _headers_due: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._header_bytes = 0 if self._headers_due is None else self._header_bytes + len(data)
        # Twice: what came in one piece with its end is measured to the byte where it is answered.
        if self._header_bytes > 2 * HEADER_BYTES_MAX:
            self._refuse(431, f"Headers have more than {HEADER_BYTES_MAX} bytes.", "headers_too_large")

    def send_400_response(self, msg: str) -> None:
        del msg
        text = "This is not HTTP/1.1 that can be read; base_url must begin with http://, not https://."
        self._refuse(400, text, "not_http")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._headers_came()
        self.scope["workmem.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def _expect_headers(self) -> None:
        self._headers_came()
        self._headers_due = self.loop.call_later(self.read_timeout_s, self._too_slow)

    def _headers_came(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _too_slow(self) -> None:
        text = f"Headers did not arrive within {self.read_timeout_s:g} s (server.read_timeout_s)."
        self._refuse(408, text, "request_timeout")

    def _refuse(self, status: int, text: str, code: str) -> None:
        """Answer what is not a request yet, and close; abort would lose the reason."""
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(error_body(text, kind="invalid_request_error", code=code))
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
