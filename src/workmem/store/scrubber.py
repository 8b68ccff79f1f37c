"""The scrubber: reads what lies on disk at a bounded rate, so that rot is found before somebody needs the page.

It takes one page at a time and waits in between for as long as that page's bytes are worth, steps aside
while readers wait for the disk, and marks its thread idle for the kernel's I/O scheduler.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from workmem.core.clock import Clock
from workmem.core.errors import IntegrityError
from workmem.core.events import BoundReached, EventSink
from workmem.core.outcomes import MissReason

log = logging.getLogger(__name__)

PASS_EVERY_S = 24 * 3600.0
"""A pass begins no earlier than this after the one before began: a small store is not read round the clock."""
_IDLE_TICK_S = 5.0
"""Pause where there is nothing to read, or no disk to read from."""
_BUSY_TICK_S = 0.05
"""Pause while others wait for the disk."""
_FAILURES_MAX = 8
"""Reads failing in a row that end a pass: then it is the disk, not its pages."""
_IOPRIO_SYSCALL = {"x86_64": 251, "aarch64": 30, "riscv64": 30}
_IOPRIO_IDLE = 3 << 13

P = TypeVar("P")


class ScrubSource(Protocol[P]):
    """What a tier shows the scrubber. `P` stands for a live page; every method may be called from any thread."""

    def segments(self) -> Sequence[int]:
        """Numbers of the segments that hold pages now."""
        ...

    def pages(self, segment: int) -> Sequence[P]:
        """Live pages of a segment as they lie; empty where it is gone."""
        ...

    def read(self, page: P) -> int | None:
        """Read `page` and check it (R6). Returns the bytes read, None if the page left meanwhile.

        Raises IntegrityError when it is not what was written, OSError when it cannot be read.
        """
        ...

    def quarantine(self, page: P, reason: MissReason) -> None:
        """Take `page` out of service, unless it left meanwhile; tells and counts it."""
        ...

    def is_busy(self) -> bool:
        """Others wait for the disk, or it is left alone after failures."""
        ...


class ScrubCounts(msgspec.Struct):
    """What has been done so far in this process."""

    passes: int = 0
    pages: int = 0
    bytes: int = 0
    damaged: int = 0
    """Pages that were not what was written."""
    unreadable: int = 0


class Scrubber(Generic[P]):
    """The walk: which page is next, and how long to wait before it. Not thread-safe; `ScrubThread` drives it."""

    def __init__(self, source: ScrubSource[P], clock: Clock, sink: EventSink, bytes_per_s: int) -> None:
        assert bytes_per_s > 0
        self._source = source
        self._clock = clock
        self._sink = sink
        self._bytes_per_s = bytes_per_s
        self.counts = ScrubCounts()
        self.segment = 0
        """Number of the segment under way, or last read: the next one is the lowest above it."""
        self._left: list[P] = []
        """Pages of that segment still to be read, the last one first."""
        self._failures = 0
        self._began: float | None = None
        self.has_ended = False
        """The last step found the end of a pass, or nothing to read."""

    def step(self) -> float:
        """Read at most one page. Returns the seconds to wait before the next step."""
        self.has_ended = False
        if self._source.is_busy():
            return _BUSY_TICK_S
        if not self._left and not self._next_segment():
            return self._end_pass()
        if self._began is None:
            self._began = self._clock.monotonic()
        if not self._left:
            return 0.0
        return self._read(self._left.pop())

    def _next_segment(self) -> bool:
        """Go on to the next segment in order of numbers. False behind the last one."""
        numbers = [number for number in self._source.segments() if number > self.segment]
        if not numbers:
            return False
        self.segment = min(numbers)
        self._left = list(reversed(self._source.pages(self.segment)))
        return True

    def _read(self, page: P) -> float:
        started = self._clock.monotonic()
        try:
            size = self._source.read(page)
        except IntegrityError as error:
            log.warning("a page on ssd is damaged: %s", error)
            self.counts.damaged += 1
            self._source.quarantine(page, MissReason.CORRUPT)
            return 0.0
        except OSError as error:
            return self._unreadable(page, error)
        self._failures = 0
        if size is None:
            return 0.0
        self.counts.pages += 1
        self.counts.bytes += size
        took = self._clock.monotonic() - started
        return max(0.0, size / self._bytes_per_s - took)

    def _unreadable(self, page: P, error: OSError) -> float:
        self._failures += 1
        if self._failures >= _FAILURES_MAX:
            # A disk that reads nothing must not cost every page it holds.
            detail = f"{self._failures} reads in a row failed, the last with {error}; the pass ends"
            self._sink(BoundReached(name="store.ssd.scrub", limit=_FAILURES_MAX, detail=detail))
            self._left.clear()
            self._failures = 0
            return self._rest()
        self.counts.unreadable += 1
        self._source.quarantine(page, MissReason.UNAVAILABLE)
        return _BUSY_TICK_S

    def _end_pass(self) -> float:
        if self._began is None:
            self.has_ended = True
            return _IDLE_TICK_S
        self.counts.passes += 1
        return self._rest()

    def _rest(self) -> float:
        """Seconds until the next pass, which begins at the first segment again."""
        assert self._began is not None
        self.has_ended = True
        since = self._clock.monotonic() - self._began
        self.segment, self._began = 0, None
        return max(_IDLE_TICK_S, PASS_EVERY_S - since)


class ScrubThread:
    """Runs a scrubber behind everything else, until `close`."""

    def __init__(self, step: Callable[[], float]) -> None:
        self._step = step
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="workmem-ssd-scrub", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Stop after the page under way. False if the disk holds it longer than `timeout_s`."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        _be_idle()
        wait_s = _IDLE_TICK_S
        while not self._stop.wait(wait_s):
            try:
                wait_s = self._step()
            except Exception:
                # Thread main: reads check what they serve without it.
                log.exception("the scrubber met a bug of ours and stops")
                return


def _be_idle() -> None:
    """Ask the kernel to serve this thread's I/O last. Without effect where it has no such thing."""
    number = _IOPRIO_SYSCALL.get(platform.machine())
    if number is not None:
        # 1 stands for "a thread", 0 for this one.
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_IDLE)
