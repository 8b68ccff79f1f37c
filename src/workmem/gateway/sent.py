"""What of a streamed answer has gone to the client, and whether another answer says the same. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

_TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "text")
_KEPT_BYTES_MAX = 4 * 1024 * 1024
_DONE = b"[DONE]"
_BEGIN = re.compile(rb'"choices"\s*:\s*\[\s*\{')
# In a text these quotes have backslashes before them.
_END = re.compile(rb'"(?:finish_reason|error)"\s*:\s*(?!null|"")\S')


class Diverged(Exception):
    """Another answer is not what was sent."""


class Course:
    """How far a stream has come, whatever is in it."""

    def __init__(self) -> None:
        self.is_done = False
        """Whether the last event has passed."""
        self.is_ended = False
        """Whether it said why it ends."""
        self.is_begun = False

    @property
    def is_cut(self) -> bool:
        """Whether something is missing if it ends now: of a dead server's connection the end may look like any other."""
        return self.is_begun and not self.is_ended

    def see(self, data: bytes) -> None:
        """The data of an event passes."""
        self.is_done = self.is_done or data == _DONE
        self.is_begun = self.is_begun or _BEGIN.search(data) is not None
        self.is_ended = self.is_ended or self.is_done or _END.search(data) is not None


class Sent:
    """`see` every event that goes out. Once it `is_lost`, what was sent is not known well enough to be gone on with."""

    def __init__(self, *, is_exact: bool, is_single: bool = True) -> None:
        self.head: dict[str, Any] = {}
        """`id` and `created` of the first event."""
        self.has_role = False
        self.finish: str | None = None
        self.has_usage = False
        self.course = Course()
        self.is_lost = not is_single
        self._is_exact = is_exact
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, _Call] = {}
        self._kept_bytes = 0

    @property
    def texts(self) -> dict[str, str]:
        """All that was sent, by the field of a delta."""
        return {field: "".join(pieces) for field, pieces in self._texts.items()}

    @property
    def calls(self) -> dict[int, tuple[str, str]]:
        """Name and arguments of the tool calls that were sent, by their index."""
        return {index: ("".join(call.name), "".join(call.arguments)) for index, call in self._calls.items()}

    def see(self, events: bytes) -> None:
        """Whole events are going out."""
        self._kept_bytes += len(events)
        if self._kept_bytes > _KEPT_BYTES_MAX:
            self.is_lost = True
        for data in data_of(events):
            self.course.see(data)
            if data != _DONE and not self.is_lost:
                self._see(decoded(data))

    def _see(self, body: dict[str, Any] | None) -> None:
        choices = body.get("choices") if body is not None else None
        if body is None or not isinstance(choices, list) or len(choices) > 1 or body.get("error"):
            self.is_lost = True
            return
        for name in ("id", "created"):
            if name in body:
                self.head.setdefault(name, body[name])
        self.has_usage = self.has_usage or (not choices and bool(body.get("usage")))
        if choices and not self._see_choice(choices[0]):
            self.is_lost = True

    def _see_choice(self, choice: Any) -> bool:
        """False where it says something that could not be compared later."""
        if not isinstance(choice, dict) or choice.get("index") not in (None, 0):
            return False
        # They belong to the tokens of an event, and those may be cut elsewhere the next time.
        if choice.get("logprobs") or choice.get("token_ids"):
            return False
        delta = _said(choice)
        if any(value for name, value in delta.items() if name not in (*_TEXTS, "role", "tool_calls")):
            return False
        self.has_role = self.has_role or bool(delta.get("role"))
        for field in _TEXTS:
            if isinstance(piece := delta.get(field), str) and piece:
                self._texts.setdefault(field, []).append(piece)
        for entry in delta.get("tool_calls") or ():
            index, name, arguments = _call(entry)
            call = self._calls.setdefault(index, _Call())
            call.name.append(name)
            call.arguments.append(arguments)
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish = reason
        # What is drawn anew is something else each time: only as long as nothing is out, anything may follow.
        return self._is_exact or not (self._texts or self._calls)


class _Call:
    def __init__(self) -> None:
        self.name: list[str] = []
        self.arguments: list[str] = []


class Replay:
    """Another answer to the same request: `trim` leaves of each event what was not sent yet."""

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self._texts = {field: text for field, text in sent.texts.items() if text}
        self._calls = {index: [name, arguments] for index, (name, arguments) in sent.calls.items()}
        # Nobody can tell whether a name is over: of what was begun none is made longer.
        self._is_named = {index for index, parts in self._calls.items() if any(parts)}

    def trim(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """What is new of an event, under the first answer's id; None for nothing. Raises Diverged."""
        choices = body.get("choices")
        if body.get("error") or not isinstance(choices, list) or len(choices) > 1:
            raise Diverged("it failed, or has several choices")
        body = body | {name: value for name, value in self._sent.head.items() if name in body}
        if not choices:
            return self._trim_bare(body)
        choice = self._trim_choice(choices[0])
        return None if choice is None else body | {"choices": [choice]}

    def end(self) -> None:
        """The answer is over. Raises Diverged where less came than was sent."""
        if self._is_behind:
            raise Diverged("it is shorter than what was sent")

    @property
    def _is_behind(self) -> bool:
        return bool(self._texts) or any(any(parts) for parts in self._calls.values())

    def _trim_bare(self, body: dict[str, Any]) -> dict[str, Any] | None:
        if not body.get("usage"):
            return None if self._is_behind else body
        self.end()
        return None if self._sent.has_usage else body

    def _trim_choice(self, choice: Any) -> dict[str, Any] | None:
        if not isinstance(choice, dict) or choice.get("index") not in (None, 0):
            raise Diverged("it is no answer that is understood")
        before = _said(choice)
        said = self._trim_said(before)
        reason, first = choice.get("finish_reason"), self._sent.finish
        is_new = bool(
            said.get("tool_calls") or choice.get("logprobs") or any(said.get(one) for one in _TEXTS)
        )
        if (is_new or reason is not None) and self._is_behind:
            raise Diverged("it goes on before all that was sent has come again")
        if first is not None and (is_new or reason not in (None, first)):
            raise Diverged("it does not end as what was sent")
        if first is not None:
            reason = None
        if not is_new and reason is None and ("role" not in said or said != before):
            return None
        body = {"delta": said} if isinstance(choice.get("delta"), dict) else {"text": said.get("text") or ""}
        return choice | body | {"finish_reason": reason}

    def _trim_said(self, before: dict[str, Any]) -> dict[str, Any]:
        said = dict(before)
        if self._sent.has_role:
            said.pop("role", None)
        for field in _TEXTS:
            if isinstance(piece := said.get(field), str) and piece:
                said[field] = self._rest(field, piece)
        if isinstance(entries := said.get("tool_calls"), list):
            said["tool_calls"] = [rest for entry in entries if (rest := self._call_rest(entry)) is not None]
            if not said["tool_calls"]:
                del said["tool_calls"]
        return said

    def _rest(self, field: str, piece: str) -> str:
        expected = self._texts.get(field, "")
        count = min(len(expected), len(piece))
        if piece[:count] != expected[:count]:
            raise Diverged(f"its {field} is another")
        self._texts[field] = expected[count:]
        if not self._texts[field]:
            del self._texts[field]
        return piece[count:]

    def _call_rest(self, entry: Any) -> dict[str, Any] | None:
        index, name, arguments = _call(entry)
        if index not in self._calls:
            return entry
        left = self._calls[index]
        name, left[0] = _cut(name, left[0])
        if (name and index in self._is_named) or (arguments and left[0]):
            raise Diverged("it calls another function")
        arguments, left[1] = _cut(arguments, left[1])
        if not name and not arguments:
            return None
        # Its id is another one each time; the client has the first.
        function = ({"name": name} if name else {}) | {"arguments": arguments}
        return {"index": index, "function": function}


def _cut(piece: str, expected: str) -> tuple[str, str]:
    """What of `piece` is new, and what of `expected` has not come. Raises Diverged where they differ."""
    count = min(len(expected), len(piece))
    if piece[:count] != expected[:count]:
        raise Diverged("its tool calls are others")
    return piece[count:], expected[count:]


def data_of(events: bytes) -> Iterator[bytes]:
    """The data of each event that has some."""
    for line in events.splitlines():
        if line.startswith(b"data:") and (data := line[5:].strip()):
            yield data


def decoded(data: bytes) -> dict[str, Any] | None:
    """The object in `data`, if it is one."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def before_failure(events: bytes) -> bytes:
    """Those before the one that says that the server failed; all where none does."""
    place = begin = 0
    # Nearly all have no such word, and there is one per token.
    lines = events.splitlines(keepends=True) if b'"error"' in events else []
    for line in lines:
        place += len(line)
        if not line.strip():
            begin = place
        elif line.startswith(b"data:") and _is_failure(decoded(line[5:].strip())):
            return events[:begin]
    return events


def _is_failure(body: dict[str, Any] | None) -> bool:
    """Whether an event says nothing but that the server failed: an `error` whose code is a status of 500 or more."""
    error = None if body is None or body.get("choices") else body.get("error")
    code = str(error.get("code")) if isinstance(error, dict) else ""
    return len(code) == 3 and code.isdecimal() and code >= "500"


def is_half(events: bytes) -> bool:
    """Whether the last event lacks its end. Some servers leave out the blank line behind the last one."""
    if events.endswith((b"\n\n", b"\r\n\r\n")):
        return False
    data = list(data_of(events))
    return not data or (data[-1] != _DONE and decoded(data[-1]) is None)


def _said(choice: dict[str, Any]) -> dict[str, Any]:
    """The new part of a choice: chats have a delta, completions a text."""
    delta = choice.get("delta")
    return delta if isinstance(delta, dict) else {"text": choice.get("text")}


def _call(entry: Any) -> tuple[int, str, str]:
    """Index, name and arguments of an entry of `tool_calls`."""
    entry = entry if isinstance(entry, dict) else {}
    function = entry.get("function")
    function = function if isinstance(function, dict) else {}
    index, name, arguments = entry.get("index"), function.get("name"), function.get("arguments")
    return (
        index if isinstance(index, int) else 0,
        name if isinstance(name, str) else "",
        arguments if isinstance(arguments, str) else "",
    )
