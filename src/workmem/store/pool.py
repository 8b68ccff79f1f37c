"""The pool: the index, the frames in dram, and every hold on them, under one lock (R1).

No I/O, no callback and no event sink runs while the lock is held: what must be told is collected and
told after. Rules cited as R1-R10 are in docs/internals/buffer-rules.md.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from workmem.core.clock import Clock
from workmem.core.errors import CapacityError, InvariantError, LeaseError
from workmem.core.events import BlockAdmitted, BlockEvicted, BlockQuarantined, BoundReached, EventSink
from workmem.core.keys import BlockKey
from workmem.core.layout import Namespace
from workmem.core.outcomes import Lookup, MissReason, TierName
from workmem.policy.eviction import Node, SegmentedLru
from workmem.store.arena import Arena
from workmem.store.contract import BlockId, SaveState
from workmem.store.frames import Frame, FrameState, FrameTable
from workmem.store.lease import PageLease
from workmem.store.outbox import Outbox
from workmem.store.records import Promotion, Record, Space

if TYPE_CHECKING:
    from workmem.store.tiers.segments import Extent

_PROTECTED_SHARE = 0.8
"""Of a tier that reused blocks may fill: the rest is where new blocks prove themselves."""


class Pool:
    """Who is where. Every public method takes the lock itself."""

    def __init__(self, arena: Arena, clock: Clock, sink: EventSink) -> None:
        self.arena = arena
        self.clock = clock
        self.outbox = Outbox(sink)
        self.frames: FrameTable[Record] = FrameTable(arena.capacity_bytes)
        self.order: SegmentedLru[Record] = SegmentedLru(int(arena.capacity_bytes * _PROTECTED_SHARE))
        self.spaces: dict[bytes, Space] = {}
        self.counts: Counter[str] = Counter()
        self.unwritten: deque[Record] = deque()
        """Blocks on their way to ssd, oldest first; an entry whose `unwritten` is off is stale."""
        self.writes_in_flight = 0
        self.wants_writes = False
        """A durable tier takes what is admitted."""
        self.reads_ssd = True
        """Off while the ssd tier's reads fail: what only it holds is a miss."""
        self.drop_extent: Callable[[Record], None] = _no_extent
        """Takes a record's ssd copy out of service; set by the ssd index."""
        self.touch_ssd: Callable[[list[Node[Record]]], None] | None = None
        """Tells the ssd index that blocks were used again; set by it."""
        self._deadlines: list[tuple[float, int, PageLease]] = []
        self._lease_count = 0

    # -- namespaces and lookup

    def count(self, name: str, amount: int) -> None:
        """Add to a counter. Counters are the pool's, so they change under its lock too."""
        with self.outbox:
            self.counts[name] += amount

    def add_space(self, namespace: Namespace, *, number: int | None = None) -> tuple[Space, bool]:
        """The space of `namespace`, and whether it is new here. Replay names the number it had."""
        root = namespace.root()
        with self.outbox:
            space = self.spaces.get(root)
            if space is not None:
                return space, False
            if number is None:
                number = 1 + max((space.number for space in self.spaces.values()), default=0)
            space = Space(namespace, number)
            self.spaces[root] = space
            return space, True

    def space(self, root: bytes) -> Space:
        """The space under `root`. Raises InvariantError for a root that was never registered."""
        try:
            return self.spaces[root]
        except KeyError:
            raise InvariantError(f"root {root.hex()[:16]} is not registered with this store") from None

    def lookup(self, space: Space, keys: Sequence[BlockKey]) -> Lookup:
        """Longest resident prefix. Takes no lock: each step reads one field that changes in one step."""
        tiers: list[TierName] = []
        get, dram, ssd, reads_ssd = space.records.get, TierName.DRAM, TierName.SSD, self.reads_ssd
        for key in keys:
            record = get(key)
            if record is None:
                break
            if record.frame is not None:
                tiers.append(dram)
            elif record.extent is not None and reads_ssd:
                tiers.append(ssd)
            else:
                break
        if len(tiers) == len(keys):
            return Lookup(tuple(tiers))
        return Lookup(tuple(tiers), self._why_missed(space, keys[len(tiers)]))

    # -- saving

    def begin_save(self, space: Space, block: BlockId, wait_s: float) -> Frame[Record] | SaveState:
        """A FILLING frame for `block`, or how the save ends at once. Waits for room up to `wait_s`."""
        until = self.clock.monotonic() + wait_s
        with self.outbox:
            if self._collides(space, block):
                self.counts["saves_dropped"] += 1
                return SaveState.DROPPED
            while True:
                if self._holds(space, block):
                    return SaveState.ALREADY_THERE
                frame = self._reserve(space.frame_bytes)
                if frame is not None:
                    break
                left = until - self.clock.monotonic()
                if left <= 0 or not (self.unwritten or self.writes_in_flight):
                    self.counts["saves_dropped"] += 1
                    detail = f"a page of {space.frame_bytes} bytes found every frame held"
                    self.outbox.tell(
                        BoundReached(
                            name="store.dram.frames", limit=self.frames.capacity_bytes, detail=detail
                        )
                    )
                    return SaveState.DROPPED
                self.outbox.changed.wait(left)
            space.filling.add(block.key)
            self.frames.move(frame, FrameState.FILLING)
            return frame

    def commit_save(
        self, space: Space, block: BlockId, frame: Frame[Record], checksums: tuple[int, ...]
    ) -> SaveState:
        """The frame holds the page and its checksums are known: make it visible (R2)."""
        with self.outbox:
            space.filling.discard(block.key)
            record = space.records.get(block.key)
            if record is None:
                record = Record(space, block.key, block.parent, block.depth)
            elif record.frame is not None or record.promotion is not None:
                self.frames.free(frame)
                return SaveState.ALREADY_THERE
            self._admit(record, frame, block.tokens, checksums)
            space.records[block.key] = record
            space.ghosts.pop(block.key, None)
            self.counts["saves"] += 1
            self.counts["saved_bytes"] += space.layout.page_bytes
            if self.wants_writes and record.extent is None:
                self._queue_write(record)
            return SaveState.STORED

    def abort_save(self, space: Space, block: BlockId, frame: Frame[Record]) -> None:
        """The page was not written: give the frame back (R5)."""
        with self.outbox:
            space.filling.discard(block.key)
            self.frames.free(frame)
            self.counts["saves_dropped"] += 1

    # -- leases

    def lease(
        self, space: Space, keys: Sequence[BlockKey], owner: str, ttl_s: float
    ) -> tuple[PageLease, list[Promotion]]:
        """Pin what is in dram, reserve frames for what is on ssd; the new promotions are to be read."""
        lease = PageLease(self, space.layout, tuple(keys), owner, self.clock.monotonic() + ttl_s)
        with self.outbox:
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
            self.order.touch([node for record in prefix if (node := record.dram_node) is not None])
            if self.touch_ssd is not None:
                self.touch_ssd([node for record in prefix if (node := record.ssd_node) is not None])
            self._advance(lease)
            self._lease_count += 1
            self.counts["leases"] += 1
            heapq.heappush(self._deadlines, (lease.deadline, self._lease_count, lease))
        return lease, started

    def subscribe(self, lease: PageLease, callback: Callable[[], None]) -> bool:
        """Keep `callback` for when `lease` settles; True if it has already."""
        with self.outbox:
            if lease.is_settled:
                return True
            if not lease.ended:
                lease.callbacks.append(callback)
            return False

    def renew(self, lease: PageLease, ttl_s: float) -> None:
        """Move the deadline. Raises LeaseError when the lease has ended."""
        with self.outbox:
            if lease.ended:
                raise LeaseError(f"lease of {lease.owner!r} is {lease.ended}; take a new one")
            lease.deadline = self.clock.monotonic() + ttl_s
            self._lease_count += 1
            heapq.heappush(self._deadlines, (lease.deadline, self._lease_count, lease))

    def release(self, lease: PageLease) -> None:
        """Give the pages back, unless expiry has already done so."""
        with self.outbox:
            self._end(lease, "released")

    def expire_leases(self) -> None:
        """Take back what leases hold past their deadline (R3)."""
        with self.outbox:
            self._expire()

    def end_leases(self) -> None:
        """Take back everything: the store closes."""
        with self.outbox:
            for _, _, lease in self._deadlines:
                self._end(lease, "closed")
            self._deadlines.clear()

    def unpin(self, frames: Sequence[Frame[Record]]) -> None:
        """Drop one pin of each frame."""
        with self.outbox:
            self._unpin(frames)

    # -- promotion, called by readers

    def promoted(self, promotion: Promotion, tokens: tuple[int, ...], checksums: tuple[int, ...]) -> None:
        """The page is in its frame and verified: make it visible and tell who waits."""
        record, frame = promotion.record, promotion.frame
        with self.outbox:
            if record.space.records.get(record.key) is not record:
                self._lose(promotion, MissReason.CORRUPT)
                return
            record.promotion = None
            self._admit(record, frame, tokens, checksums)
            if record.dram_node is not None and promotion.waiters:
                # It was asked for again: that is what the reused segment is for.
                self.order.touch([record.dram_node])
            self.counts["promoted"] += 1
            self.counts["promoted_bytes"] += record.space.layout.page_bytes
            self._unpin([frame])
            for lease, index in promotion.waiters:
                if not lease.ended:
                    lease.checks[index] = checksums
                    self._advance(lease)
            self.outbox.changed.notify_all()

    def promotion_failed(self, promotion: Promotion, reason: MissReason) -> None:
        """The page did not arrive or is not what was written: its ssd copy leaves service (R6)."""
        record = promotion.record
        with self.outbox:
            if record.space.records.get(record.key) is record:
                self._quarantine(record, TierName.SSD, reason)
            self._lose(promotion, reason)

    def quarantine(self, record: Record, reason: MissReason, *, only_frame: Frame[Record]) -> None:
        """The page in `only_frame` is corrupt: every copy of the block leaves service."""
        with self.outbox:
            if record.space.records.get(record.key) is record and record.frame is only_frame:
                self._quarantine(record, TierName.DRAM, reason)

    def quarantine_extent(self, record: Record, extent: Extent, reason: MissReason) -> None:
        """The page at `extent` is corrupt: every copy of the block leaves service."""
        with self.outbox:
            if record.extent is extent:
                self._quarantine(record, TierName.SSD, reason)

    # -- inside the lock

    def audit(self) -> None:
        """Recount everything. Raises InvariantError on the first thing that does not add up."""
        self.frames.audit()
        resident = 0
        for space in self.spaces.values():
            for key, record in space.records.items():
                if record.key != key or record.space is not space:
                    raise InvariantError("a record is filed under another key")
                if record.frame is None and record.extent is None and record.promotion is None:
                    raise InvariantError("a record names a block that no tier holds")
                if (record.frame is None) != (record.dram_node is None):
                    raise InvariantError("a page in dram has no place in the eviction order, or the reverse")
                if (record.extent is None) != (record.ssd_node is None):
                    raise InvariantError("a page on ssd has no place in the eviction order, or the reverse")
                if record.frame is not None:
                    resident += record.frame.size
                    if record.frame.state is not FrameState.RESIDENT or record.frame.owner is not record:
                        raise InvariantError("an indexed frame is not resident or not its own")
        if resident != self.frames.ledger[FrameState.RESIDENT]:
            raise InvariantError(
                f"{self.frames.ledger[FrameState.RESIDENT]} bytes resident, {resident} indexed"
            )

    def _collides(self, space: Space, block: BlockId) -> bool:
        """Two contexts under one key: neither may be served for the other, so both leave."""
        record = space.records.get(block.key)
        if record is None:
            return False
        known = record.tokens
        if record.parent == block.parent and (known is None or known == block.tokens):
            return False
        self._quarantine(record, TierName.DRAM, MissReason.CORRUPT)
        return True

    def _holds(self, space: Space, block: BlockId) -> bool:
        record = space.records.get(block.key)
        if record is None:
            return block.key in space.filling
        return record.frame is not None or record.promotion is not None or block.key in space.filling

    def _reserve(self, size: int) -> Frame[Record] | None:
        frame = self.frames.reserve(size)
        while frame is None:
            node = self.order.pick(self._is_held)
            if node is None and self._expire():
                continue
            if node is None:
                return None
            other_size = node.size != size
            self._evict(node.item)
            if other_size:
                self._close_ranks(size)
            frame = self.frames.reserve(size)
        return frame

    def _close_ranks(self, size: int) -> None:
        """Move pages of other sizes together once that empties room for a frame of `size`.

        Without it a new layout could only get a slab by evicting whatever else lies there. The copy
        is at most a slab, in memory, of pages nobody holds; so it is done under the lock.
        """
        window = self.frames.cheapest_window(size)
        if window is None:
            return
        for slab in window:
            slab.is_closing = True
        for slab in window:
            for old in slab.frames:
                if old.state is not FrameState.FREE:
                    self._move_page(old)

    def _move_page(self, old: Frame[Record]) -> None:
        record, new = old.owner, self.frames.reserve(old.size)
        assert record is not None
        assert new is not None
        self.frames.move(new, FrameState.FILLING)
        self.arena.writable(new.offset, new.size)[:] = self.arena.readable(old.offset, old.size)
        self.frames.move(new, FrameState.RESIDENT)
        new.owner = record
        record.frame = new
        self.frames.move(old, FrameState.EVICTING)
        self.frames.free(old)
        self.counts["dram_moved_bytes"] += old.size

    def _is_held(self, record: Record) -> bool:
        assert record.frame is not None
        return record.frame.pins > 0 or record.unwritten

    def _evict(self, record: Record) -> None:
        frame = self._detach(record, FrameState.EVICTING)
        self.frames.free(frame)
        self.counts["dram_evictions"] += 1
        self.outbox.tell(BlockEvicted(tier=TierName.DRAM, key=record.key.hex()[:16], reason="room"))
        if record.extent is None:
            self._forget(record, MissReason.EVICTED)

    def _detach(self, record: Record, state: FrameState) -> Frame[Record]:
        frame, node = record.frame, record.dram_node
        assert frame is not None
        assert node is not None
        record.frame = None
        record.dram_node = None
        record.tokens = None
        record.checksums = ()
        self.order.remove(node)
        self.frames.move(frame, state)
        return frame

    def _forget(self, record: Record, reason: MissReason) -> None:
        space = record.space
        if space.records.get(record.key) is record:
            del space.records[record.key]
        space.remember(record.key, reason)
        record.unwritten = False

    def forget_if_gone(self, record: Record, reason: MissReason) -> None:
        """Drop a record that no tier holds any more. The lock is held by the caller."""
        if record.frame is None and record.extent is None and record.promotion is None:
            self._forget(record, reason)

    def _admit(
        self, record: Record, frame: Frame[Record], tokens: tuple[int, ...], checks: tuple[int, ...]
    ) -> None:
        number = record.space.number
        self.frames.move(frame, FrameState.RESIDENT)
        frame.owner = record
        record.tokens = tokens
        record.checksums = checks
        record.dram_node = self.order.insert(
            record, (number, record.key), (number, record.parent), frame.size
        )
        record.frame = frame
        self.outbox.tell(
            BlockAdmitted(
                tier=TierName.DRAM, key=record.key.hex()[:16], page_bytes=record.space.layout.page_bytes
            )
        )

    def _queue_write(self, record: Record) -> None:
        record.unwritten = True
        self.unwritten.append(record)
        self.outbox.changed.notify_all()

    def requeue_writes(self) -> None:
        """Queue every block that only dram holds: the ssd tier is back."""
        with self.outbox:
            for space in self.spaces.values():
                for record in space.records.values():
                    if record.frame is not None and record.extent is None and not record.unwritten:
                        self._queue_write(record)

    def write_ended(self, record: Record) -> None:
        """`record` is written or given up: it may be evicted again. The lock is held by the caller."""
        record.unwritten = False
        if record.dram_node is not None and record.dram_node.parked:
            self.order.unpark(record.dram_node)
        self.outbox.changed.notify_all()

    def _why_missed(self, space: Space, key: BlockKey) -> MissReason:
        if key in space.records:
            return MissReason.UNAVAILABLE
        return space.ghosts.get(key, MissReason.COLD)

    def _prefix(self, space: Space, lease: PageLease) -> list[Record]:
        prefix: list[Record] = []
        for key in lease.keys:
            record = space.records.get(key)
            if record is None or (record.frame is None and (record.extent is None or not self.reads_ssd)):
                lease.lost[len(prefix)] = self._why_missed(space, key)
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
                frame = self._reserve(record.space.frame_bytes) or self._reserve_unwritten(
                    record.space.frame_bytes
                )
                if frame is None:
                    self._undo_lease(lease, started)
                    raise self._no_room(lease)
                self.frames.move(frame, FrameState.FILLING)
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

    def _reserve_unwritten(self, size: int) -> Frame[Record] | None:
        """A request that waits now is worth more than a copy on ssd: give up the newest unwritten pages."""
        while self.unwritten:
            record = self.unwritten.pop()
            if not record.unwritten:
                continue
            self.write_ended(record)
            self.counts["writes_given_up"] += 1
            frame = self._reserve(size)
            if frame is not None:
                detail = "pages left dram for a request before ssd had them"
                self.outbox.tell(BoundReached(name="store.ssd.unwritten", limit=0, detail=detail))
                return frame
        return None

    def _undo_lease(self, lease: PageLease, started: list[Promotion]) -> None:
        for promotion in started:
            promotion.record.promotion = None
            promotion.extent.segment.readers -= 1
            promotion.frame.pins = 0
            self.frames.free(promotion.frame)
        mine = {id(promotion.frame) for promotion in started}
        self._unpin([frame for frame in lease.frames if frame is None or id(frame) not in mine])
        lease.ended = "refused"

    def _no_room(self, lease: PageLease) -> CapacityError:
        need = len(lease.records) * lease.layout.page_bytes
        limit = self.frames.capacity_bytes
        self.counts["leases_refused"] += 1
        self.outbox.tell(BoundReached(name="store.dram.lease", limit=limit, detail=f"{need} bytes wanted"))
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
            self.outbox.call(lease.callbacks)
            lease.callbacks = []

    def _lose(self, promotion: Promotion, reason: MissReason) -> None:
        promotion.record.promotion = None
        self.forget_if_gone(promotion.record, reason)
        self.frames.move(promotion.frame, FrameState.QUARANTINED)
        self._unpin([promotion.frame])
        for lease, index in promotion.waiters:
            if not lease.ended:
                lease.lost[index] = reason
                self._advance(lease)

    def _quarantine(self, record: Record, tier: TierName, reason: MissReason) -> None:
        self.counts["quarantines"] += 1
        self.outbox.tell(BlockQuarantined(tier=tier, key=record.key.hex()[:16], reason=reason))
        if record.frame is not None:
            frame = self._detach(record, FrameState.QUARANTINED)
            if frame.pins == 0:
                self.frames.free(frame)
        if record.extent is not None:
            self.drop_extent(record)
        self._forget(record, reason)

    def _unpin(self, frames: Sequence[Frame[Record] | None]) -> None:
        for frame in frames:
            if frame is None:
                continue
            frame.pins -= 1
            if frame.pins:
                continue
            if frame.state is FrameState.QUARANTINED:
                self.frames.free(frame)
            elif frame.owner is not None and (node := frame.owner.dram_node) is not None and node.parked:
                self._unpark(frame.owner)
        self.outbox.changed.notify_all()

    def _unpark(self, record: Record) -> None:
        if not record.unwritten:
            assert record.dram_node is not None
            self.order.unpark(record.dram_node)

    def _end(self, lease: PageLease, how: str) -> None:
        if lease.ended:
            return
        lease.ended = how
        self._unpin(lease.frames)
        if how != "released" and not lease.is_settled:
            lease.failed = MissReason.EXPIRED
            self.outbox.call(lease.callbacks)
        lease.callbacks = []

    def _expire(self) -> int:
        """End leases past their deadline; returns how many."""
        ended = 0
        now = self.clock.monotonic()
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][2].ended):
            _, _, lease = heapq.heappop(deadlines)
            if lease.ended or lease.deadline > now:
                continue
            self.counts["leases_expired"] += 1
            detail = f"owner {lease.owner!r} held {len(lease.frames)} pages past the deadline"
            self.outbox.tell(BoundReached(name="store.lease.ttl", limit=0, detail=detail))
            self._end(lease, "expired")
            ended += 1
        return ended


def _no_extent(record: Record) -> None:
    raise InvariantError(f"record {record.key.hex()[:16]} has an ssd page but the store has no ssd tier")
