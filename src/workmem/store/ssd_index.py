"""Which blocks the ssd tier holds, and where.

Part of the pool's state: every method that changes it takes the pool's lock (R1), but for those that say
otherwise; none does I/O on the pages.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from workmem.core.errors import InvariantError
from workmem.core.events import BlockAdmitted, BlockEvicted, BoundReached
from workmem.core.keys import BlockKey
from workmem.core.outcomes import MissReason, TierName
from workmem.policy.choose import EvictionName, make_order
from workmem.policy.ghosts import ghosts_of
from workmem.policy.order import NO_ROW, EvictionOrder, Loss, Prospect
from workmem.policy.quotas import Quota
from workmem.store.arena import ALIGNMENT_BYTES
from workmem.store.catalog import IS_BACK, IS_COUNTED, NO_SEGMENT, Space
from workmem.store.residents import Residents
from workmem.store.shares import TierShares, note_missed
from workmem.store.ssd_strikes import Strikes
from workmem.store.tiers.entries import snapshot
from workmem.store.tiers.page_check import Expected
from workmem.store.tiers.segments import Extent, Segment

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


FoundPage = tuple[BlockKey, bytes, int, Extent]
"""Key, parent, depth and place."""


class SsdIndex:
    """Residency of the ssd tier."""

    def __init__(self, state: Residents, capacity_bytes: int, eviction: EvictionName) -> None:
        self._state = state
        self._catalog = state.catalog
        self.eviction = eviction
        self._make_order = partial(make_order, eviction, capacity_bytes)
        self.order: EvictionOrder = self._make_order()
        self.ghosts = ghosts_of(capacity_bytes)
        self.shares: TierShares | None = None
        """Set with the first quota; its order is then `order`."""
        self._in_flight: dict[tuple[int, int], tuple[str, int]] = {}
        """Group and bytes of pages that are being written, by row and stamp, where there are quotas."""
        self.segments: dict[int, Segment] = {}
        self.live_bytes = 0
        self.page_count = 0
        self.strikes = Strikes(state.outbox)
        state.drop_extent = self._strike
        state.touch_ssd = self._touch
        state.advise_ssd = self.advise

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
            parents = self._less_deep(places, parents)
            lengths = np.frombuffer(catalog.length, dtype=np.uint32)[places].astype(np.int64)
            numbers = np.frombuffer(catalog.segment, dtype=np.uint32)[places]
            sizes = array("q", (lengths * ALIGNMENT_BYTES).tobytes())
            if self.shares is None:
                self.order.restore(rows, parents, sizes)
            else:
                self.shares.restore(rows, parents, sizes)
            pages, units = np.bincount(numbers), np.bincount(numbers, weights=lengths)
            for number in np.flatnonzero(pages).tolist():
                segment = self.segments[number]
                segment.page_count += int(pages[number])
                segment.live_bytes += int(units[number]) * ALIGNMENT_BYTES
            self.live_bytes += int(lengths.sum()) * ALIGNMENT_BYTES
            self.page_count += len(rows)

    def _less_deep(self, rows: NDArray[np.int64], parents: Sequence[int]) -> Sequence[int]:
        """`parents` without those that `Catalog.parent_row` would not name."""
        depths, found = np.frombuffer(self._catalog.depth, dtype=np.uint32), np.array(parents, dtype=np.int32)
        is_false = (found != NO_ROW) & (depths[found] >= depths[rows])
        if not is_false.any():
            return parents
        found[is_false] = NO_ROW
        return array("i", found.tobytes())

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
        gone: list[int] = []
        with self._state.outbox:
            while freed < bytes_wanted:
                if self.shares is None:
                    row = self.order.pick(_never_held)
                else:
                    row = self.shares.victim(None, 0, _never_held, self._bytes_of)
                if row == NO_ROW:
                    break
                freed += self._evict(row, gone)
            # To dram, what it still has of them is the only copy again.
            self._state.advise(gone, loss=Loss.RECOMPUTE)
        return freed

    def _evict(self, row: int, gone: list[int]) -> int:
        """Returns the bytes given up, those of its life group included (P3)."""
        line, freed = [row], 0
        while line:
            row = line.pop(0)
            freed += self._bytes_of(row)
            key, was_used = self._catalog.key[row], self.order.was_used(row)
            rest = self._strike(row)
            self.ghosts.left(key, self._bytes_of(row), was_used=was_used)
            self._state.counts["ssd_evictions"] += 1
            self._state.outbox.tell(BlockEvicted(tier=self._state.below, key=key.hex()[:16], reason="room"))
            self._state.forget_if_gone(row, MissReason.EVICTED)
            gone.append(row)
            line += [other for other in rest if self.order.is_leaf(other)]
        return freed

    # -- quotas

    def set_quota(self, group: str, quota: Quota, capacity_bytes: int) -> None:
        """As `Residents.set_quota`, for this tier. The lock is held by the caller."""
        shares = self.shares or TierShares(self._catalog, capacity_bytes, self._make_order)
        if shares.set_quota(group, quota) or self.shares is None:
            rows = [row for row, number in enumerate(self._catalog.segment) if number != NO_SEGMENT]
            shares.regroup(self.order, rows, self._bytes_of, self._is_here)
            for name, size in self._in_flight.values():
                shares.ledger.charge(name, size)
            self.shares, self.order = shares, shares.order
            if self._state.care.is_used:
                pinned = [row for row in rows if self._state.care.is_pinned(row)]
                self.order.advise(pinned, prospect=Prospect.PINNED)
        self._keep_ceiling(shares, group, 0)

    def begin_write(self, row: int, stamp: int, size: int) -> bool:
        """Whether the quotas have room for a page, which its group makes (Q1). The lock is held by the caller."""
        key = self._catalog.key[row]
        ghost = self.ghosts.find(key)
        if not self._has_room(row, stamp, size):
            return False
        if self._catalog.is_unwritten[row] & IS_COUNTED:
            return True
        self._catalog.is_unwritten[row] |= IS_COUNTED
        group = "" if self.shares is None else self.shares.group_of(row)
        note_missed(self.ghosts, ghost, key, self.order, group)
        return True

    def _has_room(self, row: int, stamp: int, size: int) -> bool:
        shares = self.shares
        if shares is None:
            return True
        group = shares.group_of(row)
        if not shares.ledger.admits(group, size) or not self._keep_ceiling(shares, group, size):
            ceiling, used = shares.ledger.quota(group).ceiling_bytes, shares.ledger.used(group)
            detail = f"group {group!r} holds {used} bytes and may take no more: a page stays in dram only"
            self._state.outbox.tell(BoundReached(name="store.quota.ssd", limit=ceiling or 0, detail=detail))
            return False
        shares.ledger.charge(group, size)
        self._in_flight[row, stamp] = group, size
        return True

    def end_write(self, row: int, stamp: int) -> None:
        """A page that `begin_write` let through is placed, given up, or tried again. The lock is held by the caller."""
        charge = self._in_flight.pop((row, stamp), None)
        if charge is not None and self.shares is not None:
            self.shares.ledger.refund(*charge)

    def audit(self) -> None:
        """Recount what the groups hold. The lock is held by the caller. Raises InvariantError when it is not so."""
        if self.shares is None:
            return
        held = Counter[str]()
        for row, number in enumerate(self._catalog.segment):
            if number != NO_SEGMENT:
                held[self.shares.group_of(row)] += self._bytes_of(row)
        for group, size in self._in_flight.values():
            held[group] += size
        if any(self.shares.ledger.used(group) != size for group, size in held.items()):
            raise InvariantError(f"groups hold {held} bytes on ssd, their ledger says otherwise")

    def _keep_ceiling(self, shares: TierShares, group: str, size: int) -> bool:
        gone: list[int] = []
        while shares.ledger.is_over(group, size):
            row = shares.order.pick(_never_held, group=group)
            if row == NO_ROW:
                break
            self._evict(row, gone)
        self._state.advise(gone, loss=Loss.RECOMPUTE)
        return not shares.ledger.is_over(group, size)

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

    # -- leaving as a whole, and coming back

    def withdraw(self, rows: Sequence[int]) -> None:
        """These pages are out of reach: they leave service, and stay where they are."""
        with self._state.outbox:
            self._withdraw(rows, MissReason.UNAVAILABLE)

    def lose(self, names: Iterable[tuple[bytes, BlockKey]]) -> None:
        """As `withdraw`, by root and key: the tier has them no more."""
        with self._state.outbox:
            spaces = self._state.spaces
            found = (spaces[root].rows.get(key) for root, key in names if root in spaces)
            # What is on its way from there finds out by itself.
            promotion = self._catalog.promotion
            rows = [row for row in found if row is not None and row not in promotion]
            self._withdraw(rows, MissReason.EVICTED)

    def _withdraw(self, rows: Sequence[int], reason: MissReason) -> None:
        catalog, in_dram = self._catalog, list[int]()
        for row in rows:
            if not self._is_here(row):
                continue
            self._lift(row)
            if catalog.frame[row] is not None:
                in_dram.append(row)
            self._state.forget_if_gone(row, reason)
        # What dram still has of them is the only copy in reach.
        self._state.advise(in_dram, loss=Loss.RECOMPUTE)

    def rows(self) -> Sequence[int]:
        """All rows that have a page here."""
        with self._state.outbox:
            column = np.frombuffer(self._catalog.segment, dtype=np.uint32)
            return np.flatnonzero(column != NO_SEGMENT).tolist()

    def let_go(self) -> None:
        """No segment is used from now on; the file of one that is being read closes with its last read."""
        with self._state.outbox:
            left = list(self.segments.values())
            self.segments.clear()
            for segment in left:
                segment.is_dropped = True
            idle = [segment for segment in left if not segment.readers]
        for segment in idle:
            segment.file.close()

    def take_in(self, space: Space, pages: Iterable[FoundPage]) -> bool:
        """Pages that were found beside a pool in use, a parent before its children. False where the namespace was purged.

        What was found under the key of another block is struck out: neither may be taken for the other.
        """
        catalog = self._catalog
        with self._state.outbox:
            if space.is_purged:
                return False
            in_dram: list[int] = []
            for key, parent, depth, extent in pages:
                row = space.rows.get(key)
                if row is None:
                    row = catalog.add(space, key, parent, depth)
                elif self._is_here(row):
                    continue
                elif catalog.parent[row] != parent or catalog.depth[row] != depth:
                    self.strikes.strike_out(space, key, extent.segment)
                    continue
                else:
                    in_dram.append(row)
                self._place(row, extent)
            self._state.advise(in_dram, loss=Loss.RELOAD)
        return True

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
        self.end_write(row, stamp)
        if not self._catalog.is_same(row, stamp):
            self.strikes.strike_out(space, identity[0], extent.segment)
            return
        if self._is_here(row):
            # Another store had put the same block, and was heard of meanwhile: it lies where this one put it.
            self._note_place(row, extent)
        else:
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
            segment = self._catalog.segment
            leaving = {segment[row] for space in self._state.leaving.values() for row in space.rows.values()}
            records = snapshot(self._catalog, list(self._state.spaces.values()))
            records += self.strikes.erasure_entries(leaving - {NO_SEGMENT})
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
        parent = parent if parent != NO_ROW and self._is_here(parent) else NO_ROW
        is_back = bool(catalog.is_unwritten[row] & IS_BACK)
        if self.shares is None:
            self.order.insert(row, parent, extent.length, is_back=is_back)
        else:
            self.shares.ledger.charge(self.shares.group_of(row), extent.length)
            self.shares.insert(row, parent, extent.length, is_back=is_back)
        if self._state.care.is_used:
            self._state.care.entered(row, TierName.SSD, self.order)

    def _is_here(self, row: int) -> bool:
        return self._catalog.segment[row] != NO_SEGMENT

    def _bytes_of(self, row: int) -> int:
        return self._catalog.length[row] * ALIGNMENT_BYTES

    def _touch(self, rows: Sequence[int]) -> None:
        self.order.touch(rows)

    def advise(self, rows: Sequence[int], prospect: Prospect) -> None:
        """What is known of the next use of blocks that are here. The lock is held by the caller."""
        here = [row for row in rows if self._is_here(row)]
        if here:
            self.order.advise(here, prospect=prospect)

    def _note_place(self, row: int, extent: Extent) -> None:
        catalog = self._catalog
        catalog.segment[row] = extent.segment.number
        catalog.offset[row] = extent.offset // ALIGNMENT_BYTES
        catalog.length[row] = extent.length // ALIGNMENT_BYTES
        catalog.header_sum[row] = extent.header_sum

    def _strike(self, row: int) -> list[int]:
        """The page leaves service, and its record. Returns the rest of its life group, which is to go next (P3)."""
        catalog = self._catalog
        segment = self.segments[catalog.segment[row]]
        rest = self._lift(row)
        self.strikes.strike_out(catalog.space[row], catalog.key[row], segment)
        self.advise(rest, Prospect.DONE)
        return rest

    def _lift(self, row: int) -> list[int]:
        """The page leaves the index. Returns the rest of its life group."""
        catalog = self._catalog
        length, segment = catalog.length[row] * ALIGNMENT_BYTES, self.segments[catalog.segment[row]]
        catalog.segment[row] = NO_SEGMENT
        segment.page_count -= 1
        segment.live_bytes -= length
        self.live_bytes -= length
        self.page_count -= 1
        self.order.remove(row)
        if self.shares is not None:
            self.shares.ledger.refund(self.shares.group_of(row), length)
        return self._state.care.left(row, TierName.SSD) if self._state.care.is_used else []


def _never_held(row: int) -> bool:
    # A page may leave ssd while it is read: its file stays open until the read ends, and append-only
    # segments are never overwritten.
    del row
    return False
