"""Finding what a model thought, in the text that it generates, as it streams.

Models that think write `<think>`, their thoughts and `</think>` before their answer; some templates write the first
mark themselves. Only at the beginning is it thinking: an answer may speak of the marks. Any split of the text into
pieces gives the same result. Line feeds around thoughts are the template's, and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

OPEN, CLOSE = "<think>", "</think>"


class Thought(msgspec.Struct, frozen=True):
    """Some of what the model thought."""

    text: str


class ThinkingParser:
    """Splits a stream of text into thoughts and answer. `feed` each piece, then `finish` once."""

    def __init__(self, *, has_begun: bool) -> None:
        """`has_begun`: the prompt ended with the opening mark."""
        self._buffer = ""
        self._mode = "lead" if has_begun else "start"

    def feed(self, text: str) -> list[Thought | str]:
        """Everything that is certain after `text`; the rest is held back."""
        self._buffer += text
        return list(self._advance(is_last=False))

    def finish(self) -> list[Thought | str]:
        """What was held back. Thoughts that were never closed stay thoughts."""
        return list(self._advance(is_last=True))

    def _advance(self, *, is_last: bool) -> Iterator[Thought | str]:
        if self._mode == "start":
            self._at_start(is_last=is_last)
        if self._mode == "lead":
            self._skip_lines("inside")
        if self._mode == "inside":
            yield from self._inside(is_last=is_last)
        if self._mode == "after":
            self._skip_lines("text")
        if self._mode == "text" and self._buffer:
            text, self._buffer = self._buffer, ""
            yield text

    def _at_start(self, *, is_last: bool) -> None:
        head = self._buffer.lstrip()
        if head.startswith(OPEN):
            self._buffer, self._mode = head[len(OPEN) :], "lead"
        elif is_last or not OPEN.startswith(head):
            self._mode = "text"

    def _skip_lines(self, following: str) -> None:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._mode = following

    def _inside(self, *, is_last: bool) -> Iterator[Thought]:
        at = self._buffer.find(CLOSE)
        if at >= 0:
            text, self._buffer, self._mode = self._buffer[:at], self._buffer[at + len(CLOSE) :], "after"
            text = text.rstrip("\n")
        else:
            keep = 0 if is_last else _overlap(self._buffer)
            text = self._buffer[: len(self._buffer) - keep].rstrip("\n")
            self._buffer = "" if is_last else self._buffer[len(text) :]
        if text:
            yield Thought(text)


def _overlap(text: str) -> int:
    """Length of the longest end of `text` that may begin the closing mark."""
    return next((n for n in range(min(len(CLOSE) - 1, len(text)), 0, -1) if CLOSE.startswith(text[-n:])), 0)
