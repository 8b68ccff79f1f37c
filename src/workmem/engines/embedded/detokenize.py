"""Tokens to text while they are generated: whole characters only, and nothing of a stop string.

The text is the same however it is cut into calls: a stop string ends it where the first one is complete
(of several completing on the same character, the longest).
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class StopMatcher:
    """Passes text through and ends it before the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Text that is certain to be part of the output; what may begin a stop string is held back."""
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """The text of one answer. Not thread-safe; one per running completion."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._decoded = 0
        self._matcher = StopMatcher(stops)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, None while it goes on."""
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; often empty. Special tokens have no text."""
        self._ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id)
        if not text:
            return ""
        self._decoded += len(text)
        return self._matcher.push(text)

    def finish(self) -> str:
        """The rest, when no token follows: held-back text, and U+FFFD for a character cut short."""
        if self._matcher.matched is not None:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        rest = self._matcher.push(whole[self._decoded :])
        self._decoded = len(whole)
        return rest if self._matcher.matched is not None else rest + self._matcher.finish()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
