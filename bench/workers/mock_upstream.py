"""A server that answers at once and computes nothing: what stands behind gateways whose own time is measured.

    python mock_upstream.py PORT

HTTP/1.1 by hand, so that next to none of a measurement is its own. Chat completions, whole or as a stream. `x-chunks` and
`x-gap-s` of a request say how many pieces its stream has and how long it waits between them. Standard library only.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import sys
from contextlib import suppress

_MODEL = "model"
_PR_SET_PDEATHSIG = 1
_USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 8,
    "total_tokens": 108,
    "prompt_tokens_details": {"cached_tokens": 96},
}
_HEAD = {"id": "chatcmpl-mock", "created": 1, "model": _MODEL}


def _event(body: object) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


def _delta(delta: dict[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return _event({**_HEAD, "object": "chat.completion.chunk", "choices": [choice]})


_FIRST = _delta({"role": "assistant", "content": "Yes"})
_PIECE = _delta({"content": " and"})
_LAST = (
    _delta({}, "stop")
    + _event({**_HEAD, "object": "chat.completion.chunk", "choices": [], "usage": _USAGE})
    + _event(b"[DONE]")
)
_CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}
_WHOLE = json.dumps({**_HEAD, "object": "chat.completion", "choices": [_CHOICE], "usage": _USAGE}).encode()
_MODELS = json.dumps(
    {"object": "list", "data": [{"id": _MODEL, "object": "model", "created": 1, "owned_by": "mock"}]}
).encode()


def _answer(status: str, body: bytes) -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    body = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readline()
    return body


async def _connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            method, path, *_ = first.split(" ")
            headers = {
                name.strip().lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines)
            }
            body = await _body(reader, headers)
            if method == "POST" and path.startswith("/v1/chat/completions") and "render" not in path:
                await _complete(writer, headers, body)
            elif path.startswith("/v1/models"):
                writer.write(_answer("200 OK", _MODELS))
            elif path.startswith("/health"):
                writer.write(_answer("200 OK", b"{}"))
            else:
                writer.write(_answer("404 Not Found", b'{"error": {"message": "not here"}}'))
            await writer.drain()
    writer.close()


async def _complete(writer: asyncio.StreamWriter, headers: dict[str, str], body: bytes) -> None:
    if b'"stream":true' not in body and b'"stream": true' not in body:
        writer.write(_answer("200 OK", _WHOLE))
        return
    chunks, gap_s = int(headers.get("x-chunks", "4")), float(headers.get("x-gap-s", "0"))
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        + _chunk(_FIRST)
    )
    if not gap_s:
        writer.write(b"".join(_chunk(_PIECE) for _ in range(chunks - 1)))
    else:
        for _ in range(chunks - 1):
            await asyncio.sleep(gap_s)
            writer.write(_chunk(_PIECE))
            await writer.drain()
    writer.write(_chunk(_LAST) + _chunk(b""))


async def _serve(port: int) -> None:
    # 75 kB come at once.
    server = await asyncio.start_server(_connection, "127.0.0.1", port, limit=1 << 20, backlog=4096)
    async with server:
        await server.serve_forever()


def main() -> None:
    """See the module."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    asyncio.run(_serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
