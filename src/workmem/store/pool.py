"""The pool: namespaces, lookups and saves, under one lock (R1). Leases are in `leases`.

Every public method but `lookup` takes the lock itself. No I/O, no callback and no event sink runs
while it is held: what must be told is collected and told after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workmem.core.clock import Clock
from workmem.core.errors import InvariantError
from workmem.core.events import BoundReached, EventSink
from workmem.core.keys import BlockKey
from workmem.core.layout import Namespace
from workmem.core.outcomes import Lookup, MissReason, TierName
from workmem.store.arena import Arena
from workmem.store.contract import BlockId, SaveState
from workmem.store.frames import Frame, FrameState
from workmem.store.leases import LeaseTable
from workmem.store.outbox import Outbox
from workmem.store.records import Record, Space
from workmem.store.residents import Residents

if TYPE_CHECKING:
    from workmem.store.tiers.segments import Extent


class Pool:
    """Front of the state that all threads of a store share."""

    def __init__(self, arena: Arena, clock: Clock, sink: EventSink) -> None:
        self._clock = clock
        self.state = Residents(arena, Outbox(sink))
        self.leases = LeaseTable(self.state, clock)

    def count(self, name: str, amount: int) -> None:
        """Add to a counter. Counters are the pool's, so they change under its lock too."""
        with self.state.outbox:
            self.state.counts[name] += amount

    def add_space(self, namespace: Namespace, *, number: int | None = None) -> tuple[Space, bool]:
        """The space of `namespace`, and whether it is new here. Replay names the number it had."""
        root = namespace.root()
        with self.state.outbox:
            space = self.state.spaces.get(root)
            if space is not None:
                return space, False
            if number is None:
                number = 1 + max((space.number for space in self.state.spaces.values()), default=0)
            space = Space(namespace, number)
            self.state.spaces[root] = space
            return space, True

    def space(self, root: bytes) -> Space:
        """The space under `root`. Raises InvariantError for a root that was never registered."""
        try:
            return self.state.spaces[root]
        except KeyError:
            raise InvariantError(f"root {root.hex()[:16]} is not registered with this store") from None

    def lookup(self, space: Space, keys: Sequence[BlockKey]) -> Lookup:
        """Longest resident prefix. Takes no lock: each step reads one field that changes in one step."""
        tiers: list[TierName] = []
        get, dram, ssd, reads_ssd = space.records.get, TierName.DRAM, TierName.SSD, self.state.reads_ssd
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
        return Lookup(tuple(tiers), self.state.why_missed(space, keys[len(tiers)]))

    def begin_save(self, space: Space, block: BlockId, wait_s: float) -> Frame[Record] | SaveState:
        """A FILLING frame for `block`, or how the save ends at once. Waits for room up to `wait_s`."""
        until = self._clock.monotonic() + wait_s
        with self.state.outbox:
            if self._collides(space, block):
                self.state.counts["saves_dropped"] += 1
                return SaveState.DROPPED
            while True:
                if self._holds(space, block):
                    return SaveState.ALREADY_THERE
                frame = self.state.reserve(space.frame_bytes)
                if frame is not None:
                    break
                left = until - self._clock.monotonic()
                if left <= 0 or not (self.state.unwritten or self.state.writes_in_flight):
                    self.state.counts["saves_dropped"] += 1
                    detail = f"a page of {space.frame_bytes} bytes found every frame held"
                    self.state.outbox.tell(
                        BoundReached(
                            name="store.dram.frames", limit=self.state.frames.capacity_bytes, detail=detail
                        )
                    )
                    return SaveState.DROPPED
                self.state.outbox.changed.wait(left)
            space.filling.add(block.key)
            self.state.frames.move(frame, FrameState.FILLING)
            return frame

    def commit_save(
        self, space: Space, block: BlockId, frame: Frame[Record], checksums: tuple[int, ...]
    ) -> SaveState:
        """The frame holds the page and its checksums are known: make it visible (R2)."""
        with self.state.outbox:
            space.filling.discard(block.key)
            record = space.records.get(block.key)
            if record is None:
                record = Record(space, block.key, block.parent, block.depth)
            elif record.frame is not None or record.promotion is not None:
                self.state.frames.free(frame)
                return SaveState.ALREADY_THERE
            self.state.admit(record, frame, block.tokens, checksums)
            space.records[block.key] = record
            space.ghosts.pop(block.key, None)
            self.state.counts["saves"] += 1
            self.state.counts["saved_bytes"] += space.layout.page_bytes
            if self.state.wants_writes and record.extent is None:
                self.state.queue_write(record)
            return SaveState.STORED

    def abort_save(self, space: Space, block: BlockId, frame: Frame[Record]) -> None:
        """The page was not written: give the frame back (R5)."""
        with self.state.outbox:
            space.filling.discard(block.key)
            self.state.frames.free(frame)
            self.state.counts["saves_dropped"] += 1

    def requeue_writes(self) -> None:
        """Queue every block that only dram holds: the ssd tier is back."""
        with self.state.outbox:
            for space in self.state.spaces.values():
                for record in space.records.values():
                    if record.frame is not None and record.extent is None and not record.unwritten:
                        self.state.queue_write(record)

    def quarantine_extent(self, record: Record, extent: Extent, reason: MissReason) -> None:
        """The page at `extent` is corrupt: every copy of the block leaves service."""
        with self.state.outbox:
            if record.extent is extent:
                self.state.quarantine(record, TierName.SSD, reason)

    def _collides(self, space: Space, block: BlockId) -> bool:
        """Two contexts under one key: neither may be served for the other, so both leave."""
        record = space.records.get(block.key)
        if record is None:
            return False
        known = record.tokens
        if record.parent == block.parent and (known is None or known == block.tokens):
            return False
        self.state.quarantine(record, TierName.DRAM, MissReason.CORRUPT)
        return True

    def _holds(self, space: Space, block: BlockId) -> bool:
        record = space.records.get(block.key)
        if record is None:
            return block.key in space.filling
        return record.frame is not None or record.promotion is not None or block.key in space.filling
