"""When the ssd tier is left alone: it trips after failures in a row and is tried again after a pause."""

from __future__ import annotations

import threading

from workmem.core.clock import Clock
from workmem.core.events import EventSink, TierStateChanged
from workmem.core.outcomes import TierName

FAILURES_MAX = 3
"""Failures in a row that trip the tier."""


class Breaker:
    """Counts failures. While it `is_open` the tier takes no pages and starts no reads."""

    def __init__(self, clock: Clock, sink: EventSink, retry_s: float) -> None:
        self._clock = clock
        self._sink = sink
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._write_streak = 0
        self._read_streak = 0
        self._retry_at = 0.0
        self.is_open = False
        self.write_errors = 0
        self.read_errors = 0

    def may_try(self) -> bool:
        """The tier is well, or the pause is over."""
        return not self.is_open or self._clock.monotonic() >= self._retry_at

    def write_failed(self, error: Exception) -> None:
        """A write or sync failed."""
        with self._lock:
            self.write_errors += 1
            self._write_streak += 1
            tripped = self._trip(self._write_streak)
        if tripped:
            self._tell(
                "error", f"{self._write_streak} writes in a row failed: {error}; again in {self._retry_s:g} s"
            )

    def read_failed(self, error: Exception) -> None:
        """A read failed."""
        with self._lock:
            self.read_errors += 1
            self._read_streak += 1
            tripped = self._trip(self._read_streak)
        if tripped:
            self._tell(
                "error", f"{self._read_streak} reads in a row failed: {error}; again in {self._retry_s:g} s"
            )

    def write_worked(self) -> bool:
        """A batch is durable. True if that brought the tier back."""
        with self._lock:
            self._write_streak = 0
            back, self.is_open = self.is_open, False
        if back:
            self._tell("ok", "a write worked")
        return back

    def read_worked(self) -> None:
        """A read arrived."""
        self._read_streak = 0

    def _trip(self, streak: int) -> bool:
        if streak < FAILURES_MAX:
            return False
        self._retry_at = self._clock.monotonic() + self._retry_s
        tripped, self.is_open = not self.is_open, True
        return tripped

    def _tell(self, state: str, reason: str) -> None:
        self._sink(TierStateChanged(tier=TierName.SSD, state=state, reason=reason))
