"""Generated tokens back in the place of their turn's rendering, so that a prompt is the one whose KV is held.

A turn is put in place only where the text before it is, to the character, the one it answered, and where its own
rendering says what its tokens say. Encoded apart, the texts between turns give the tokens that they gave when they
were sent: each begins with the end mark of a turn, and no token reaches over that.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from workmem.core.generation import SAME, USED, KnownOutcome, KnownTurn
from workmem.prompt.dialects.chat import REASONING_KEYS
from workmem.prompt.turn_alignment import Part, align

END_MARKS_TRIED = 4
"""A text may name an end mark itself; the turn then ends at one of those that follow."""
_CONTEXT_TOKENS = 4
"""Of the text before a turn: some tokenizers write a first token in another way than a later one."""
_CUT = "\ufffd"

Offsets = list[tuple[int, int]]


class Encoded(NamedTuple):
    """Tokens of a text, and the characters of it that each stands for."""

    token_ids: list[int]
    offsets: Offsets
    outcomes: tuple[KnownOutcome, ...]


class _Spelled(NamedTuple):
    text: str
    starts: tuple[int, ...]
    """Where in `text` each token begins."""


class _Place(NamedTuple):
    start: int
    end: int
    """Characters of the rendering."""
    token_ids: tuple[int, ...]
    offsets: Offsets


class KnownTurns:
    """Puts turns in place. Safe to use from several threads."""

    def __init__(self, backend: Tokenizer, end_ids: frozenset[int]) -> None:
        self._backend = backend
        marks = (backend.decode([token], skip_special_tokens=False) for token in sorted(end_ids))
        self._end_marks = tuple(mark for mark in marks if mark.strip())
        # Turns come again with every request of their session.
        self._spelled = functools.lru_cache(maxsize=2048)(self._spell)

    def encode(self, text: str, messages: Sequence[Mapping[str, Any]], known: Sequence[KnownTurn]) -> Encoded:
        """Tokens of `text`, the rendering of `messages`, with those of `known` turns in their places."""
        token_ids: list[int] = []
        offsets: Offsets = []
        outcomes: list[KnownOutcome] = []
        at = hashed = 0
        digest = hashlib.blake2b(digest_size=20)
        for turn in known:
            outcome = ""
            if not at <= turn.prompt_chars <= len(text):
                outcome = _differs(messages[: turn.message + 1])
            else:
                digest.update(text[hashed : turn.prompt_chars].encode("utf-8", "surrogatepass"))
                hashed = turn.prompt_chars
                if digest.digest() != turn.prompt_digest:
                    outcome = _differs(messages[: turn.message + 1])
            if outcome:
                outcomes.append(KnownOutcome(turn.message, outcome))
                continue
            before = self._part(text, at, turn.prompt_chars)
            context = tuple((token_ids + before[0])[-_CONTEXT_TOKENS:])
            place = self._place(text, turn, context, messages[turn.message])
            if isinstance(place, str):
                outcomes.append(KnownOutcome(turn.message, place))
                continue
            token_ids += before[0]
            offsets += before[1]
            token_ids += place.token_ids
            offsets += place.offsets
            at = place.end
            own = self._backend.encode(text[place.start : place.end], add_special_tokens=False).ids
            outcome = SAME if tuple(own) == place.token_ids else USED
            outcomes.append(KnownOutcome(turn.message, outcome, len(place.token_ids)))
        rest = self._part(text, at, len(text))
        return Encoded(token_ids + rest[0], offsets + rest[1], tuple(outcomes))

    def _part(self, text: str, start: int, end: int) -> tuple[list[int], Offsets]:
        encoding = self._backend.encode(text[start:end], add_special_tokens=False)
        return encoding.ids, [(start + a, start + b) for a, b in encoding.offsets]

    def _place(
        self, text: str, turn: KnownTurn, context: tuple[int, ...], message: Mapping[str, Any]
    ) -> _Place | str:
        """Where the turn stands in `text`; or why it is not put there."""
        spelled = self._spelled(turn.token_ids, context)
        if _CUT in spelled.text:
            return "cut_character"
        start = turn.prompt_chars
        for end in self._ends(text, start):
            parts = align(spelled.text, text[start:end], message)
            if parts is None:
                continue
            count = bisect_right(spelled.starts, parts[-1].end - 1) if parts[-1].end else 0
            boundary = spelled.starts[count] if count < len(spelled.starts) else len(spelled.text)
            if boundary != parts[-1].end or not count:
                return "inside_token"
            offsets = [_offset(parts, at, start) for at in spelled.starts[:count]]
            return _Place(start, end, turn.token_ids[:count], offsets)
        return _differs([message])

    def _ends(self, text: str, start: int) -> list[int]:
        """Where the turn that begins at `start` may end, last first: at the first end marks that follow."""
        ends: list[int] = []
        for mark in self._end_marks:
            at = text.find(mark, start)
            while at >= 0 and len(ends) < END_MARKS_TRIED * len(self._end_marks):
                ends.append(at)
                at = text.find(mark, at + 1)
        return sorted(ends)[:END_MARKS_TRIED][::-1]

    def _spell(self, token_ids: tuple[int, ...], context: tuple[int, ...]) -> _Spelled:
        """What generated tokens say behind `context`, special ones too."""
        stream = DecodeStream(skip_special_tokens=False)
        for token in context:
            stream.step(self._backend, token)
        pieces: list[str] = []
        starts: list[int] = []
        length = 0
        for token in token_ids:
            starts.append(length)
            piece = stream.step(self._backend, token) or ""
            pieces.append(piece)
            length += len(piece)
        text = "".join(pieces)
        # Nothing of a character whose last bytes were not generated comes out of the stream.
        whole = self._backend.decode([*context, *token_ids], skip_special_tokens=False)
        return _Spelled(text if whole.endswith(text) else text + _CUT, tuple(starts))


def _differs(messages: Sequence[Mapping[str, Any]]) -> str:
    """The likeliest reason: templates drop thinking from turns that a user has answered."""
    thinks = any(isinstance(message.get(key), str) for message in messages for key in REASONING_KEYS)
    return "template_strips_thinking" if thinks else "template_differs"


def _offset(parts: Sequence[Part], at: int, start: int) -> tuple[int, int]:
    """The character of the rendering that character `at` of a turn stands for, the turn beginning at `start`."""
    for part in parts:
        if part.start <= at < part.end:
            place = min(
                part.rendered_start + at - part.start, max(part.rendered_end - 1, part.rendered_start)
            )
            return start + place, start + place
    place = parts[-1].rendered_end
    return start + place, start + place
