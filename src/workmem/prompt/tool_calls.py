"""Finding tool calls in generated text, as it streams.

What models write, all read here:

- Qwen, Hermes and our default rendering: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`
- Llama 3: `<|python_tag|>{...}; {...}`, or the bare object `{"name": ..., "parameters": ...}`
- Mistral: `[TOOL_CALLS][{...}, {...}]` or `[TOOL_CALLS]name[ARGS]{...}`, or the bare list

Only a bare object whose name is one of the offered tools is a call: an answer may well be JSON.
Anything that does not parse stays text, so a malformed call is seen, never lost.

`ToolCallParser` decides only on what cannot change with more text, so any split of the text into
pieces gives the same result. White space around calls is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

OPEN, CLOSE, PYTHON_TAG, TOOL_CALLS = "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"
_MARKERS = (OPEN, PYTHON_TAG, TOOL_CALLS)
_NAMED = re.compile(r"\s*([\w.:-]{1,256})(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})


class ParsedCall(msgspec.Struct, frozen=True):
    """A call the model made. `arguments` is JSON text of an object."""

    name: str
    arguments: str


def read_call(text: str) -> list[ParsedCall] | None:
    """The calls in `text`, which must be one JSON object or a list of them; None if it is not."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    items: list[Any] = value if isinstance(value, list) else [value]
    calls = [_as_call(item) for item in items]
    return [call for call in calls if call is not None] if calls and all(calls) else None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _as_call(value: Any) -> ParsedCall | None:
    if not isinstance(value, dict):
        return None
    body: dict[str, Any] = value
    if isinstance(body.get("function"), dict):
        body = body["function"]
    name = body.get("name")
    arguments: Any = body.get("arguments", body.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


class JsonScan:
    """Finds where the JSON object or list that begins at `start` ends; goes on where it stopped."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._index, self._depth, self._in_string, self._escaped = start, 0, False, False

    def end(self, text: str) -> int:
        """Index after the closing bracket in `text`, which may have grown; -1 while there is none."""
        for index in range(self._index, len(text)):
            char = text[index]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._index, self._depth = index, 1  # Asked again, it finds the same end.
                    return index + 1
        self._index = len(text)
        return -1


Piece = str | ParsedCall


class ToolCallParser:
    """Splits a stream of text into text and calls. `feed` each piece, then `finish` once."""

    def __init__(self, tool_names: Collection[str]) -> None:
        self._names = frozenset(tool_names)
        self._buffer = ""
        self._mode = "start"
        self._after_call = False
        self._mark = ""
        """The marker at the start of the buffer, in a mode that begins with one."""
        self._scan: JsonScan | None = None
        self._space = ""
        """White space held back until it is known whether a call follows it."""

    def feed(self, text: str) -> list[Piece]:
        """Everything that is certain after `text`; the rest is held back."""
        self._buffer += text
        return list(self._advance(is_last=False))

    def finish(self) -> list[Piece]:
        """What was held back, read as if nothing could follow."""
        return list(self._advance(is_last=True))

    def _advance(self, *, is_last: bool) -> Iterator[Piece]:
        steps = {"start": self._at_start, "text": self._in_text, "mark": self._in_mark}
        steps |= {"tag": self._in_list, "list": self._in_list, "bare": self._in_list}
        while True:
            before = (self._mode, len(self._buffer))
            yield from steps[self._mode](is_last=is_last)
            if (self._mode, len(self._buffer)) == before:
                break
            self._scan = None
        if is_last:
            tail = self._space if not self._after_call else ""
            rest, self._buffer, self._space = tail + self._buffer, "", ""
            if rest:
                yield rest

    def _json_end(self, start: int) -> int:
        """See `JsonScan`. Remembered while the buffer only grows, else long arguments cost their square."""
        if self._scan is None or self._scan.start != start:
            self._scan = JsonScan(start)
        return self._scan.end(self._buffer)

    def _at_start(self, *, is_last: bool) -> Iterator[Piece]:
        """Bare JSON is a call only as the first thing the model says."""
        head = self._buffer.lstrip()
        self._space += self._buffer[: len(self._buffer) - len(head)]
        self._buffer = head
        if not head:
            return
        if head[0] not in "{[" or head.startswith(TOOL_CALLS) or not self._names:
            self._mode = "text"
            return
        if not is_last and TOOL_CALLS.startswith(head):
            return
        inner = head[1:].lstrip() if head[0] == "[" else head
        if not inner and not is_last:
            return
        if not inner.startswith("{") or self._first_key_rules_out(inner):
            self._mode = "text"
            return
        end = self._json_end(0)
        if end < 0:
            if is_last:
                self._mode = "text"
            return
        calls = read_call(head[:end])
        if calls is None or any(call.name not in self._names for call in calls):
            self._mode = "text"
            return
        self._buffer, self._mode = head[end:], "bare"
        yield from self._calls(calls)

    @staticmethod
    def _first_key_rules_out(inner: str) -> bool:
        """True as soon as it is plain that this object is an answer: it then streams on as text."""
        body = inner[1:].lstrip()
        if not body:
            return False
        found = _FIRST_KEY.match(inner)
        return found.group(1) not in _CALL_KEYS if found else body[0] != '"'

    def _calls(self, calls: list[ParsedCall]) -> Iterator[Piece]:
        self._after_call, self._space, self._mark = True, "", ""
        yield from calls

    def _text(self, text: str) -> Iterator[Piece]:
        """Emit `text`, holding back its trailing white space."""
        body = text.rstrip()
        if not body:
            self._space += text
            return
        lead = self._space
        if self._after_call:
            lead, text = "", text.lstrip()
        self._after_call, self._space = False, text[len(text.rstrip()) :]
        yield lead + text.rstrip()

    def _in_text(self, *, is_last: bool) -> Iterator[Piece]:
        found = [(at, mark) for mark in _MARKERS if (at := self._buffer.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            text, self._buffer = self._buffer[:at], self._buffer[at:]
            yield from self._text(text)
            self._mode = "mark" if mark == OPEN else "tag" if mark == PYTHON_TAG else "list"
            self._mark = mark
            return
        keep = 0 if is_last else self._partial_marker()
        cut = len(self._buffer) - keep
        text, self._buffer = self._buffer[:cut], self._buffer[cut:]
        yield from self._text(text)

    def _partial_marker(self) -> int:
        """Length of the longest end of the buffer that may be the start of a marker."""
        longest = max(map(len, _MARKERS)) - 1
        for length in range(min(longest, len(self._buffer)), 0, -1):
            if any(mark.startswith(self._buffer[-length:]) for mark in _MARKERS):
                return length
        return 0

    def _give_up(self, length: int) -> Iterator[Piece]:
        """The first `length` characters look like a call and are not: they are text."""
        text, self._buffer, self._mode = self._buffer[:length], self._buffer[length:], "text"
        yield from self._text(text)

    def _in_mark(self, *, is_last: bool) -> Iterator[Piece]:
        """`<tool_call>`: JSON up to its own end, then the closing tag (missing at the very end)."""
        body = self._buffer[len(OPEN) :]
        head = body.lstrip()
        if not head:
            if is_last:
                yield from self._give_up(len(self._buffer))
            return
        start = len(self._buffer) - len(head)
        end = self._json_end(start) if head[0] in "{[" else start
        if end < 0:
            if is_last:
                yield from self._give_up(len(OPEN))
            return
        close = self._buffer.find(CLOSE, end)
        between = self._buffer[end:close] if close >= 0 else self._buffer[end:]
        if close < 0 and not is_last and CLOSE.startswith(between.lstrip()):
            return
        calls = read_call(self._buffer[start:end]) if head[0] in "{[" else None
        if calls is None or (between.strip() and not CLOSE.startswith(between.strip())):
            yield from self._give_up(len(OPEN))
            return
        self._buffer = self._buffer[close + len(CLOSE) :] if close >= 0 else ""
        self._mode = "text"
        yield from self._calls(calls)

    def _in_list(self, *, is_last: bool) -> Iterator[Piece]:
        """After a marker or a bare call: more calls, separated by `;`, `,` or space, until text."""
        mark = self._mark
        head = self._buffer[len(mark) :].lstrip("" if mark else " \t\r\n;,")
        body = head.lstrip()
        if not body:
            if is_last and mark:
                yield from self._give_up(len(self._buffer))
            return
        start = len(self._buffer) - len(body)
        name, named = "", _NAMED.match(body) if self._mode == "list" else None
        if named:
            name, start = named.group(1), start + named.end()
        elif body[0] not in "{[" or body.startswith(TOOL_CALLS):
            if not is_last and self._may_become_list_item(body):
                return
            yield from self._leave_list(mark)
            return
        end = self._json_end(start)
        if end < 0:
            if is_last:
                yield from self._leave_list(mark)
            return
        text = self._buffer[start:end]
        calls = read_call(f'{{"name": {json.dumps(name)}, "arguments": {text}}}' if name else text)
        if calls is None or (self._mode == "bare" and any(call.name not in self._names for call in calls)):
            yield from self._leave_list(mark)
            return
        self._buffer = self._buffer[end:]
        yield from self._calls(calls)

    def _may_become_list_item(self, body: str) -> bool:
        """Mistral's named form shows only at its brace; wait for it as long as a name may last."""
        if self._mode != "list":
            return False
        return re.fullmatch(r"[\w.:-]{1,256}(\[[A-Z_]*(\][\w-]*)?)*\s*", body) is not None

    def _leave_list(self, mark: str) -> Iterator[Piece]:
        self._mode, self._mark = "text", ""
        if mark:
            yield from self._give_up(len(mark))
