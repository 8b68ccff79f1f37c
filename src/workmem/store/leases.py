"""The lease table: who holds which pages until when, and the promotions they wait for (R3).

Every public method takes the pool's lock itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from workmem.core.clock import Clock
from workmem.core.errors import CapacityError, LeaseError
from workmem.core.events import BoundReached
from workmem.core.keys import BlockKey
from workmem.core.outcomes import MissReason, TierName
from workmem.store.catalog import NO_SEGMENT, Promotion, Space
from workmem.store.frames import Frame, FrameState
from workmem.store.lease import PageLease
from workmem.store.residents import Residents

if TYPE_CHECKING:
    from workmem.store.tiers.segments import Extent


class LeaseTable:
    """All leases of a store."""

    def __init__(self, state: Residents, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._deadlines: list[tuple[float, int, PageLease]] = []
        self._lease_count = 0
        self._active_count = 0
        self.arena = state.arena
        """For a lease that has checked its hold."""
        state.reclaim = self._expire
        self.extent_of: Callable[[int], Extent] | None = None
        """Where on ssd a row's page lies; set by the ssd index."""

    def lease(
        self, space: Space, keys: Sequence[BlockKey], owner: str, ttl_s: float
    ) -> tuple[PageLease, list[Promotion]]:
        """Pin what is in dram, reserve frames for what is on ssd; the new promotions are to be read."""
        now = self._clock.monotonic()
        lease = PageLease(self, space, tuple(keys), owner, now + ttl_s)
        state = self._state
        with state.outbox:
            deadlines = self._deadlines
            # Those that were given back in time stay until there are many (`_tidy_deadlines`).
            if deadlines and deadlines[0][0] <= now:
                self._expire()
            # What is here is pinned first, so that making room for the rest cannot evict it.
            awaited = self._pin_prefix(space, lease)
            started = self._start_promotions(lease, awaited) if awaited else []
            state.touch(lease.rows)
            if awaited or lease.lost:
                self._advance(lease)
            else:
                lease.ready = len(lease.rows)
            self._lease_count += 1
            self._active_count += 1
            if len(deadlines) > 64 + 2 * self._active_count:
                self._tidy_deadlines()
            state.counts["leases"] += 1
            heapq.heappush(self._deadlines, (lease.deadline, self._lease_count, lease))
        return lease, started

    def subscribe(self, lease: PageLease, callback: Callable[[], None], *, each_time: bool = False) -> bool:
        """Keep `callback` for when `lease` settles, or for each page too; True if it has settled already."""
        with self._state.outbox:
            if lease.is_settled:
                return True
            if not lease.ended:
                (lease.listeners if each_time else lease.callbacks).append(callback)
            return False

    def renew(self, lease: PageLease, ttl_s: float) -> None:
        """Move the deadline. Raises LeaseError when the lease has ended."""
        with self._state.outbox:
            if lease.ended:
                raise LeaseError(f"lease of {lease.owner!r} is {lease.ended}; take a new one")
            lease.deadline = self._clock.monotonic() + ttl_s
            self._lease_count += 1
            heapq.heappush(self._deadlines, (lease.deadline, self._lease_count, lease))

    def release(self, lease: PageLease) -> None:
        """Give the pages back, unless expiry has already done so."""
        with self._state.outbox:
            self._end(lease, "released")

    def expire_leases(self) -> None:
        """Take back what leases hold past their deadline (R3)."""
        with self._state.outbox:
            self._expire()

    def end_leases(self) -> None:
        """Take back everything: the store closes."""
        with self._state.outbox:
            for _, _, lease in self._deadlines:
                self._end(lease, "closed")
            self._deadlines.clear()

    def promoted(self, promotion: Promotion) -> bool:
        """The page is in its frame and verified: make it visible and tell who waits. False if nobody has use for it."""
        row, frame, state = promotion.row, promotion.frame, self._state
        with state.outbox:
            if state.catalog.promotion.get(row) is not promotion:
                self._lose(promotion, MissReason.CORRUPT)
                return False
            del state.catalog.promotion[row]
            # It was asked for again: that is what orders keep reused blocks for.
            state.admit(row, frame, is_back=bool(promotion.waiters))
            state.counts["promoted"] += 1
            state.counts["promoted_bytes"] += promotion.space.layout.page_bytes
            state.unpin([frame])
            for lease, index in promotion.waiters:
                if not lease.ended:
                    lease.missing.discard(index)
                    self._advance(lease)
            state.outbox.changed.notify_all()
            return True

    def promotion_failed(self, promotion: Promotion, reason: MissReason) -> None:
        """The page did not arrive or is not what was written: its ssd copy leaves service (R6)."""
        with self._state.outbox:
            if self._state.catalog.promotion.get(promotion.row) is promotion:
                self._state.quarantine(promotion.row, self._state.below, reason)
            self._lose(promotion, reason)

    def promotion_gone(self, promotion: Promotion, reason: MissReason) -> None:
        """The tier has the page no more, or this process cannot read it: it leaves service, and that is no damage."""
        with self._state.outbox:
            if self._state.catalog.promotion.get(promotion.row) is promotion:
                self._state.withdraw(promotion.row, reason)
            self._lose(promotion, reason)

    def abandon(self, reason: MissReason) -> None:
        """The tier below goes away: nobody waits any longer for what is on its way from there.

        The reads end by themselves, and then give their frames back. The lock is held by the caller.
        """
        promotions = self._state.catalog.promotion
        for promotion in list(promotions.values()):
            del promotions[promotion.row]
            self._state.settle_late(promotion.row)
            waiters, promotion.waiters = promotion.waiters, []
            for lease, index in waiters:
                if not lease.ended:
                    lease.lost[index] = reason
                    self._advance(lease)

    def quarantine(self, frame: Frame, reason: MissReason) -> None:
        """The page in `frame`, which the caller holds, is corrupt: every copy of the block leaves service."""
        with self._state.outbox:
            if frame.state is FrameState.RESIDENT:
                self._state.quarantine(frame.owner, TierName.DRAM, reason)

    def _pin_prefix(self, space: Space, lease: PageLease) -> list[int]:
        """Pin what of the prefix is in dram; returns the indices of what is on ssd."""
        catalog, reads_ssd = self._state.catalog, self._state.reads_ssd
        keys = lease.keys
        try:
            # All of them, most often: that costs no look at each.
            rows = list(map(space.rows.__getitem__, keys))
        except KeyError:
            rows = [row for row in takewhile(_is_there, map(space.rows.get, keys)) if row is not None]
        in_dram = catalog.frame
        held = [in_dram[row] for row in rows]
        awaited: list[int] = []
        if not all(held):
            for index, frame in enumerate(held):
                if frame is None:
                    if not reads_ssd or catalog.segment[rows[index]] == NO_SEGMENT:
                        del rows[index:], held[index:]
                        break
                    awaited.append(index)
        for frame in held:
            if frame is not None:
                frame.pins += 1
        lease.rows, lease.frames = rows, held
        if len(rows) < len(keys):
            lease.lost[len(rows)] = self._state.why_missed(space, keys[len(rows)])
        return awaited

    def _start_promotions(self, lease: PageLease, awaited: list[int]) -> list[Promotion]:
        state, catalog = self._state, self._state.catalog
        started: list[Promotion] = []
        for index in awaited:
            row = lease.rows[index]
            space = catalog.space[row]
            promotion = catalog.promotion.get(row)
            if promotion is None:
                ghost = state.ghosts.find(catalog.key[row])
                group = state.group(space, catalog.workflow[row])
                frame = state.reserve(space, group) or state.reserve_unwritten(space, group)
                if frame is None:
                    self._undo_lease(lease, started)
                    raise self._no_room(lease)
                state.missed(catalog.key[row], ghost, group)
                frame.pins = 1
                assert self.extent_of is not None
                extent = self.extent_of(row)
                extent.segment.readers += 1
                promotion = catalog.promotion[row] = Promotion(catalog, row, frame, extent)
                started.append(promotion)
            promotion.frame.pins += 1
            promotion.waiters.append((lease, index))
            lease.frames[index] = promotion.frame
            lease.missing.add(index)
        return started

    def _undo_lease(self, lease: PageLease, started: list[Promotion]) -> None:
        for promotion in started:
            del self._state.catalog.promotion[promotion.row]
            promotion.extent.segment.readers -= 1
            promotion.frame.pins = 0
            self._state.give_back(promotion.frame)
            self._state.settle_late(promotion.row)
        mine = {id(promotion.frame) for promotion in started}
        self._state.unpin([frame for frame in lease.frames if frame is None or id(frame) not in mine])
        lease.ended = "refused"

    def _no_room(self, lease: PageLease) -> CapacityError:
        need = len(lease.rows) * self._state.catalog.space[lease.rows[0]].frame_bytes
        limit = self._state.frames.capacity_bytes
        self._state.counts["leases_refused"] += 1
        self._state.outbox.tell(
            BoundReached(name="store.dram.lease", limit=limit, detail=f"{need} bytes wanted")
        )
        return CapacityError(
            f"a lease of {len(lease.rows)} pages needs {need} bytes of dram at the same time; "
            f"{limit} exist and too many are held; lease fewer, release first, or raise store.dram.bytes"
        )

    def _advance(self, lease: PageLease) -> None:
        # A page that was lost stays among the missing, so nothing behind it becomes ready.
        ready, missing, end = lease.ready, lease.missing, len(lease.rows)
        if missing:
            while ready < end and ready not in missing:
                ready += 1
        else:
            ready = end
        has_grown, lease.ready = ready > lease.ready, ready
        if lease.failed is None and ready in lease.lost:
            lease.failed = lease.lost[ready]
        if lease.is_settled:
            self._tell(lease)
        elif has_grown and lease.listeners:
            self._state.outbox.call(lease.listeners)

    def _tell(self, lease: PageLease) -> None:
        """It has settled: call whoever waits, for the last time."""
        if lease.callbacks or lease.listeners:
            self._state.outbox.call([*lease.callbacks, *lease.listeners])
            lease.callbacks, lease.listeners = [], []

    def _lose(self, promotion: Promotion, reason: MissReason) -> None:
        state, row = self._state, promotion.row
        if state.catalog.promotion.get(row) is promotion:
            del state.catalog.promotion[row]
            state.settle_late(row)
            state.forget_if_gone(row, reason)
        state.frames.move(promotion.frame, FrameState.QUARANTINED)
        state.unpin([promotion.frame])
        for lease, index in promotion.waiters:
            if not lease.ended:
                lease.lost[index] = reason
                self._advance(lease)

    def _end(self, lease: PageLease, how: str) -> None:
        if lease.ended:
            return
        lease.ended = how
        self._active_count -= 1
        self._state.unpin(lease.frames)
        if how != "released" and not lease.is_settled:
            lease.failed = MissReason.EXPIRED
            self._tell(lease)
        lease.callbacks, lease.listeners = [], []

    def _tidy_deadlines(self) -> None:
        """Drop ended leases that a longer-lived one keeps from surfacing, so the heap stays in proportion."""
        self._deadlines = [entry for entry in self._deadlines if not entry[2].ended]
        heapq.heapify(self._deadlines)

    def _expire(self) -> int:
        """End leases past their deadline; returns how many."""
        ended = 0
        now = self._clock.monotonic()
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][2].ended):
            _, _, lease = heapq.heappop(deadlines)
            if lease.ended or lease.deadline > now:
                continue
            self._state.counts["leases_expired"] += 1
            detail = f"owner {lease.owner!r} held {len(lease.frames)} pages past the deadline"
            self._state.outbox.tell(BoundReached(name="store.lease.ttl", limit=0, detail=detail))
            self._end(lease, "expired")
            ended += 1
        return ended


def _is_there(row: int | None) -> bool:
    return row is not None
