"""Which earlier request a request was meant to continue: the one whose lines it has most of."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from workmem.core.generation import Span
from workmem.linting.files import Recorded
from workmem.prompt.dialects.places import Dialect
from workmem.prompt.lint.segments import segments

_SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+|\n")
SAME_SESSION_MAX = 8
SESSIONS_MAX = 24
SHARED_MIN = 0.3
"""Of a request's text, for another one to be its kin."""


class Seen(NamedTuple):
    """A request that was replayed."""

    recorded: Recorded
    session: str
    token_ids: array[int]
    spans: tuple[Span, ...]
    lines: Counter[str]


class Kin(NamedTuple):
    """The nearest earlier request."""

    seen: Seen
    shared: float
    """Part of the later request's text that stands in it as well."""


class Family:
    """The latest requests of each session. Holds at most `SESSIONS_MAX` sessions."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, deque[Seen]] = OrderedDict()
        self.sessions = 0
        """How many there were."""

    def nearest(self, seen: Seen) -> Kin | None:
        """The kin of `seen` in its own session, else in another; None where it begins something new."""
        own = self._sessions.get(seen.session, ())
        others = (last[-1] for name, last in reversed(self._sessions.items()) if name != seen.session)
        return _best(seen, reversed(own)) or _best(seen, others)

    def add(self, seen: Seen) -> None:
        """It was replayed."""
        if seen.session not in self._sessions:
            self.sessions += 1
        self._sessions.setdefault(seen.session, deque(maxlen=SAME_SESSION_MAX)).append(seen)
        self._sessions.move_to_end(seen.session)
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)


def _best(seen: Seen, candidates: Iterable[Seen]) -> Kin | None:
    """The candidate with most of its text; among equals the first."""
    total = _chars(seen.lines)
    best: Kin | None = None
    for one in candidates:
        if one.recorded.entry.dialect is not seen.recorded.entry.dialect or not total:
            continue
        shared = _chars(seen.lines & one.lines) / total
        if shared >= SHARED_MIN and (best is None or shared > best.shared):
            best = Kin(one, shared)
    return best


def lines_of(body: Mapping[str, Any], dialect: Dialect) -> Counter[str]:
    """The lines and sentences of all its texts; of a tool its parts, in whatever order they are written."""
    lines: Counter[str] = Counter()
    for segment in segments(body, dialect):
        if segment.role == "tools":
            lines.update(_parts(json.loads(segment.text)))
        else:
            lines.update(line for line in _SENTENCE_END.split(segment.text) if line.strip())
    return lines


def _parts(value: Any, key: str = "") -> list[str]:
    if isinstance(value, dict):
        return [part for name, inner in value.items() for part in _parts(inner, name)]
    if isinstance(value, list):
        return [part for inner in value for part in _parts(inner, key)]
    return [f"{key}: {value}"]


def _chars(lines: Counter[str]) -> int:
    return sum(len(line) * count for line, count in lines.items())
