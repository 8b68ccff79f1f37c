"""Transfers that vLLM's tiered offload has asked for and waits to hear the end of.

Each is heard of exactly once, whatever becomes of the store or of our own code: without it vLLM would hold the
chunks for ever, and the requests that wait for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec


class ChunkJob:
    """Chunks to copy between rows of vLLM's memory and the store: `names[i]` is, or is to be, in row `rows[i]`."""

    def __init__(
        self, number: int, request: str, names: Sequence[bytes], rows: Sequence[int], *, is_load: bool
    ) -> None:
        self.number = number
        self.request = request
        self.names = tuple(names)
        self.rows = tuple(rows)
        self.is_load = is_load
        self.copying = threading.Lock()
        """Held while a row of it is read or written."""
        self.is_over = False
        """Its rows may be another's by now: none is touched any more by who takes `copying` after this was set."""
        self.is_damaged = False
        """Of a load: the first chunk that is missing did not come in time, or not as it was stored."""
        self.left = len(self.names)
        """Of a store: chunks whose end has not been told yet."""
        self.missed: set[bytes] = set()
        """Of a store: chunks that the store did not take."""


class JobEnd(msgspec.Struct, frozen=True):
    """How a job ended."""

    job: ChunkJob
    done: tuple[bytes, ...]
    """The chunks that are where they were wanted, in order."""
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Whether all are."""
        return len(self.done) == len(self.job.names)


class ChunkJobs:
    """All jobs that have begun and whose end was not taken yet. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[int, tuple[ChunkJob, float]] = {}
        self._ended: list[JobEnd] = []
        self._change = threading.Condition()

    def __len__(self) -> int:
        return len(self._began)

    def begin(self, job: ChunkJob) -> None:
        """From now on `job` has an end."""
        with self._change:
            self._began[job.number] = job, self._clock()

    def end(self, job: ChunkJob, done: Sequence[bytes]) -> None:
        """`job` touches its rows no more. Does nothing where it has ended before."""
        with self._change:
            began = self._began.pop(job.number, None)
            if began is None:
                return
            self._ended.append(JobEnd(job, tuple(done), self._clock() - began[1]))
            self._change.notify_all()

    def take(self) -> list[JobEnd]:
        """Those that have ended since the last call."""
        with self._change:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> bool:
        """Return once all have ended. False on timeout."""
        with self._change:
            return self._change.wait_for(lambda: not self._began, timeout_s)

    def give_up(self) -> None:
        """End all that have not ended, with nothing done. Waits for the row that is being copied, no longer."""
        with self._change:
            jobs = [job for job, _ in self._began.values()]
        for job in jobs:
            # Before the lock: whoever copies would take it again and again, and be done first.
            job.is_over = True
            with job.copying:
                self.end(job, ())
