"""Which pages wait to be written to the ssd tier, and what becomes of them (R2).

Every method takes the pool's lock itself (R1), but those that say otherwise; none does I/O on the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from workmem.policy.order import Loss
from workmem.store.catalog import Space
from workmem.store.frames import Frame
from workmem.store.residents import Residents
from workmem.store.ssd_index import SsdIndex
from workmem.store.tiers.contract import NO_FACTS, PageFacts
from workmem.store.tiers.entries import put_entry
from workmem.store.tiers.journal_records import PutEntry
from workmem.store.tiers.page_header import identity_of
from workmem.store.tiers.segments import Extent


class WriteJob(msgspec.Struct, frozen=True, eq=False):
    """A page to make durable; its frame is pinned until `settle`."""

    row: int
    stamp: int
    space: Space
    frame: Frame
    facts: PageFacts = NO_FACTS

    @property
    def length(self) -> int:
        """Bytes on disk."""
        return self.frame.size


class WriteQueue:
    """The writer thread's side of the pool: it takes pages, and says how they fared."""

    def __init__(self, state: Residents, index: SsdIndex, extent_bytes_max: int) -> None:
        self._state = state
        self._catalog = state.catalog
        self._index = index
        self.facts_of: Callable[[int], PageFacts] | None = None
        """What to tell the tier of the page in a row; set where it asks. Called with the lock held."""
        self.extent_bytes_max = extent_bytes_max
        """A page that takes more can never be kept; it stays in dram only."""

    def take_writes(self, bytes_max: int) -> list[WriteJob]:
        """The next unwritten pages, pinned; at least one if there is any."""
        jobs: list[WriteJob] = []
        total = 0
        state, catalog = self._state, self._catalog
        with state.outbox:
            queue = state.unwritten
            while queue:
                row, stamp = queue.first
                frame = catalog.frame[row]
                if not state.owes_write(row, stamp) or frame is None:
                    queue.take_first()
                    continue
                if frame.size > self.extent_bytes_max:
                    queue.take_first()
                    state.counts["writes_given_up"] += 1
                    state.write_ended(row, stamp)
                    continue
                if jobs and total + frame.size > bytes_max:
                    break
                queue.take_first()
                if not self._index.begin_write(row, stamp, frame.size):
                    state.counts["writes_given_up"] += 1
                    state.write_ended(row, stamp)
                    continue
                frame.pins += 1
                facts = NO_FACTS if self.facts_of is None else self.facts_of(row)
                jobs.append(WriteJob(row, stamp, catalog.space[row], frame, facts))
                total += frame.size
            state.writes_in_flight += len(jobs)
            state.outbox.changed.notify_all()
        return jobs

    def settle(self, jobs: list[WriteJob], extents: Sequence[Extent | None] | None) -> None:
        """`jobs` are durable at `extents`, or given up (None): unpin them and make them visible (R2)."""
        state = self._state
        with state.outbox:
            try:
                for job, extent in zip(jobs, extents or [None] * len(jobs), strict=True):
                    if extent is None:
                        state.counts["writes_given_up"] += extents is not None
                        self._index.end_write(job.row, job.stamp)
                    else:
                        self._index.admit(job.row, job.stamp, job.space, self._identity(job), extent)
                if extents is not None:
                    rows = [job.row for job in jobs if self._catalog.is_same(job.row, job.stamp)]
                    state.advise(rows, loss=Loss.RELOAD)
            finally:
                # Whatever it met: a frame that stays pinned could never be used again, and a flush would not end.
                state.writes_in_flight -= len(jobs)
                for job in jobs:
                    state.write_ended(job.row, job.stamp)
                state.unpin([job.frame for job in jobs])

    def retry(self, jobs: list[WriteJob]) -> None:
        """They failed and are tried once more, first."""
        with self._state.outbox:
            for job in reversed(jobs):
                self._state.unwritten.put_back((job.row, job.stamp))
                self._index.end_write(job.row, job.stamp)
            self._state.writes_in_flight -= len(jobs)
            self._state.unpin([job.frame for job in jobs])

    def give_up_writes(self) -> None:
        """The tier does not take pages now: nothing waits for it. The lock is held by the caller."""
        for row, stamp in self._state.unwritten:
            if self._state.owes_write(row, stamp):
                self._state.write_ended(row, stamp)
        if self._state.unwritten:
            self._state.unwritten.clear()
            # Of stale ones alone nobody has heard yet, and a flush waits for them too.
            self._state.outbox.changed.notify_all()

    def put_entries(self, jobs: Sequence[WriteJob], extents: Sequence[Extent]) -> list[PutEntry]:
        """The journal's word for pages that are written but not yet visible; their frames are pinned.

        The header is asked, not the row, which may have been given out anew meanwhile.
        """
        entries: list[PutEntry] = []
        for job, extent in zip(jobs, extents, strict=True):
            entries.append(put_entry(job.space, *self._identity(job), extent))
        return entries

    def _identity(self, job: WriteJob) -> tuple[bytes, bytes, int]:
        with self._state.arena.readable(job.frame.offset, job.space.header_bytes) as header:
            return identity_of(header)
