"""The answer of a server that knows chats alone, in the shape of Anthropic's Messages, on its way through.

What it says of itself is told and nothing more: where it does not say which tokens were cached, neither does the message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from workmem.gateway.anthropic_shapes import error_in_anthropic, named_event, stop_reason
from workmem.gateway.message_content import Event, MessageContent, input_of
from workmem.gateway.pass_through import PassThrough

_THOUGHTS = ("reasoning_content", "reasoning")


class ChatAsMessage:
    """The chat that `answer` sends, sent as a message."""

    def __init__(self, answer: PassThrough | ChatAsMessage) -> None:
        self.status_code = answer.status_code
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await self._answer(scope, receive, _Translated(send))


class _Translated:
    """Takes the ASGI messages of a chat's answer and sends those of a message's."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self._held = bytearray()
        self._stream: MessageStream | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(k, v) for k, v in message["headers"] if k.lower() != b"content-length"]
            self._start = {**message, "headers": headers}
            if any(k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers):
                self._stream = MessageStream()
                await self._send(self._start)
            return
        data, is_last = message.get("body", b""), not message.get("more_body", False)
        if self._stream is not None:
            data = self._stream.feed(data) + (self._stream.finish() if is_last else b"")
            if data or is_last:
                await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
            return
        self._held += data
        if is_last:
            body = whole_message(bytes(self._held), self._start["status"])
            await self._send(self._start)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})


def whole_message(data: bytes, status: int) -> bytes:
    """The body of a chat's answer, or of its error, as that of a message; bytes of another kind as they are."""
    try:
        body: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = None
    if status >= 400 or not isinstance(body, dict):
        return msgspec.json.encode(error_in_anthropic(status, {"error": _error(body, data)}))
    choice = _first(body.get("choices"))
    told = _object(choice.get("message"))
    content = MessageContent(str(body.get("id", "")))
    events: list[Event] = []
    if thoughts := _thoughts(told):
        events += content.think(thoughts)
    if isinstance(text := told.get("content"), str) and text:
        events += content.say(text)
    calls = 0
    for call in told.get("tool_calls") or ():
        function = _object(_object(call).get("function"))
        name, arguments = str(function.get("name", "")), function.get("arguments") or ""
        if input_of(arguments) is None:
            # Of a call that cannot be read its words are shown; it is not made.
            events += content.say(f"{name}({arguments})")
            continue
        calls += 1
        events += [*content.call(str(_object(call).get("id", "")), name), *content.argue(arguments)]
    events += content.close()
    ending = _ending(choice.get("finish_reason"), choice.get("stop_reason"), has_calls=calls > 0)
    message = _message(body) | {"content": content.blocks} | ending | {"usage": _usage(body.get("usage"))}
    return msgspec.json.encode(message)


class MessageStream:
    """Events of a chat's stream as those of a message's. `feed` it the bytes, then `finish` once."""

    def __init__(self) -> None:
        self._rest = b""
        self._content = MessageContent("")
        self._has_started = False
        self._has_ended = False
        self._call: Any = None
        """Number of the call that is open, among the chat's."""
        self._has_calls = False
        self._finish: Any = None
        self._stopped_by: Any = None
        self._usage: Any = None

    def feed(self, data: bytes) -> bytes:
        """The events that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return b"".join(map(self._line, lines))

    def finish(self) -> bytes:
        """What is left. Of a stream that broke off that has been told; some servers end without a word."""
        rest = self.feed(b"\n")
        return rest if self._has_ended or self._finish is None else rest + self._line(b"data: [DONE]")

    def _line(self, line: bytes) -> bytes:
        line = line.strip()
        if line.startswith(b":"):
            return b'event: ping\ndata: {"type":"ping"}\n\n'
        if not line.startswith(b"data:") or self._has_ended:
            return b""
        data = line[5:].strip()
        if data == b"[DONE]":
            self._has_ended = True
            return b"".join(map(named_event, self._end()))
        try:
            body: Any = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return b""
        return b"".join(map(named_event, self._chunk(_object(body))))

    def _chunk(self, body: dict[str, Any]) -> Iterator[Event]:
        if body.get("error"):
            self._has_ended = True
            # Ours is in this shape already.
            is_told = body.get("type") == "error"
            yield body if is_told else error_in_anthropic(500, {"error": _error(body, b"")})
            return
        if not self._has_started:
            self._has_started = True
            self._content = MessageContent(str(body.get("id", "")))
            usage = (
                _usage(body.get("usage")) if body.get("usage") else {"input_tokens": 0, "output_tokens": 0}
            )
            start = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield {"type": "message_start", "message": _message(body) | start}
        self._usage = body.get("usage") or self._usage
        choice = _first(body.get("choices"))
        yield from self._delta(_object(choice.get("delta")))
        self._finish = choice.get("finish_reason") or self._finish
        self._stopped_by = choice.get("stop_reason") or self._stopped_by

    def _delta(self, delta: dict[str, Any]) -> Iterator[Event]:
        if thoughts := _thoughts(delta):
            yield from self._content.think(thoughts)
        if isinstance(text := delta.get("content"), str) and text:
            yield from self._content.say(text)
        for position, call in enumerate(delta.get("tool_calls") or ()):
            function, number = _object(_object(call).get("function")), _object(call).get("index", position)
            if function.get("name") and number != self._call:
                self._call, self._has_calls = number, True
                yield from self._content.call(str(call.get("id", "")), str(function["name"]))
            if function.get("arguments") and number == self._call:
                yield from self._content.argue(str(function["arguments"]))

    def _end(self) -> Iterator[Event]:
        yield from self._content.close()
        ending = _ending(self._finish, self._stopped_by, has_calls=self._has_calls)
        yield {"type": "message_delta", "delta": ending, "usage": _usage(self._usage)}
        yield {"type": "message_stop"}


def _message(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": str(body.get("id", "")),
        "type": "message",
        "role": "assistant",
        "model": str(body.get("model", "")),
    }


def _ending(finish_reason: Any, stopped_by: Any, *, has_calls: bool) -> dict[str, Any]:
    # Servers say "stop" of a call that was demanded, and the id of a token where none of the stop strings was met.
    reason = "tool_calls" if has_calls and finish_reason == "stop" else str(finish_reason)
    named = stop_reason(reason, stopped_by if isinstance(stopped_by, str) else None)
    return {"stop_reason": named, "stop_sequence": stopped_by if named == "stop_sequence" else None}


def _usage(usage: Any) -> dict[str, Any]:
    told = _object(usage)
    prompt, cached = (
        told.get("prompt_tokens", 0),
        _object(told.get("prompt_tokens_details")).get("cached_tokens"),
    )
    out = {"input_tokens": prompt, "output_tokens": told.get("completion_tokens", 0)}
    if isinstance(cached, int):
        out |= {"input_tokens": prompt - cached, "cache_read_input_tokens": cached}
    return out | ({"workmem": told["workmem"]} if "workmem" in told else {})


def _error(body: Any, data: bytes) -> dict[str, Any]:
    """What a server says of an error, in whatever shape."""
    told = _object(body)
    error = told.get("error", told)
    text = error if isinstance(error, str) else _object(error).get("message") or told.get("detail")
    return {
        "message": str(text or data[:1024].decode("utf-8", "replace")),
        "param": _object(error).get("param"),
    }


def _thoughts(told: dict[str, Any]) -> str:
    return next((text for key in _THOUGHTS if isinstance(text := told.get(key), str) and text), "")


def _first(items: Any) -> dict[str, Any]:
    return _object(items[0]) if isinstance(items, list) and items else {}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
