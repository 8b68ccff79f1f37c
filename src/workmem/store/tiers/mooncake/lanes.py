"""Threads that wait for Mooncake, so that nobody else does."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

log = logging.getLogger(__name__)


class Job(msgspec.Struct, frozen=True, eq=False):
    """A call. Either is run, once."""

    lane: str
    """Calls of one lane wait for the same peer."""
    run: Callable[[], None]
    give_up: Callable[[], None]
    """In place of `run`: from then on nothing may be touched that belongs to the caller."""


class Lanes:
    """`threads` threads, of which one peer can hold `lane_max` at most: the others go on while it does not answer.

    A job that waits while no other has ended for `patience_s` is given up. One under way is not: the engine may still
    write to the pages that it was given.
    """

    def __init__(self, name: str, *, threads: int, lane_max: int, queue_max: int, patience_s: float) -> None:
        self._lane_max = lane_max
        self._queue_max = queue_max
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._under_way: Counter[str] = Counter()
        self._moved_at = time.monotonic()
        self._is_closed = False
        mains = [self._main] * threads + [self._watch]
        self._threads = [
            threading.Thread(target=main, name=f"workmem-mooncake-{name}", daemon=True) for main in mains
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Have it run soon; given up at once where too many wait, or this is closed."""
        with self._changed:
            is_taken = not self._is_closed and len(self._waiting) < self._queue_max
            if is_taken:
                if not self._waiting and not self._under_way.total():
                    self._moved_at = time.monotonic()
                self._waiting.append(job)
                self._changed.notify_all()
        if not is_taken:
            job.give_up()

    def close(self, timeout_s: float) -> bool:
        """Give up what waits, end what is under way. False where that takes longer."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self._is_closed = True
            left = [*self._waiting]
            self._waiting.clear()
            self._changed.notify_all()
        for job in left:
            job.give_up()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _main(self) -> None:
        while (job := self._take()) is not None:
            try:
                job.run()
            except Exception:  # thread main: whoever waits must hear of it, and the lane goes on
                log.exception("a call to Mooncake met a bug of ours")
                job.give_up()
            finally:
                self._end(job)

    def _take(self) -> Job | None:
        with self._changed:
            while True:
                for job in self._waiting:
                    if self._under_way[job.lane] < self._lane_max:
                        self._waiting.remove(job)
                        self._under_way[job.lane] += 1
                        return job
                if self._is_closed:
                    return None
                self._changed.wait()

    def _end(self, job: Job) -> None:
        with self._changed:
            self._under_way[job.lane] -= 1
            if not self._under_way[job.lane]:
                del self._under_way[job.lane]
            self._moved_at = time.monotonic()
            self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                self._changed.wait(self._patience_s / 4 if self._waiting else None)
                stuck = time.monotonic() - self._moved_at >= self._patience_s
                left = [*self._waiting] if stuck else []
                if stuck:
                    self._waiting.clear()
            for job in left:
                job.give_up()
