"""The lease table: who holds which pages until when, and the promotions they wait for (R3).

Every public method takes the pool's lock itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from workmem.core.clock import Clock
from workmem.core.errors import CapacityError, LeaseError
from workmem.core.events import BoundReached
from workmem.core.keys import BlockKey
from workmem.core.outcomes import MissReason, TierName
from workmem.store.frames import Frame, FrameState
from workmem.store.lease import PageLease
from workmem.store.records import Promotion, Record, Space
from workmem.store.residents import Residents


class LeaseTable:
    """All leases of a store."""

    def __init__(self, state: Residents, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._deadlines: list[tuple[float, int, PageLease]] = []
        self._lease_count = 0
        self._active_count = 0
        state.reclaim = self._expire

    def readable(self, offset: int, size: int) -> memoryview:
        """Bytes of the arena, for a lease that has checked its hold."""
        return self._state.arena.readable(offset, size)

    def address(self, offset: int) -> int:
        """Address of a place in the arena, for a lease that has checked its hold."""
        return self._state.arena.base_address + offset

    def lease(
        self, space: Space, keys: Sequence[BlockKey], owner: str, ttl_s: float
    ) -> tuple[PageLease, list[Promotion]]:
        """Pin what is in dram, reserve frames for what is on ssd; the new promotions are to be read."""
        lease = PageLease(self, space.layout, tuple(keys), owner, self._clock.monotonic() + ttl_s)
        with self._state.outbox:
            self._expire()
            prefix = self._prefix(space, lease)
            # What is here is pinned first, so that making room for the rest cannot evict it.
            waiting: list[int] = []
            for index, record in enumerate(prefix):
                frame = record.frame
                if frame is None:
                    waiting.append(index)
                    continue
                frame.pins += 1
                lease.frames[index] = frame
                lease.checks[index] = record.checksums
                lease.generations[index] = frame.generation
            started = self._start_promotions(lease, waiting)
            self._state.order.touch([node for record in prefix if (node := record.dram_node) is not None])
            if self._state.touch_ssd is not None:
                self._state.touch_ssd([node for record in prefix if (node := record.ssd_node) is not None])
            self._advance(lease)
            self._lease_count += 1
            self._active_count += 1
            self._tidy_deadlines()
            self._state.counts["leases"] += 1
            heapq.heappush(self._deadlines, (lease.deadline, self._lease_count, lease))
        return lease, started

    def subscribe(self, lease: PageLease, callback: Callable[[], None]) -> bool:
        """Keep `callback` for when `lease` settles; True if it has already."""
        with self._state.outbox:
            if lease.is_settled:
                return True
            if not lease.ended:
                lease.callbacks.append(callback)
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

    def promoted(self, promotion: Promotion, tokens: tuple[int, ...], checksums: tuple[int, ...]) -> bool:
        """The page is in its frame and verified: make it visible and tell who waits. False if nobody has use for it."""
        record, frame = promotion.record, promotion.frame
        with self._state.outbox:
            if record.space.records.get(record.key) is not record:
                self._lose(promotion, MissReason.CORRUPT)
                return False
            record.promotion = None
            self._state.admit(record, frame, tokens, checksums)
            if record.dram_node is not None and promotion.waiters:
                # It was asked for again: that is what the reused segment is for.
                self._state.order.touch([record.dram_node])
            self._state.counts["promoted"] += 1
            self._state.counts["promoted_bytes"] += record.space.layout.page_bytes
            self._state.unpin([frame])
            for lease, index in promotion.waiters:
                if not lease.ended:
                    lease.checks[index] = checksums
                    self._advance(lease)
            self._state.outbox.changed.notify_all()
            return True

    def promotion_failed(self, promotion: Promotion, reason: MissReason) -> None:
        """The page did not arrive or is not what was written: its ssd copy leaves service (R6)."""
        record = promotion.record
        with self._state.outbox:
            if record.space.records.get(record.key) is record:
                self._state.quarantine(record, TierName.SSD, reason)
            self._lose(promotion, reason)

    def quarantine(self, record: Record, reason: MissReason, *, only_frame: Frame[Record]) -> None:
        """The page in `only_frame` is corrupt: every copy of the block leaves service."""
        with self._state.outbox:
            if record.space.records.get(record.key) is record and record.frame is only_frame:
                self._state.quarantine(record, TierName.DRAM, reason)

    def _prefix(self, space: Space, lease: PageLease) -> list[Record]:
        prefix: list[Record] = []
        for key in lease.keys:
            record = space.records.get(key)
            if record is None or (
                record.frame is None and (record.extent is None or not self._state.reads_ssd)
            ):
                lease.lost[len(prefix)] = self._state.why_missed(space, key)
                break
            prefix.append(record)
        lease.records = prefix
        lease.frames = [None] * len(prefix)
        lease.checks = [None] * len(prefix)
        lease.generations = [0] * len(prefix)
        return prefix

    def _start_promotions(self, lease: PageLease, waiting: list[int]) -> list[Promotion]:
        started: list[Promotion] = []
        for index in waiting:
            record = lease.records[index]
            promotion = record.promotion
            if promotion is None:
                frame = self._state.reserve(record.space.frame_bytes) or self._state.reserve_unwritten(
                    record.space.frame_bytes
                )
                if frame is None:
                    self._undo_lease(lease, started)
                    raise self._no_room(lease)
                self._state.frames.move(frame, FrameState.FILLING)
                frame.pins = 1
                assert record.extent is not None
                record.extent.segment.readers += 1
                promotion = record.promotion = Promotion(record, frame, record.extent)
                started.append(promotion)
            promotion.frame.pins += 1
            promotion.waiters.append((lease, index))
            lease.frames[index] = promotion.frame
            lease.generations[index] = promotion.frame.generation
        return started

    def _undo_lease(self, lease: PageLease, started: list[Promotion]) -> None:
        for promotion in started:
            promotion.record.promotion = None
            promotion.extent.segment.readers -= 1
            promotion.frame.pins = 0
            self._state.frames.free(promotion.frame)
        mine = {id(promotion.frame) for promotion in started}
        self._state.unpin([frame for frame in lease.frames if frame is None or id(frame) not in mine])
        lease.ended = "refused"

    def _no_room(self, lease: PageLease) -> CapacityError:
        need = len(lease.records) * lease.layout.page_bytes
        limit = self._state.frames.capacity_bytes
        self._state.counts["leases_refused"] += 1
        self._state.outbox.tell(
            BoundReached(name="store.dram.lease", limit=limit, detail=f"{need} bytes wanted")
        )
        return CapacityError(
            f"a lease of {len(lease.records)} pages needs {need} bytes of dram at the same time; "
            f"{limit} exist and too many are held; lease fewer, release first, or raise store.dram.bytes"
        )

    def _advance(self, lease: PageLease) -> None:
        ready, checks = lease.ready, lease.checks
        while ready < len(checks) and checks[ready] is not None:
            ready += 1
        lease.ready = ready
        if lease.failed is None and ready in lease.lost:
            lease.failed = lease.lost[ready]
        if lease.is_settled and lease.callbacks:
            self._state.outbox.call(lease.callbacks)
            lease.callbacks = []

    def _lose(self, promotion: Promotion, reason: MissReason) -> None:
        promotion.record.promotion = None
        self._state.forget_if_gone(promotion.record, reason)
        self._state.frames.move(promotion.frame, FrameState.QUARANTINED)
        self._state.unpin([promotion.frame])
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
            self._state.outbox.call(lease.callbacks)
        lease.callbacks = []

    def _tidy_deadlines(self) -> None:
        """Drop ended leases that a longer-lived one keeps from surfacing, so the heap stays in proportion."""
        if len(self._deadlines) > 64 + 2 * self._active_count:
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
