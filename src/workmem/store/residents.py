"""Which blocks are where, and the frames they lie in: the pool's state and the steps it may take.

Every method is called with the lock of `outbox` held (R1) and none does I/O. Rules cited as R1-R10
are in docs/internals/buffer-rules.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from workmem.core.errors import InvariantError
from workmem.core.events import BlockAdmitted, BlockEvicted, BlockQuarantined, BoundReached
from workmem.core.keys import BlockKey
from workmem.core.outcomes import MissReason, TierName
from workmem.policy.eviction import EvictionOrder, Node, SegmentedLru
from workmem.store.arena import Arena
from workmem.store.frames import Frame, FrameState, FrameTable
from workmem.store.outbox import Outbox
from workmem.store.records import Record, Space

PROTECTED_SHARE = 0.8
"""Of a tier that reused blocks may fill: the rest is where new blocks prove themselves."""


class Residents:
    """Index, frames and eviction order of the dram tier, and what it owes the ssd tier."""

    def __init__(self, arena: Arena, outbox: Outbox) -> None:
        self.arena = arena
        self.outbox = outbox
        self.frames: FrameTable[Record] = FrameTable(arena.capacity_bytes)
        self.order: EvictionOrder[Record] = SegmentedLru[Record](int(arena.capacity_bytes * PROTECTED_SHARE))
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
        self.reclaim: Callable[[], int] = _nothing_to_reclaim
        """Ends leases past their deadline and says how many; set by the lease table."""

    def reserve(self, size: int) -> Frame[Record] | None:
        """A RESERVED frame of `size` bytes, evicting what may go; None when all that is left is held (R4)."""
        frame = self.frames.reserve(size)
        while frame is None:
            node = self.order.pick(self._is_held)
            if node is None and self.reclaim():
                continue
            if node is None:
                return None
            other_size = node.size != size
            self._evict(node.item)
            if other_size:
                self._close_ranks(size)
            frame = self.frames.reserve(size)
        return frame

    def reserve_unwritten(self, size: int) -> Frame[Record] | None:
        """A request that waits now is worth more than a copy on ssd: give up the newest unwritten pages."""
        while self.unwritten:
            record = self.unwritten.pop()
            if not record.unwritten:
                continue
            self.write_ended(record)
            self.counts["writes_given_up"] += 1
            frame = self.reserve(size)
            if frame is not None:
                detail = "pages left dram for a request before ssd had them"
                self.outbox.tell(BoundReached(name="store.ssd.unwritten", limit=0, detail=detail))
                return frame
        return None

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

    def admit(
        self, record: Record, frame: Frame[Record], tokens: tuple[int, ...], checks: tuple[int, ...]
    ) -> None:
        """The page is in its frame and its checksums are known: make it visible (R2)."""
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

    def quarantine(self, record: Record, tier: TierName, reason: MissReason) -> None:
        """Take every copy of a block out of service: the index now, the bytes later (R9)."""
        self.counts["quarantines"] += 1
        self.outbox.tell(BlockQuarantined(tier=tier, key=record.key.hex()[:16], reason=reason))
        if record.frame is not None:
            frame = self._detach(record, FrameState.QUARANTINED)
            if frame.pins == 0:
                self.frames.free(frame)
        if record.extent is not None:
            self.drop_extent(record)
        self._forget(record, reason)

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

    def queue_write(self, record: Record) -> None:
        """Note that a block is to be made durable."""
        record.unwritten = True
        self.unwritten.append(record)
        self.outbox.changed.notify_all()

    def write_ended(self, record: Record) -> None:
        """`record` is written or given up: it may be evicted again. The lock is held by the caller."""
        record.unwritten = False
        if record.dram_node is not None and record.dram_node.parked:
            self.order.unpark(record.dram_node)
        self.outbox.changed.notify_all()

    def unpin(self, frames: Sequence[Frame[Record] | None]) -> None:
        """Drop one pin of each frame and let what waited for that go on."""
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

    def why_missed(self, space: Space, key: BlockKey) -> MissReason:
        """What to say of a key that no readable tier holds."""
        if key in space.records:
            return MissReason.UNAVAILABLE
        return space.ghosts.get(key, MissReason.COLD)

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


def _no_extent(record: Record) -> None:
    raise InvariantError(f"record {record.key.hex()[:16]} has an ssd page but the store has no ssd tier")


def _nothing_to_reclaim() -> int:
    return 0
