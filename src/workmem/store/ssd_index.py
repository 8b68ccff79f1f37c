"""Which blocks the ssd tier holds, which wait to be written, and which must be struck out.

Part of the pool's state: every method that changes it takes the pool's lock (R1), but for those that say
otherwise; none does I/O on the pages.
"""

from __future__ import annotations

import msgspec

from workmem.core.events import BlockAdmitted, BlockEvicted
from workmem.core.outcomes import MissReason, TierName
from workmem.policy.eviction import EvictionOrder, SegmentedLru
from workmem.store.arena import ALIGNMENT_BYTES
from workmem.store.frames import Frame
from workmem.store.records import Record, Space
from workmem.store.residents import PROTECTED_SHARE, Residents
from workmem.store.tiers.journal import DeleteEntry, Entry, NamespaceEntry, PutEntry
from workmem.store.tiers.page_header import PageHeader, header_bytes
from workmem.store.tiers.segments import SEGMENT_HEADER_BYTES, Extent, Segment


class WriteJob(msgspec.Struct, frozen=True, eq=False):
    """A page to make durable; its frame is pinned until `settle`."""

    record: Record
    frame: Frame[Record]
    header: PageHeader

    @property
    def length(self) -> int:
        """Bytes on disk."""
        return page_extent_bytes(self.record.space)


def page_extent_bytes(space: Space) -> int:
    """Bytes that a page of this namespace takes on disk, header included."""
    return header_bytes(space.layout) + space.frame_bytes


class SsdIndex:
    """Residency of the ssd tier."""

    def __init__(self, state: Residents, capacity_bytes: int) -> None:
        self._state = state
        self.order: EvictionOrder[Record] = SegmentedLru[Record](int(capacity_bytes * PROTECTED_SHARE))
        self.segments: dict[int, Segment] = {}
        self.live_bytes = 0
        self.page_count = 0
        self._deletes: list[Entry] = []
        self.extent_bytes_max = capacity_bytes
        """A page that takes more can never be kept; it stays in dram only."""
        state.drop_extent = self._strike
        state.touch_ssd = self.order.touch

    @property
    def file_bytes(self) -> int:
        """Bytes of all segment files."""
        # A copy: gauges ask from any thread.
        return sum(segment.size for segment in list(self.segments.values()))

    # -- writing

    def take_writes(self, bytes_max: int) -> list[WriteJob]:
        """The next unwritten pages, pinned; at least one if there is any."""
        jobs: list[WriteJob] = []
        total = 0
        with self._state.outbox:
            queue = self._state.unwritten
            while queue:
                record, frame = queue[0], queue[0].frame
                if not record.unwritten or frame is None:
                    queue.popleft()
                    continue
                length = page_extent_bytes(record.space)
                if length > self.extent_bytes_max:
                    queue.popleft()
                    self._state.counts["writes_given_up"] += 1
                    self._state.write_ended(record)
                    continue
                if jobs and total + length > bytes_max:
                    break
                queue.popleft()
                frame.pins += 1
                jobs.append(WriteJob(record, frame, _header(record)))
                total += length
            self._state.writes_in_flight += len(jobs)
            self._state.outbox.changed.notify_all()
        return jobs

    def settle(self, jobs: list[WriteJob], extents: list[Extent] | None) -> None:
        """`jobs` are durable at `extents`, or given up (None): unpin them and make them visible (R2)."""
        with self._state.outbox:
            for position, job in enumerate(jobs):
                if extents is not None:
                    self._admit(job.record, extents[position])
                self._state.write_ended(job.record)
            self._state.writes_in_flight -= len(jobs)
            self._state.unpin([job.frame for job in jobs])

    def retry(self, jobs: list[WriteJob]) -> None:
        """They failed and are tried once more, first."""
        with self._state.outbox:
            for job in reversed(jobs):
                self._state.unwritten.appendleft(job.record)
            self._state.writes_in_flight -= len(jobs)
            self._state.unpin([job.frame for job in jobs])

    def give_up_writes(self) -> None:
        """The tier does not take pages now: nothing waits for it. The lock is held by the caller."""
        for record in self._state.unwritten:
            if record.unwritten:
                self._state.write_ended(record)
        self._state.unwritten.clear()

    def take_deletes(self) -> list[Entry]:
        """Records to strike out of the journal, before anything newer is put in."""
        with self._state.outbox:
            deletes, self._deletes = self._deletes, []
            return deletes

    def return_deletes(self, deletes: list[Entry]) -> None:
        """They could not be journaled; try again with the next batch."""
        with self._state.outbox:
            self._deletes[:0] = deletes

    @property
    def has_deletes(self) -> bool:
        """Something waits to be struck out."""
        return bool(self._deletes)

    # -- replay and moves

    def restore(self, pages: list[tuple[Record, Extent]]) -> None:
        """Pages found by replay, the least recent first; no key twice."""
        with self._state.outbox:
            for record, extent in pages:
                record.space.records[record.key] = record
                self._place(record, extent)

    def move(self, record: Record, old: Extent, new: Extent) -> None:
        """Compaction wrote `record` again. If it left meanwhile, the new place is dead at once."""
        with self._state.outbox:
            if record.extent is old:
                node = record.ssd_node
                record.extent = new
                old.segment.records.discard(record)
                old.segment.live_bytes -= old.length
                new.segment.records.add(record)
                new.segment.live_bytes += new.length
                assert node is not None
            else:
                self._deletes.append(DeleteEntry(record.space.number, record.key))

    # -- making room

    def evict(self, bytes_wanted: int) -> int:
        """Strike out the least worth keeping, children before parents (R7). Returns bytes given up."""
        freed = 0
        with self._state.outbox:
            while freed < bytes_wanted:
                node = self.order.pick(_never_held)
                if node is None:
                    break
                record = node.item
                assert record.extent is not None
                freed += record.extent.length
                self._strike(record)
                self._state.counts["ssd_evictions"] += 1
                self._state.outbox.tell(
                    BlockEvicted(tier=TierName.SSD, key=record.key.hex()[:16], reason="room")
                )
                self._state.forget_if_gone(record, MissReason.EVICTED)
        return freed

    def drop_segment(self, segment: Segment) -> None:
        """Take a segment out of the index; whatever still lies in it leaves service."""
        with self._state.outbox:
            for record in list(segment.records):
                self._strike(record)
                self._state.forget_if_gone(record, MissReason.EVICTED)
            del self.segments[segment.number]
            segment.is_dropped = True
            close_now = segment.readers == 0
        if close_now:
            segment.file.close()

    def pages_of(self, segment: Segment) -> list[tuple[Record, Extent]]:
        """The live pages of a segment in the order they lie."""
        with self._state.outbox:
            pages = [(record, record.extent) for record in segment.records]
        found = [(record, extent) for record, extent in pages if extent is not None]
        return sorted(found, key=lambda page: page[1].offset)

    def end_read(self, segment: Segment, count: int) -> None:
        """`count` reads of `segment` ended; the last one closes a dropped file."""
        with self._state.outbox:
            segment.readers -= count
            close_now = segment.is_dropped and segment.readers == 0
        if close_now:
            segment.file.close()

    def snapshot(self) -> list[Entry]:
        """Everything a fresh journal must say."""
        with self._state.outbox:
            entries: list[Entry] = [namespace_entry(space) for space in self._state.spaces.values()]
            for space in self._state.spaces.values():
                held = [(record, record.extent) for record in space.records.values()]
                entries += [put_entry(record, extent) for record, extent in held if extent is not None]
            # Strikes of pages that are not in the snapshot have nothing left to strike out.
            self._deletes.clear()
            return entries

    # -- inside the lock

    def _admit(self, record: Record, extent: Extent) -> None:
        space = record.space
        if space.records.get(record.key) is not record:
            # It left while it was written: what the journal now says of it must be struck out.
            self._deletes.append(DeleteEntry(space.number, record.key))
            return
        self._place(record, extent)
        self._state.counts["ssd_written_bytes"] += extent.length
        self._state.outbox.tell(
            BlockAdmitted(tier=TierName.SSD, key=record.key.hex()[:16], page_bytes=space.layout.page_bytes)
        )

    def _place(self, record: Record, extent: Extent) -> None:
        assert record.extent is None
        record.extent = extent
        extent.segment.records.add(record)
        extent.segment.live_bytes += extent.length
        self.live_bytes += extent.length
        self.page_count += 1
        number = record.space.number
        record.ssd_node = self.order.insert(
            record, (number, record.key), (number, record.parent), extent.length
        )

    def _unplace(self, record: Record) -> None:
        extent, node = record.extent, record.ssd_node
        assert extent is not None
        assert node is not None
        record.extent = None
        record.ssd_node = None
        extent.segment.records.discard(record)
        extent.segment.live_bytes -= extent.length
        self.live_bytes -= extent.length
        self.page_count -= 1
        self.order.remove(node)

    def _strike(self, record: Record) -> None:
        self._unplace(record)
        self._deletes.append(DeleteEntry(record.space.number, record.key))


def put_entry(record: Record, extent: Extent) -> PutEntry:
    """The journal's word for a page at a place."""
    assert extent.offset >= SEGMENT_HEADER_BYTES
    assert extent.offset % ALIGNMENT_BYTES == 0
    return PutEntry(
        record.space.number,
        record.key,
        record.parent,
        record.depth,
        extent.segment.number,
        extent.offset,
        extent.length,
        extent.header_sum,
    )


def namespace_entry(space: Space) -> NamespaceEntry:
    """The journal's word for a namespace."""
    return NamespaceEntry(space.number, space.root, msgspec.json.encode(space.namespace))


def _header(record: Record) -> PageHeader:
    assert record.tokens is not None
    return PageHeader(
        record.space.root, record.key, record.parent, record.depth, record.tokens, record.checksums
    )


def _never_held(record: Record) -> bool:
    # A page may leave ssd while it is read: its file stays open until the read ends, and append-only
    # segments are never overwritten.
    del record
    return False
