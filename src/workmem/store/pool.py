"""The pool: namespaces, lookups and saves, under one lock (R1). Leases are in `leases`.

Every public method but `lookup` takes the lock itself. No I/O, no callback and no event sink runs
while it is held: what must be told is collected and told after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from workmem.core.clock import Clock
from workmem.core.errors import InvariantError
from workmem.core.events import BoundReached, EventSink, NamespacePurged
from workmem.core.keys import BlockKey
from workmem.core.layout import Namespace
from workmem.core.outcomes import Lookup, MissReason, TierName
from workmem.policy.choose import EvictionName
from workmem.store.arena import Arena
from workmem.store.catalog import NO_SEGMENT, Space
from workmem.store.contract import BlockId, SaveState
from workmem.store.frames import Frame, FrameState
from workmem.store.leases import LeaseTable
from workmem.store.outbox import Outbox
from workmem.store.residents import Residents

if TYPE_CHECKING:
    from workmem.store.tiers.segments import Extent

_STORED, _EVICTED = SaveState.STORED, MissReason.EVICTED
_PACK_STEPS = 16
"""Of a call of `pack`; the lock is open between them."""
_PURGE_STEP = 32
"""Blocks taken out under one hold of the lock."""
_PURGE_STEP_BYTES = 16 * 2**20
"""And most bytes of frames, but one page at least: zeroing them takes some milliseconds."""
_PURGE_TURN_S, _PURGE_PAUSE_S = 0.002, 0.0001
"""A purge takes the lock again before anybody who waits for it has woken: now and then it gives them the time to."""


class Pool:
    """Front of the state that all threads of a store share."""

    def __init__(
        self,
        arena: Arena,
        clock: Clock,
        sink: EventSink,
        eviction: EvictionName = "value",
        pin_budget_bytes: int = 0,
    ) -> None:
        self.clock = clock
        self._numbers = 0
        self.state = Residents(arena, Outbox(sink), eviction, pin_budget_bytes)
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
            return self._open_space(namespace, number), True

    def number_from(self, number: int) -> None:
        """The journal speaks of numbers below `number`: a namespace that is new gets none of them."""
        with self.state.outbox:
            self._numbers = max(self._numbers, number - 1)

    def number_as(self, found: Sequence[Space], last_number: int) -> list[Space]:
        """Number namespaces as a journal does that was opened while others were in use, and return ours.

        Those that it does not name get numbers that it has never used. The lock is held by the caller.
        """
        self._numbers = max(self._numbers, last_number)
        named = {space.root for space in found}
        for space in self.state.spaces.values():
            if space.root not in named:
                self._numbers += 1
                space.number = self._numbers
        ours: list[Space] = []
        for space in found:
            known = self.state.spaces.get(space.root) or self._open_space(space.namespace, space.number)
            known.number = space.number
            ours.append(known)
        return ours

    def space(self, root: bytes) -> Space:
        """The space under `root`. Raises InvariantError for a root that was never registered."""
        try:
            return self.state.spaces[root]
        except KeyError:
            raise InvariantError(f"root {root.hex()[:16]} is not registered with this store") from None

    def lookup(self, space: Space, keys: Sequence[BlockKey]) -> Lookup:
        """Longest resident prefix. Takes no lock: each step reads one field that changes in one step."""
        catalog = self.state.catalog
        in_dram, on_ssd, reads_ssd = catalog.frame, catalog.segment, self.state.reads_ssd
        dram, ssd = TierName.DRAM, self.state.below
        tiers: list[TierName] = []
        for row in map(space.rows.get, keys):
            if row is None:
                break
            if in_dram[row] is not None:
                tiers.append(dram)
            elif on_ssd[row] != NO_SEGMENT and reads_ssd:
                tiers.append(ssd)
            else:
                break
        if len(tiers) == len(keys):
            return Lookup(tuple(tiers))
        return Lookup(tuple(tiers), self.state.why_missed(space, keys[len(tiers)]))

    # -- saving

    def begin_save(
        self, space: Space, block: BlockId, wait_s: float, workflow: str = ""
    ) -> Frame | SaveState:
        """A FILLING frame for `block`, or how the save ends at once. Waits for room up to `wait_s`.

        `workflow`: for which of the tenant's it is, where that counts for a quota.
        """
        until = 0.0
        with self.state.outbox:
            while (begun := self._begin(space, block, workflow)) is None:
                until = until or self.clock.monotonic() + wait_s
                left = until - self.clock.monotonic()
                if left <= 0 or not (self.state.unwritten or self.state.writes_in_flight):
                    self._no_room(space, workflow)
                    return SaveState.DROPPED
                self.state.outbox.changed.wait(left)
            return begun

    def begin_saves(
        self, space: Space, blocks: Sequence[BlockId], workflows: Sequence[str] = ()
    ) -> list[Frame | SaveState]:
        """As `begin_save`, many at once and without waiting: the answers end before the first that finds no room."""
        begun: list[Frame | SaveState] = []
        with self.state.outbox:
            try:
                for block, workflow in zip(blocks, workflows or repeat(""), strict=False):
                    answer = self._begin(space, block, workflow)
                    if answer is None:
                        break
                    begun.append(answer)
            except BaseException:
                # Nobody will hear of those that were begun: they must not stay FILLING for ever.
                for block, answer in zip(blocks, begun, strict=False):
                    if isinstance(answer, Frame):
                        self._abort(space, block, answer)
                raise
        return begun

    def commit_save(self, space: Space, block: BlockId, frame: Frame) -> SaveState:
        """The frame holds the page and its header says so: make it visible (R2)."""
        with self.state.outbox:
            return self._commit(space, block, frame)

    def commit_saves(self, space: Space, filled: Sequence[tuple[BlockId, Frame]]) -> list[SaveState]:
        """As `commit_save`, many at once; parents come before their children."""
        with self.state.outbox:
            return [self._commit(space, block, frame) for block, frame in filled]

    def abort_save(self, space: Space, block: BlockId, frame: Frame) -> None:
        """The page was not written and nobody writes to the frame any more: give it back (R5)."""
        with self.state.outbox:
            self._abort(space, block, frame)

    def strand_save(self, space: Space, block: BlockId, frame: Frame) -> None:
        """The writer is past its deadline but may still write: its frame serves nobody until it is dead (R3)."""
        with self.state.outbox:
            space.filling.pop(block.key, None)
            self.state.refund(frame)
            self.state.frames.move(frame, FrameState.QUARANTINED)
            self.state.counts["saves_dropped"] += 1

    def free_stranded(self, frame: Frame) -> None:
        """The writer of a stranded frame is dead."""
        with self.state.outbox:
            self.state.wipe(frame)

    def requeue_writes(self) -> None:
        """Queue every block that only dram holds: the ssd tier is back."""
        with self.state.outbox:
            catalog = self.state.catalog
            for row, frame in enumerate(catalog.frame):
                if frame is not None and catalog.segment[row] == NO_SEGMENT and not catalog.is_unwritten[row]:
                    self.state.queue_write_again(row)

    def quarantine_extent(self, row: int, stamp: int, extent: Extent, reason: MissReason) -> None:
        """The page at `extent` is corrupt: every copy of the block leaves service."""
        with self.state.outbox:
            catalog = self.state.catalog
            if catalog.is_same(row, stamp) and extent.is_of(catalog, row):
                self.state.quarantine(row, self.state.below, reason)

    def withdraw_extent(self, row: int, stamp: int, extent: Extent, reason: MissReason) -> None:
        """The page at `extent` cannot be read by this process, which is no damage: it leaves service."""
        with self.state.outbox:
            catalog = self.state.catalog
            if catalog.is_same(row, stamp) and extent.is_of(catalog, row):
                self.state.counts["ssd_unreadable"] += 1
                self.state.withdraw(row, reason)

    def pack(self) -> None:
        """Give back slabs that are nearly empty, where sizes are mixed and much is fragmented: some MiB at most."""
        for _ in range(_PACK_STEPS):
            with self.state.outbox:
                if not self.state.compaction.tend():
                    return

    # -- purging

    def purge(self, chosen: Callable[[Namespace], bool]) -> list[Space]:
        """Take every namespace that `chosen` accepts out of service, at once and for good (R9).

        Each begins anew, empty. Returns the old ones; `sweep` takes their pages out.
        """
        with self.state.outbox:
            gone = [space for space in self.state.spaces.values() if chosen(space.namespace)]
            for space in gone:
                space.is_purged = True
                self.state.leaving[space.number] = space
                # In its place at once: who looks takes no lock, and must find one or the other.
                self._open_space(space.namespace, None)
                self.state.drop_space(space)
                self.state.outbox.tell(NamespacePurged(root=space.root.hex()[:16], blocks=len(space.rows)))
        return gone

    def sweep(self, space: Space) -> None:
        """Give up the frames and places of a purged namespace, some at a time."""
        step = max(1, min(_PURGE_STEP, _PURGE_STEP_BYTES // space.frame_bytes))
        with self.state.outbox:
            # Once for all: a dictionary looks for its first entry past all that have been deleted before it.
            rows = list(space.rows.values())
            space.ghosts.clear()
        key, turn_ends = self.state.catalog.key, time.perf_counter() + _PURGE_TURN_S
        for at in range(0, len(rows), step):
            with self.state.outbox:
                for row in rows[at : at + step]:
                    # It may have left meanwhile, and its number be another block's.
                    if space.rows.get(key[row]) == row:
                        self.state.withdraw(row, MissReason.COLD)
            if time.perf_counter() > turn_ends:
                time.sleep(_PURGE_PAUSE_S)
                turn_ends = time.perf_counter() + _PURGE_TURN_S
        with self.state.outbox:
            self.state.leaving.pop(space.number, None)

    def forget_empty(self) -> int:
        """See `Store.forget_empty`."""
        with self.state.outbox:
            spaces = self.state.spaces
            empty = [space for space in spaces.values() if not space.rows and not space.filling]
            # Those that were opened first: the others may be about to get their first page.
            gone = empty[: -(-len(empty) // 2)]
            for space in gone:
                # Whoever has it at hand saves nothing in it any more.
                space.is_purged = space.is_forgotten = True
                del spaces[space.root]
        return len(gone)

    def forget_space(self, space: Space) -> None:
        """Replay found that a namespace was purged before the last stop."""
        with self.state.outbox:
            space.is_purged = True
            if self.state.spaces.get(space.root) is space:
                del self.state.spaces[space.root]

    # -- inside the lock

    def _begin(self, space: Space, block: BlockId, workflow: str = "") -> Frame | SaveState | None:
        """A FILLING frame, or how the save ends; None when there is no room."""
        state, key = self.state, block.key
        if key in space.rows or key in space.filling or space.is_purged:
            ended = self._ended_at_once(space, block)
            if ended is not None:
                return ended
        # Looked up before room is made, or the ghosts would be one block further than they are.
        ghost = state.ghosts.find(key)
        number = state.catalog.workflow_number(workflow) if workflow else 0
        group = state.group(space, number) if state.shares is not None else ""
        frame = state.reserve(space, group)
        if frame is None:
            return None
        state.missed(key, ghost, group)
        space.filling[key] = number
        return frame

    def _ended_at_once(self, space: Space, block: BlockId) -> SaveState | None:
        """How a save ends whose block is here, or whose namespace is gone; None where it goes on."""
        if space.is_purged or (block.key in space.rows and self._collides(space, block)):
            self.state.counts["saves_dropped"] += 1
            return SaveState.DROPPED
        return SaveState.ALREADY_THERE if self._holds(space, block) else None

    def _abort(self, space: Space, block: BlockId, frame: Frame) -> None:
        space.filling.pop(block.key, None)
        self.state.wipe(frame)
        self.state.counts["saves_dropped"] += 1

    def _commit(self, space: Space, block: BlockId, frame: Frame) -> SaveState:
        state, key, counts = self.state, block.key, self.state.counts
        workflow = space.filling.pop(key, 0)
        if space.is_purged:
            state.wipe(frame)
            counts["saves_dropped"] += 1
            return SaveState.DROPPED
        catalog = state.catalog
        row = space.rows.get(key)
        if row is None:
            row = catalog.add(space, key, block.parent, block.depth, workflow)
        elif catalog.frame[row] is not None or row in catalog.promotion:
            state.give_back(frame)
            return SaveState.ALREADY_THERE
        is_back = space.ghosts.pop(key, None) is _EVICTED
        state.admit(row, frame, is_back=is_back)
        counts["saves"] += 1
        counts["saved_bytes"] += space.page_bytes
        if state.wants_writes and catalog.segment[row] == NO_SEGMENT:
            state.queue_write(row, is_back=is_back)
        return _STORED

    def _open_space(self, namespace: Namespace, number: int | None) -> Space:
        self._numbers = max(self._numbers + 1, number or 0)
        space = Space(namespace, self._numbers if number is None else number)
        self.state.spaces[space.root] = space
        return space

    def _no_room(self, space: Space, workflow: str) -> None:
        self.state.counts["saves_dropped"] += 1
        shares = self.state.shares
        number = self.state.catalog.workflow_number(workflow) if workflow else 0
        group = self.state.group(space, number)
        if shares is not None and (
            shares.ledger.is_over(group, space.frame_bytes)
            or not shares.ledger.admits(group, space.frame_bytes)
        ):
            ceiling = shares.ledger.quota(group).ceiling_bytes
            detail = f"group {group!r} holds {shares.ledger.used(group)} bytes and may take no more"
            self.state.outbox.tell(BoundReached(name="store.quota.dram", limit=ceiling or 0, detail=detail))
            return
        detail = f"a page of {space.frame_bytes} bytes found every frame held"
        limit = self.state.frames.capacity_bytes
        self.state.outbox.tell(BoundReached(name="store.dram.frames", limit=limit, detail=detail))

    def _collides(self, space: Space, block: BlockId) -> bool:
        """Two contexts under one key: neither may be served for the other, so both leave."""
        row = space.rows.get(block.key)
        if row is None:
            return False
        known = self.state.tokens(row)
        if self.state.catalog.parent[row] == block.parent and (known is None or known == block.tokens):
            return False
        self.state.quarantine(row, TierName.DRAM, MissReason.CORRUPT)
        return True

    def _holds(self, space: Space, block: BlockId) -> bool:
        row = space.rows.get(block.key)
        if row is None:
            return block.key in space.filling
        catalog = self.state.catalog
        return catalog.frame[row] is not None or row in catalog.promotion or block.key in space.filling
