"""Which blocks the ssd tier holds, and where.

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
from workmem.core.outcomes import MissReason
from workmem.policy.choose import EvictionName, make_order
from workmem.policy.order import NO_ROW, EvictionOrder
from workmem.store.arena import ALIGNMENT_BYTES
from workmem.store.catalog import NO_SEGMENT, Space
from workmem.store.residents import Residents
from workmem.store.ssd_strikes import Strikes
from workmem.store.tiers.entries import snapshot
from workmem.store.tiers.page_check import Expected
from workmem.store.tiers.segments import Extent, Segment

if TYPE_CHECKING:
    from workmem.store.tiers.journal_records import Record


class StoredPage(msgspec.Struct, frozen=True, eq=False):
    """A page on ssd as the index knew it when it was asked."""

    row: int
    stamp: int
    space: Space
    key: bytes
    parent: bytes
    depth: int
    extent: Extent

    @property
    def expected(self) -> Expected:
        """What is to be found there."""
        return Expected(
            self.space.layout, self.space.root, self.key, self.parent, self.depth, self.extent.header_sum
        )


class SsdIndex:
    """Residency of the ssd tier."""

    def __init__(self, state: Residents, capacity_bytes: int, eviction: EvictionName) -> None:
        self._state = state
        self._catalog = state.catalog
        self.order: EvictionOrder = make_order(eviction, capacity_bytes)
        self.segments: dict[int, Segment] = {}
        self.live_bytes = 0
        self.page_count = 0
        self.strikes = Strikes(state.outbox)
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
                self.strikes.strike_out(page.space, page.key, new.segment)

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
                self._state.outbox.tell(BlockEvicted(tier=self._state.below, key=key, reason="room"))
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

    def admit(
        self, row: int, stamp: int, space: Space, identity: tuple[bytes, bytes, int], extent: Extent
    ) -> None:
        """A page is durable at `extent`: make it visible (R2). The lock is held by the caller.

        If its block left meanwhile, what the journal now says of it must be struck out.
        """
        if not self._catalog.is_same(row, stamp):
            self.strikes.strike_out(space, identity[0], extent.segment)
            return
        self._place(row, extent)
        self._state.counts["ssd_written_bytes"] += extent.length
        self._state.counts["ssd_plain_bytes"] += space.frame_bytes
        self._state.outbox.tell(
            BlockAdmitted(
                tier=self._state.below,
                key=self._catalog.key[row].hex()[:16],
                page_bytes=space.layout.page_bytes,
            )
        )

    def snapshot(self) -> list[Record]:
        """Everything a fresh journal must say."""
        with self._state.outbox:
            records = snapshot(self._catalog, list(self._state.spaces.values()))
            # Last: a snapshot that fails for want of memory leaves the strikes to be tried again.
            self.strikes.take_all()
            return records

    # -- inside the lock

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
        self.strikes.strike_out(space, catalog.key[row], segment)


def _never_held(row: int) -> bool:
    # A page may leave ssd while it is read: its file stays open until the read ends, and append-only
    # segments are never overwritten.
    del row
    return False
