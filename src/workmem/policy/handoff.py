"""How long a request waits for blocks that were just computed elsewhere and are on their way to the store.

The rule, the same for every engine: it waits until all full blocks of the handed-off tokens can be had, no longer than
it was told and the engine allows, and not when nothing new came for a quarter of that time: then what is missing was
never put, or its producer is dead. Pure: who holds a wait looks into the store, and brings the time.
"""

from __future__ import annotations

from enum import StrEnum

from workmem.core.generation import Handoff, HandoffReport

QUIET_SHARE = 0.25
"""Of the wait: after so long without a new block it is over."""
QUIET_MIN_S = 0.25
"""But not before: stores of other hosts are heard of that often."""
LOOK_MIN_S, LOOK_MAX_S = 0.005, 0.05
_LOOK_SHARE = 1 / 16
"""Of the time waited so far: so looking costs less the longer it takes, and is late by no more than that."""


class Ending(StrEnum):
    """Why a wait is over."""

    READY = "ready"
    """All was there at the first look."""
    WHOLE = "whole"
    """All came."""
    STALLED = "stalled"
    """Nothing new came for too long."""
    LATE = "late"
    """Time was up."""
    UNAVAILABLE = "unavailable"
    """It cannot come: the store is away, a block of it is damaged, or nothing may be loaded."""
    LEFT = "left"
    """The request ended before."""


class HandoffWait:
    """Of one request, once. Times are in seconds of one clock that never goes back; `now` at first: when it arrived.

    `blocks`: full blocks of the tokens handed off, as far as the prompt has use for them; `longest_s`: what the engine allows.
    """

    def __init__(self, handoff: Handoff, *, blocks: int, longest_s: float, now: float) -> None:
        # A comparison that is false for NaN, too.
        wait_s = min(handoff.wait_s, longest_s) if handoff.wait_s >= 0 else 0.0
        self.blocks = blocks
        self.ending: Ending | None = None
        """None while it lasts."""
        self.waited_s = 0.0
        self.most = 0
        """Blocks that were seen to be there, at most."""
        self._until = now + wait_s
        self._quiet_s = max(QUIET_SHARE * wait_s, QUIET_MIN_S)
        self._quiet_at = now + self._quiet_s
        self._look_at = now
        self._held_since: float | None = None

    @property
    def is_over(self) -> bool:
        """The request is not held back any more."""
        return self.ending is not None

    def is_due(self, now: float) -> bool:
        """Whether it is time to look again; before, the request waits on."""
        return now >= self._look_at or self.is_late(now)

    def is_late(self, now: float) -> bool:
        """Whether its time is up."""
        return now >= self._until

    def observe(self, blocks: int, now: float) -> bool:
        """So many leading blocks can be had now. Whether to wait on."""
        if self.ending is not None:
            return False
        if blocks > self.most:
            self.most, self._quiet_at = blocks, now + self._quiet_s
        if blocks >= self.blocks:
            return self._end(Ending.READY if self._held_since is None else Ending.WHOLE, now)
        if self.is_late(now):
            return self._end(Ending.LATE, now)
        if now >= self._quiet_at:
            return self._end(Ending.STALLED, now)
        if self._held_since is None:
            self._held_since = now
        pause = max(LOOK_MIN_S, min(_LOOK_SHARE * (now - self._held_since), LOOK_MAX_S))
        self._look_at = min(now + pause, self._until, self._quiet_at)
        return True

    def end(self, ending: Ending, now: float) -> None:
        """It is over for a reason that no look tells. The first one counts."""
        if self.ending is None:
            self._end(ending, now)

    def report(self, tokens: int) -> HandoffReport:
        """For the response; `tokens` of the prompt were loaded."""
        return HandoffReport(waited_s=round(self.waited_s, 4), tokens=tokens)

    def _end(self, ending: Ending, now: float) -> bool:
        self.ending = ending
        if self._held_since is not None:
            self.waited_s = max(0.0, now - self._held_since)
        return False
