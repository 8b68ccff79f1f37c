"""When the tier below dram is left alone: it trips after failures in a row and is tried again after a pause.

Writes and reads trip apart: a full disk still serves what it holds.
"""

from __future__ import annotations

import math
import threading

from workmem.core.clock import Clock
from workmem.core.events import EventSink, TierStateChanged
from workmem.core.outcomes import TierName

FAILURES_MAX = 3
"""Failures in a row that trip the tier."""


class Breaker:
    """Counts failures. While `writes_open` no page is taken; while `reads_open` none is read.

    `tier` is what its events name.
    """

    def __init__(self, clock: Clock, sink: EventSink, retry_s: float, tier: TierName) -> None:
        self._clock = clock
        self._sink = sink
        self._retry_s = retry_s
        self._tier = tier
        self._lock = threading.Lock()
        self._write_streak = 0
        self._read_streak = 0
        self._write_again = 0.0
        self._read_again = 0.0
        self._lost = False
        self.writes_open = False
        self.reads_open = False
        self.write_errors = 0
        self.read_errors = 0

    @property
    def is_lost(self) -> bool:
        """The folder is gone for good: nothing may be written where it was."""
        return self._lost

    def may_write(self) -> bool:
        """Writes are well, or their pause is over."""
        return not self.writes_open or self._clock.monotonic() >= self._write_again

    def write_failed(self, error: Exception) -> None:
        """A write or sync failed."""
        with self._lock:
            if self._lost:
                return
            self.write_errors += 1
            self._write_streak += 1
            if self._write_streak < FAILURES_MAX:
                return
            self._write_again = self._clock.monotonic() + self._retry_s
            tripped, self.writes_open = not self.writes_open, True
        if tripped:
            self._tell("error", f"writes fail ({error}); reads go on; again in {self._retry_s:g} s")

    def write_worked(self) -> bool:
        """A batch is durable. True if that brought writing back."""
        with self._lock:
            if self._lost:
                return False
            self._write_streak = 0
            back, self.writes_open = self.writes_open, False
        if back:
            self._tell("ok", "a write worked")
        return back

    def read_failed(self, error: Exception) -> None:
        """A page could not be read."""
        with self._lock:
            if self._lost:
                return
            self.read_errors += 1
            self._read_streak += 1
            if self._read_streak < FAILURES_MAX:
                return
            self._read_again = self._clock.monotonic() + self._retry_s
            tripped, self.reads_open = not self.reads_open, True
        if tripped:
            self._tell("error", f"reads fail ({error}); dram serves alone; again in {self._retry_s:g} s")

    def read_worked(self) -> None:
        """A page arrived."""
        self._read_streak = 0

    def folder_lost(self) -> None:
        """The folder was removed or replaced: nothing written to it would be found again."""
        with self._lock:
            if self._lost:
                return
            self._lost = self.writes_open = self.reads_open = True
            self._write_again = self._read_again = math.inf
        self._tell("error", "the folder is gone; dram serves alone until the next start")

    def tick(self) -> None:
        """Let reads be tried again once their pause is over: a single failure trips them anew."""
        with self._lock:
            if not self.reads_open or self._clock.monotonic() < self._read_again:
                return
            self._read_streak = FAILURES_MAX - 1
            self.reads_open = False
        self._tell("ok", "the pause is over, reads are tried again")

    def _tell(self, state: str, reason: str) -> None:
        self._sink(TierStateChanged(tier=self._tier, state=state, reason=reason))
