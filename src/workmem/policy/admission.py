"""Which waiting request an engine admits next, and what it keeps free for those that cannot wait. Pure."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits. Whoever learns more of it (what tool it comes back from, what depends on it) adds a field."""

    arrived_s: float
    session: str = ""
    """Whose turn it is; empty where nobody said."""
    priority: int = 0
    """Higher is admitted earlier."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's blocks when a request is about to be admitted beside others."""

    blocks: int
    """Of the whole pool."""
    critical_blocks: int
    """Of those, what critical requests that run hold."""
    critical_seen_s: float
    """When a critical request last waited or ran."""


class Admission(Protocol):
    """Decides. `rank` of two candidates must not change while both wait."""

    def rank(self, candidate: Candidate) -> tuple[float, ...]:
        """The lowest is admitted first; those that are equal in the engine's own order."""
        ...

    def is_critical(self, candidate: Candidate) -> bool:
        """Whether blocks are kept for it."""
        ...

    def keeps_free(self, candidate: Candidate, room: Room, now_s: float) -> int:
        """Blocks that must be left beside those that it needs, or it waits on. For one that is not critical."""
        ...


class Aged:
    """A step of priority is worth `priority_s` seconds of waiting, so whoever waits is overtaken for so long and no longer.

    From priority `critical` on a request is critical. `share` of all blocks is kept for those, what they hold counted in,
    until none was seen for `lent_after_s`; nobody is held back for longer than that either.
    """

    def __init__(self, *, priority_s: float, critical: int, share: float, lent_after_s: float) -> None:
        self._priority_s = priority_s
        self._critical = critical
        self._share = share
        self._lent_after_s = lent_after_s

    def rank(self, candidate: Candidate) -> tuple[float, ...]:
        """As if it had come earlier, or later."""
        return (candidate.arrived_s - candidate.priority * self._priority_s,)

    def is_critical(self, candidate: Candidate) -> bool:
        """By its priority alone."""
        return candidate.priority >= self._critical

    def keeps_free(self, candidate: Candidate, room: Room, now_s: float) -> int:
        """What is left of the share."""
        if now_s - min(candidate.arrived_s, room.critical_seen_s) >= self._lent_after_s:
            return 0
        return max(0, int(self._share * room.blocks) - room.critical_blocks)
