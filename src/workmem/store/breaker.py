"""When the tier below dram is left alone: it trips after failures in a row and is tried again after a pause.

Writes and reads trip apart: a full disk still serves what it holds. One that trips again after each pause is failing
for good: then it is drained and opened anew (`rebuild`).
"""

from __future__ import annotations

import errno
import math
import threading

from workmem.core.clock import Clock
from workmem.core.events import EventSink, TierStateChanged
from workmem.core.outcomes import TierName

FAILURES_MAX = 3
"""Failures in a row that trip the tier."""
TRIPS_MAX = 3
"""Times in a row that it trips, a pause apart, until it is opened anew."""
_STAYS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""A disk that is full or read-only: opened anew it would be so still, and what it holds can be read meanwhile."""


class Breaker:
    """Counts failures. While `writes_open` no page is taken; while `reads_open` none is read.

    `tier` is what its events name.
    """

    def __init__(self, clock: Clock, sink: EventSink, retry_s: float, tier: TierName) -> None:
        self._clock = clock
        self._sink = sink
        self._retry_s = retry_s
        self.tier = tier
        self._lock = threading.Lock()
        self._write_streak = self._read_streak = 0
        self._write_trips = self._read_trips = 0
        self._write_again = self._read_again = 0.0
        self._lost = self._is_left_alone = False
        self.writes_open = False
        self.reads_open = False
        self.write_errors = 0
        self.read_errors = 0

    @property
    def is_lost(self) -> bool:
        """The folder is gone: nothing may be written where it was."""
        return self._lost

    @property
    def is_failing(self) -> bool:
        """Pauses do not help: it is to be drained and opened anew."""
        return self._lost or max(self._write_trips, self._read_trips) >= TRIPS_MAX

    def may_write(self) -> bool:
        """Writes are well, or their pause is over."""
        return not self.writes_open or self._clock.monotonic() >= self._write_again

    def write_failed(self, error: Exception) -> None:
        """A write or sync failed."""
        with self._lock:
            if self._is_left_alone:
                return
            self.write_errors += 1
            self._write_streak += 1
            if self._write_streak < FAILURES_MAX:
                return
            self._write_trips += getattr(error, "errno", None) not in _STAYS
            self._write_again = self._clock.monotonic() + self._retry_s
            tripped, self.writes_open = not self.writes_open, True
        if tripped:
            self._tell("error", f"writes fail ({error}); reads go on; again in {self._retry_s:g} s")

    def write_worked(self) -> bool:
        """A batch is durable. True if that brought writing back."""
        with self._lock:
            if self._is_left_alone:
                return False
            self._write_streak = self._write_trips = 0
            back, self.writes_open = self.writes_open, False
        if back:
            self._tell("ok", "a write worked")
        return back

    def read_failed(self, error: Exception) -> None:
        """A page could not be read."""
        with self._lock:
            if self._is_left_alone:
                return
            self.read_errors += 1
            self._read_streak += 1
            if self._read_streak < FAILURES_MAX:
                return
            self._read_again = self._clock.monotonic() + self._retry_s
            tripped, self.reads_open = not self.reads_open, True
            # Reads that were under way when it tripped fail with it.
            self._read_trips += tripped
        if tripped:
            self._tell("error", f"reads fail ({error}); dram serves alone; again in {self._retry_s:g} s")

    def read_worked(self) -> None:
        """A page arrived."""
        self._read_streak = self._read_trips = 0

    def folder_lost(self) -> None:
        """The folder was removed or replaced: nothing written to it would be found again."""
        with self._lock:
            if self._lost:
                return
            self._lost = True
            self._leave_alone()
        self._tell("error", "the folder is gone; dram serves alone until another is in its place")

    def leave_alone(self) -> None:
        """The tier is not there to be tried, until `begin_anew`."""
        with self._lock:
            self._leave_alone()

    def begin_anew(self, *, can_write: bool = True) -> None:
        """The tier was opened anew. Where it still cannot be written to, that is tried again after the next pause."""
        with self._lock:
            self._lost = self._is_left_alone = self.reads_open = False
            self._write_streak = self._read_streak = self._write_trips = self._read_trips = 0
            self._read_again = 0.0
            self.writes_open = not can_write
            self._write_again = 0.0 if can_write else self._clock.monotonic() + self._retry_s
            self._write_streak = 0 if can_write else FAILURES_MAX

    def tick(self) -> None:
        """Let reads be tried again once their pause is over: a single failure trips them anew."""
        with self._lock:
            if not self.reads_open or self._clock.monotonic() < self._read_again:
                return
            self._read_streak = FAILURES_MAX - 1
            self.reads_open = False
        self._tell("ok", "the pause is over, reads are tried again")

    def tell(self, state: str, reason: str) -> None:
        """Say what becomes of the tier."""
        self._tell(state, reason)

    def _leave_alone(self) -> None:
        self._is_left_alone = self.writes_open = self.reads_open = True
        self._write_again = self._read_again = math.inf

    def _tell(self, state: str, reason: str) -> None:
        self._sink(TierStateChanged(tier=self.tier, state=state, reason=reason))
