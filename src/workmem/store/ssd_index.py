"""Which blocks the ssd tier holds, which wait to be written, and which must be struck out.

Part of the pool's state: every method that changes it takes the pool's lock (R1), but for those that say
otherwise; none does I/O on the pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from workmem.core.events import BlockAdmitted, BlockEvicted
from workmem.core.keys import BlockKey
from workmem.core.outcomes import MissReason, TierName
from workmem.policy.order import NO_ROW, EvictionOrder
from workmem.policy.segmented_lru import SegmentedLru
from workmem.store.arena import ALIGNMENT_BYTES
from workmem.store.catalog import NO_SEGMENT, Space
from workmem.store.frames import Frame
from workmem.store.residents import PROTECTED_SHARE, Residents
from workmem.store.tiers.journal import (
    PUTS,
    REWRITE_RECORDS,
    DeleteEntry,
    DropEntry,
    Entry,
    NamespaceEntry,
    PutEntry,
)
from workmem.store.tiers.page_header import identity_of
from workmem.store.tiers.segments import SEGMENT_HEADER_BYTES, Extent, Segment

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workmem.store.tiers.journal import Record


class WriteJob(msgspec.Struct, frozen=True, eq=False):
    """A page to make durable; its frame is pinned until `settle`."""

    row: int
    stamp: int
    space: Space
    frame: Frame

    @property
    def length(self) -> int:
        """Bytes on disk."""
        return self.frame.size


class StoredPage(msgspec.Struct, frozen=True, eq=False):
    """A page on ssd as the index knew it when it was asked."""

    row: int
    stamp: int
    space: Space
    key: bytes
    parent: bytes
    depth: int
    extent: Extent


class SsdIndex:
    """Residency of the ssd tier."""

    def __init__(self, state: Residents, capacity_bytes: int) -> None:
        self._state = state
        self._catalog = state.catalog
        self.order: EvictionOrder = SegmentedLru(int(capacity_bytes * PROTECTED_SHARE))
        self.segments: dict[int, Segment] = {}
        self.live_bytes = 0
        self.page_count = 0
        self._deletes: list[Entry] = []
        self._is_striking = False
        """Strikes have been taken that are not durable yet."""
        self._is_erasing = False
        self._erasures: set[int] = set()
        self.extent_bytes_max = capacity_bytes
        """A page that takes more can never be kept; it stays in dram only."""
        state.drop_extent = self._strike
        state.touch_ssd = self.order.touch

    @property
    def file_bytes(self) -> int:
        """Bytes of all segment files."""
        # A copy: gauges ask from any thread.
        return sum(segment.size for segment in list(self.segments.values()))

    def extent(self, row: int) -> Extent:
        """Where the page of `row` lies. The lock is held by the caller."""
        catalog = self._catalog
        return Extent(
            self.segments[catalog.segment[row]],
            catalog.offset[row] * ALIGNMENT_BYTES,
            catalog.length[row] * ALIGNMENT_BYTES,
            catalog.header_sum[row],
        )

    # -- writing

    def take_writes(self, bytes_max: int) -> list[WriteJob]:
        """The next unwritten pages, pinned; at least one if there is any."""
        jobs: list[WriteJob] = []
        total = 0
        state, catalog = self._state, self._catalog
        with state.outbox:
            queue = state.unwritten
            while queue:
                row, stamp = queue[0]
                frame = catalog.frame[row]
                if not state.owes_write(row, stamp) or frame is None:
                    queue.popleft()
                    continue
                if frame.size > self.extent_bytes_max:
                    queue.popleft()
                    state.counts["writes_given_up"] += 1
                    state.write_ended(row, stamp)
                    continue
                if jobs and total + frame.size > bytes_max:
                    break
                queue.popleft()
                frame.pins += 1
                jobs.append(WriteJob(row, stamp, catalog.space[row], frame))
                total += frame.size
            state.writes_in_flight += len(jobs)
            state.outbox.changed.notify_all()
        return jobs

    def settle(self, jobs: list[WriteJob], extents: list[Extent] | None) -> None:
        """`jobs` are durable at `extents`, or given up (None): unpin them and make them visible (R2)."""
        state = self._state
        with state.outbox:
            for position, job in enumerate(jobs):
                if extents is not None:
                    self._admit(job, extents[position])
            state.writes_in_flight -= len(jobs)
            for job in jobs:
                state.write_ended(job.row, job.stamp)
            state.unpin([job.frame for job in jobs])

    def retry(self, jobs: list[WriteJob]) -> None:
        """They failed and are tried once more, first."""
        with self._state.outbox:
            for job in reversed(jobs):
                self._state.unwritten.appendleft((job.row, job.stamp))
            self._state.writes_in_flight -= len(jobs)
            self._state.unpin([job.frame for job in jobs])

    def give_up_writes(self) -> None:
        """The tier does not take pages now: nothing waits for it. The lock is held by the caller."""
        for row, stamp in self._state.unwritten:
            if self._state.owes_write(row, stamp):
                self._state.write_ended(row, stamp)
        self._state.unwritten.clear()

    def put_entries(self, jobs: Sequence[WriteJob], extents: Sequence[Extent]) -> list[Entry]:
        """The journal's word for pages that are written but not yet visible; their frames are pinned.

        The header is asked, not the row, which may have been given out anew meanwhile.
        """
        entries: list[Entry] = []
        for job, extent in zip(jobs, extents, strict=True):
            with self._state.arena.readable(job.frame.offset, job.space.header_bytes) as header:
                key, parent, depth = identity_of(header)
            entries.append(put_entry(job.space, key, parent, depth, extent))
        return entries

    def take_deletes(self) -> list[Entry]:
        """Records to strike out of the journal, before anything newer is put in."""
        with self._state.outbox:
            deletes, self._deletes = self._deletes, []
            self._is_striking = self._is_striking or bool(deletes)
            return deletes

    def return_deletes(self, deletes: list[Entry]) -> None:
        """They could not be journaled; try again with the next batch."""
        with self._state.outbox:
            self._deletes[:0] = deletes
            self._is_striking = False

    def strikes_are_durable(self) -> None:
        """What `take_deletes` or `snapshot` took is journaled: whoever waits in `flush` may go on."""
        with self._state.outbox:
            self._is_striking = False
            self._state.outbox.changed.notify_all()

    @property
    def is_settled(self) -> bool:
        """Nothing is to be struck out or erased, nor under way."""
        return not (self._deletes or self._erasures or self._is_striking or self._is_erasing)

    @property
    def has_deletes(self) -> bool:
        """Something waits to be struck out, or erased."""
        # Between two steps of the writer, strikes under way are such that failed with a rewrite.
        return bool(self._deletes or self._erasures or self._is_striking)

    def take_erasures(self) -> list[Segment]:
        """Segments that hold pages of a purged namespace: what else is in them is to move, and they are to go."""
        with self._state.outbox:
            numbers, self._erasures = self._erasures, set()
            self._is_erasing = bool(numbers)
            return [self.segments[number] for number in sorted(numbers) if number in self.segments]

    def erasures_are_done(self) -> None:
        """What `take_erasures` took is gone."""
        with self._state.outbox:
            self._is_erasing = False
            self._state.outbox.changed.notify_all()

    def return_erasures(self, segments: Sequence[Segment]) -> None:
        """They could not be erased; try again later."""
        with self._state.outbox:
            self._erasures.update(segment.number for segment in segments)
            self._is_erasing = False

    def drop_space(self, space: Space) -> None:
        """A purged namespace leaves the journal in one word."""
        with self._state.outbox:
            self._deletes.append(DropEntry(space.number))
            self._state.outbox.changed.notify_all()

    # -- replay and moves

    def restore(self, space: Space, rows: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Rows of one namespace that replay put into the catalog, the least recent first, and their parents'."""
        catalog = self._catalog
        with self._state.outbox:
            if parents is None:
                find, parent = space.rows.get, catalog.parent
                parents = array("i", (find(BlockKey(parent[row]), NO_ROW) for row in rows))
            places = np.fromiter(rows, np.int64, len(rows))
            lengths = np.frombuffer(catalog.length, dtype=np.uint32)[places].astype(np.int64)
            numbers = np.frombuffer(catalog.segment, dtype=np.uint32)[places]
            sizes = array("q", (lengths * ALIGNMENT_BYTES).tobytes())
            self.order.restore(rows, parents, sizes)
            for number in np.unique(numbers).tolist():
                segment, here = self.segments[number], numbers == number
                segment.page_count += int(here.sum())
                segment.live_bytes += int(lengths[here].sum()) * ALIGNMENT_BYTES
            self.live_bytes += sum(sizes)
            self.page_count += len(rows)

    def move(self, page: StoredPage, new: Extent) -> None:
        """Compaction wrote a page again. If it left meanwhile, the new place is dead at once."""
        catalog, row = self._catalog, page.row
        with self._state.outbox:
            if catalog.is_same(row, page.stamp) and page.extent.is_of(catalog, row):
                self._note_place(row, new)
                for extent, sign in ((page.extent, -1), (new, 1)):
                    extent.segment.page_count += sign
                    extent.segment.live_bytes += sign * extent.length
            else:
                self._strike_out(page.space, page.key, new.segment)

    # -- making room

    def evict(self, bytes_wanted: int) -> int:
        """Strike out the least worth keeping, children before parents (R7). Returns bytes given up."""
        freed = 0
        catalog = self._catalog
        with self._state.outbox:
            while freed < bytes_wanted:
                row = self.order.pick(_never_held)
                if row == NO_ROW:
                    break
                freed += catalog.length[row] * ALIGNMENT_BYTES
                key = catalog.key[row].hex()[:16]
                self._strike(row)
                self._state.counts["ssd_evictions"] += 1
                self._state.outbox.tell(BlockEvicted(tier=TierName.SSD, key=key, reason="room"))
                self._state.forget_if_gone(row, MissReason.EVICTED)
        return freed

    def drop_segment(self, segment: Segment) -> None:
        """Take a segment out of the index; whatever still lies in it leaves service."""
        with self._state.outbox:
            if segment.page_count:
                for row in self._catalog.on_segment(segment.number):
                    self._strike(row)
                    self._state.forget_if_gone(row, MissReason.EVICTED)
            del self.segments[segment.number]
            segment.is_dropped = True
            close_now = segment.readers == 0
        if close_now:
            segment.file.close()

    def pages_of(self, segment: Segment) -> list[StoredPage]:
        """The live pages of a segment in the order they lie."""
        catalog = self._catalog
        with self._state.outbox:
            pages = [
                StoredPage(
                    row,
                    catalog.stamp[row],
                    catalog.space[row],
                    catalog.key[row],
                    catalog.parent[row],
                    catalog.depth[row],
                    self.extent(row),
                )
                for row in catalog.on_segment(segment.number)
            ]
        return sorted(pages, key=lambda page: page.extent.offset)

    def begin_read(self, segment: Segment) -> bool:
        """Keep a segment's file open for a read outside of a lease. False if it is dropped."""
        with self._state.outbox:
            if segment.is_dropped:
                return False
            segment.readers += 1
            return True

    def end_read(self, segment: Segment, count: int) -> None:
        """`count` reads of `segment` ended; the last one closes a dropped file."""
        with self._state.outbox:
            segment.readers -= count
            close_now = segment.is_dropped and segment.readers == 0
        if close_now:
            segment.file.close()

    def snapshot(self) -> list[Record]:
        """Everything a fresh journal must say."""
        with self._state.outbox:
            entries: list[Record] = [namespace_entry(space) for space in self._state.spaces.values()]
            for space in self._state.spaces.values():
                puts = self._puts_of(space)
                entries += [puts[at : at + REWRITE_RECORDS] for at in range(0, len(puts), REWRITE_RECORDS)]
            # Strikes of pages that are not in the snapshot have nothing left to strike out.
            self._is_striking = self._is_striking or bool(self._deletes)
            self._deletes.clear()
            return entries

    def _puts_of(self, space: Space) -> NDArray[np.void]:
        catalog = self._catalog
        segment = catalog.segment
        rows = [row for row in space.rows.values() if segment[row] != NO_SEGMENT]
        puts = np.zeros(len(rows), PUTS)
        puts["kind"] = 2
        puts["number"] = space.number
        puts["key"] = np.frombuffer(b"".join(map(catalog.key.__getitem__, rows)), "V32")
        puts["parent"] = np.frombuffer(b"".join(map(catalog.parent.__getitem__, rows)), "V32")
        for name, column in (
            ("depth", catalog.depth),
            ("segment", segment),
            ("offset", catalog.offset),
            ("length", catalog.length),
            ("header_sum", catalog.header_sum),
        ):
            puts[name] = np.frombuffer(column, dtype=f"u{column.itemsize}")[rows]
        return puts

    # -- inside the lock

    def _admit(self, job: WriteJob, extent: Extent) -> None:
        catalog, row, space = self._catalog, job.row, job.space
        if not catalog.is_same(row, job.stamp):
            # It left while it was written: what the journal now says of it must be struck out.
            with self._state.arena.readable(job.frame.offset, space.header_bytes) as header:
                self._strike_out(space, identity_of(header)[0], extent.segment)
            return
        self._place(row, extent)
        self._state.counts["ssd_written_bytes"] += extent.length
        self._state.outbox.tell(
            BlockAdmitted(
                tier=TierName.SSD, key=catalog.key[row].hex()[:16], page_bytes=space.layout.page_bytes
            )
        )

    def _place(self, row: int, extent: Extent) -> None:
        catalog = self._catalog
        assert catalog.segment[row] == NO_SEGMENT
        self._note_place(row, extent)
        extent.segment.page_count += 1
        extent.segment.live_bytes += extent.length
        self.live_bytes += extent.length
        self.page_count += 1
        parent = catalog.parent_row(row)
        is_there = parent != NO_ROW and catalog.segment[parent] != NO_SEGMENT
        self.order.insert(row, parent if is_there else NO_ROW, extent.length)

    def _note_place(self, row: int, extent: Extent) -> None:
        catalog = self._catalog
        catalog.segment[row] = extent.segment.number
        catalog.offset[row] = extent.offset // ALIGNMENT_BYTES
        catalog.length[row] = extent.length // ALIGNMENT_BYTES
        catalog.header_sum[row] = extent.header_sum

    def _strike(self, row: int) -> None:
        catalog = self._catalog
        length, segment = catalog.length[row] * ALIGNMENT_BYTES, self.segments[catalog.segment[row]]
        catalog.segment[row] = NO_SEGMENT
        segment.page_count -= 1
        segment.live_bytes -= length
        self.live_bytes -= length
        self.page_count -= 1
        self.order.remove(row)
        space = catalog.space[row]
        self._strike_out(space, catalog.key[row], segment)

    def _strike_out(self, space: Space, key: bytes, segment: Segment) -> None:
        """A page in `segment` is of no use any more; a purged one must leave the disk as well (R9)."""
        if space.is_purged:
            self._erasures.add(segment.number)
        else:
            self._deletes.append(DeleteEntry(space.number, key))


def put_entry(space: Space, key: bytes, parent: bytes, depth: int, extent: Extent) -> PutEntry:
    """The journal's word for a page at a place."""
    assert extent.offset >= SEGMENT_HEADER_BYTES
    assert extent.offset % ALIGNMENT_BYTES == 0
    return PutEntry(
        space.number,
        key,
        parent,
        depth,
        extent.segment.number,
        extent.offset,
        extent.length,
        extent.header_sum,
    )


def namespace_entry(space: Space) -> NamespaceEntry:
    """The journal's word for a namespace."""
    return NamespaceEntry(space.number, space.root, msgspec.json.encode(space.namespace))


def _never_held(row: int) -> bool:
    # A page may leave ssd while it is read: its file stays open until the read ends, and append-only
    # segments are never overwritten.
    del row
    return False
