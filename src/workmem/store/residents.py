"""Which blocks are where, and the frames they lie in: the pool's state and the steps it may take.

Every method is called with the lock of `outbox` held (R1) and none does I/O. Rules cited as R1-R10
are in docs/internals/buffer-rules.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from workmem.core.errors import InvariantError
from workmem.core.events import BlockAdmitted, BlockEvicted, BlockQuarantined, BoundReached
from workmem.core.keys import BlockKey
from workmem.core.outcomes import MissReason, TierName
from workmem.policy.choose import EvictionName, make_order
from workmem.policy.ghosts import Ghost, ghosts_of
from workmem.policy.order import NO_ROW, EvictionOrder, Loss, Prospect
from workmem.policy.quotas import Quota
from workmem.store.arena import Arena
from workmem.store.care import Care
from workmem.store.catalog import IS_BACK, NO_SEGMENT, Catalog, Space
from workmem.store.charges import Charges
from workmem.store.compaction import Compaction
from workmem.store.due_writes import DueWrites
from workmem.store.frames import Frame, FrameState, FrameTable
from workmem.store.outbox import Outbox
from workmem.store.shares import TierShares, note_missed
from workmem.store.tiers.page_header import blank, tokens_of

_RESIDENT, _EVICTED = FrameState.RESIDENT, MissReason.EVICTED
"""Named here: a member of an enum takes longer to find than all else that is done with it, and these are needed per page."""


class Residents:
    """Index, frames and eviction order of the dram tier, and what it owes the ssd tier."""

    def __init__(
        self, arena: Arena, outbox: Outbox, eviction: EvictionName, pin_budget_bytes: int = 0
    ) -> None:
        self.arena = arena
        self.outbox = outbox
        self.frames = FrameTable(arena.capacity_bytes)
        self.eviction = eviction
        self._make_order = partial(make_order, eviction, arena.capacity_bytes)
        self.order: EvictionOrder = self._make_order()
        self.ghosts = ghosts_of(arena.capacity_bytes)
        self.catalog = Catalog()
        self.care = Care(self.catalog, pin_budget_bytes)
        self.shares: TierShares | None = None
        """Set with the first quota; its order is then `order`."""
        self._charges = Charges()
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.compaction = Compaction(
            arena, self.frames, self.catalog, self.counts, self.start_filling, self._charges.move
        )
        self.spaces: dict[bytes, Space] = {}
        self.leaving: dict[int, Space] = {}
        """Purged namespaces whose pages are still being given up, by number."""
        self.unwritten = DueWrites()
        """Blocks on their way to the tier below; an entry that `owes_write` denies is stale."""
        self.writes_in_flight = 0
        self.wants_writes = False
        """A durable tier takes what is admitted."""
        self.below = TierName.SSD
        """What hits in the tier below dram are reported as."""
        self.reads_ssd = True
        """Off while the ssd tier's reads fail: what only it holds is a miss."""
        self.drop_extent: Callable[[int], object] = _no_extent
        """Takes a row's ssd copy out of service; set by the ssd index."""
        self.drop_space: Callable[[Space], None] = _nobody_to_tell
        """Tells the tier below that a namespace was purged; set by whoever answers for that tier."""
        self.touch_ssd: Callable[[Sequence[int]], None] | None = None
        """Tells the ssd index that blocks were used again; set by it."""
        self.advise_ssd: Callable[[Sequence[int], Prospect], None] | None = None
        """Tells the ssd index what is known of blocks' next use; set by it."""
        self.reclaim: Callable[[], int] = _nothing_to_reclaim
        """Ends leases past their deadline and says how many; set by the lease table."""
        self._late: dict[int, list[int]] = {}
        """Rows in dram that the order does not have yet, by the row of a parent that is still on its way (R7)."""
        self._is_late: set[int] = set()
        self._bereft: list[int] = []
        """Rows whose life group lost a block in this step."""

    # -- frames

    def reserve(self, space: Space, group: str = "") -> Frame | None:
        """A FILLING frame for a page of `space`, for `group`, evicting what may go.

        Its header says neither what was nor what will be there (R2). None when all that is left is held (R4), or is
        kept from the group by a quota (Q1, Q2).
        """
        frames, shares, size = self.frames, self.shares, space.frame_bytes
        if shares is not None and not shares.ledger.admits(group, size):
            return None
        while True:
            if shares is None or not shares.ledger.is_over(group, size):
                frame = frames.reserve(size)
                if frame is not None:
                    self._charges.take(shares, frame, group)
                    self.start_filling(frame, space)
                    return frame
            if shares is None:
                row = self.order.pick(self._is_held)
            else:
                row = shares.victim(group, size, self._is_held, self._bytes_of)
            if row == NO_ROW:
                if self.reclaim():
                    continue
                return None
            victim = self._evict(row)
            same_size = victim.size == size
            if same_size and shares is None and frames.may_reuse(victim):
                frames.reuse(victim)
                blank(self.arena.memory, victim.offset, space.header_bytes, victim.generation)
                return victim
            self._vacate(victim)
            if shares is None or not same_size:
                self.compaction.make_room(size)

    def _vacate(self, frame: Frame) -> None:
        """Free the frame of a block that was evicted."""
        self.frames.move(frame, FrameState.EVICTING)
        self.frames.free(frame)

    def reserve_unwritten(self, space: Space, group: str = "") -> Frame | None:
        """A request that waits now is worth more than a copy on ssd: give up the unwritten pages that would go last."""
        while self.unwritten:
            row, stamp = self.unwritten.take_last()
            if not self.owes_write(row, stamp):
                # A flush waits for stale ones too.
                self.outbox.changed.notify_all()
                continue
            self.write_ended(row, stamp)
            self.counts["writes_given_up"] += 1
            frame = self.reserve(space, group)
            if frame is not None:
                detail = "pages left dram for a request before ssd had them"
                self.outbox.tell(BoundReached(name="store.ssd.unwritten", limit=0, detail=detail))
                return frame
        return None

    def start_filling(self, frame: Frame, space: Space) -> None:
        """RESERVED -> FILLING: from now on the header says neither what was nor what will be there (R2)."""
        self.frames.move(frame, FrameState.FILLING)
        blank(self.arena.memory, frame.offset, space.header_bytes, frame.generation)

    def wipe(self, frame: Frame) -> None:
        """Free a frame whose page may be of a purged namespace, or of nobody: nothing of it stays (R9)."""
        self.arena.clear(frame.offset, frame.size)
        self.give_back(frame)

    def give_back(self, frame: Frame) -> None:
        """Free a frame, whoever answered for it (R5)."""
        self.refund(frame)
        self.frames.free(frame)

    def group(self, space: Space, workflow: int = 0) -> str:
        """The quota group that a new block counts for."""
        if self.shares is None:
            return ""
        return self.shares.group(space.namespace.tenant_salt, self.catalog.workflow_name(workflow))

    def refund(self, frame: Frame) -> None:
        """Nobody answers for a frame any more: it holds no page that counts."""
        self._charges.give_up(self.shares, frame)

    def missed(self, key: BlockKey, ghost: Ghost | None, group: str) -> None:
        """A frame was taken for a block that was not here, see `note_missed`."""
        if ghost is None:
            self.ghosts.misses += 1
        else:
            note_missed(self.ghosts, ghost, key, self.order, group)

    def _bytes_of(self, row: int) -> int:
        frame = self.catalog.frame[row]
        return frame.size if frame is not None else 0

    def set_quota(self, group: str, quota: Quota) -> None:
        """Set, replace or end a quota, and make the group keep it. Raises ValueError when the tier cannot."""
        shares = self.shares or TierShares(self.catalog, self.arena.capacity_bytes, self._make_order)
        regroups = shares.set_quota(group, quota)
        if regroups or self.shares is None:
            self._regroup(shares)
        ceiling = quota.ceiling_bytes
        while ceiling is not None and shares.ledger.used(group) > ceiling:
            row = shares.order.pick(self._is_held, group=group)
            if row == NO_ROW:
                break
            self._vacate(self._evict(row))

    def _regroup(self, shares: TierShares) -> None:
        catalog = self.catalog
        rows = [row for row in range(len(catalog.frame)) if self.is_in_order(row)]
        shares.regroup(self.order, rows, self._bytes_of, self.is_in_order)
        self.shares, self.order = shares, shares.order
        for row in rows:
            self._tell_order(row)
        self._charges.regroup(shares, catalog, self.is_in_order)

    def is_in_order(self, row: int) -> bool:
        """Whether the dram order has the block: it is in dram, and not waiting for a parent to come."""
        return self.catalog.frame[row] is not None and row not in self._is_late

    def _is_held(self, row: int) -> bool:
        catalog = self.catalog
        frame = catalog.frame[row]
        assert frame is not None
        return frame.pins > 0 or catalog.is_unwritten[row] > 0

    def _evict(self, row: int) -> Frame:
        """Take a victim's page out of service. Its frame is to be vacated or reused."""
        catalog = self.catalog
        key, was_used = catalog.key[row], self.order.was_used(row)
        frame = self._detach(row)
        self.ghosts.left(key, frame.size, was_used=was_used)
        self.counts["dram_evictions"] += 1
        if self.outbox.is_heard:
            self.outbox.tell(BlockEvicted(tier=TierName.DRAM, key=key[:8].hex(), reason="room"))
        if catalog.is_gone(row):
            self._forget(row, _EVICTED)
        if self._bereft:
            self._follow()
        return frame

    def _follow(self) -> None:
        """What belongs to a block that left goes as well; what cannot yet is the next to go (P3)."""
        rest, self._bereft = self._bereft, []
        self.advise(rest, prospect=Prospect.DONE)
        for row in rest:
            if self.is_in_order(row) and self.order.is_leaf(row) and not self._is_held(row):
                self._vacate(self._evict(row))

    # -- blocks

    def touch(self, rows: Sequence[int]) -> None:
        """Blocks of a prefix were used, root first, in whatever tier they are."""
        is_used, care = self.care.is_used, self.care
        self.order.touch(care.used_with(rows, TierName.DRAM) if is_used else rows)
        if self.touch_ssd is not None:
            self.touch_ssd(care.used_with(rows, TierName.SSD) if is_used else rows)

    def advise(
        self, rows: Sequence[int], *, prospect: Prospect | None = None, loss: Loss | None = None
    ) -> None:
        """Tell the dram order of those of `rows` that it has."""
        here = [row for row in rows if self.is_in_order(row)]
        if here:
            self.order.advise(here, prospect=prospect, loss=loss)

    def admit(self, row: int, frame: Frame, *, is_back: bool = False) -> None:
        """The page is in its frame, header and all: make it visible (R2). `is_back`: it was evicted before."""
        catalog = self.catalog
        self.frames.move(frame, _RESIDENT)
        frame.owner = row
        parent = catalog.parent_row(row)
        if parent in catalog.promotion or parent in self._is_late:
            self._is_late.add(row)
            self._late.setdefault(parent, []).append(row)
        else:
            self._enter_order(row, parent, frame, is_back=is_back)
        catalog.frame[row] = frame
        if self._late:
            self.settle_late(row)
        if self.outbox.is_heard:
            page_bytes = catalog.space[row].page_bytes
            self.outbox.tell(
                BlockAdmitted(tier=TierName.DRAM, key=catalog.key[row][:8].hex(), page_bytes=page_bytes)
            )

    def settle_late(self, row: int) -> None:
        """`row` is in the order now, or will not come: those that waited for it enter, parents first."""
        if not self._late:
            return
        ready = [row]
        while ready:
            parent = ready.pop()
            if parent in self._is_late:
                continue
            for child in self._late.pop(parent, ()):
                frame = self.catalog.frame[child]
                if child in self._is_late and frame is not None:
                    self._is_late.discard(child)
                    self._enter_order(child, self.catalog.parent_row(child), frame)
                    ready.append(child)

    def _enter_order(self, row: int, parent: int, frame: Frame, *, is_back: bool = False) -> None:
        catalog = self.catalog
        if parent != NO_ROW and (catalog.frame[parent] is None or parent in self._is_late):
            parent = NO_ROW
        if self.shares is None:
            self.order.insert(row, parent, frame.size, is_back=is_back)
        else:
            self.refund(frame)
            self._charges.take(self.shares, frame, self.shares.group_of(row))
            self.shares.insert(row, parent, frame.size, is_back=is_back)
        if self.care.is_used:
            self.care.entered(row, TierName.DRAM, self.order)
        if catalog.segment[row] != NO_SEGMENT:
            self.order.advise((row,), loss=Loss.RELOAD)

    def _tell_order(self, row: int) -> None:
        """What an order that was made anew does not know of a block."""
        if self.catalog.segment[row] != NO_SEGMENT:
            self.order.advise((row,), loss=Loss.RELOAD)
        if self.care.is_used and self.care.is_pinned(row):
            self.order.advise((row,), prospect=Prospect.PINNED)

    def _detach(self, row: int) -> Frame:
        """A block leaves dram: its frame, still RESIDENT, is nobody's."""
        frames = self.catalog.frame
        frame = frames[row]
        assert frame is not None
        frames[row] = None
        if row in self._is_late:
            self._is_late.discard(row)
        else:
            self.order.remove(row)
            if self.care.is_used:
                self._bereft += self.care.left(row, TierName.DRAM)
        if self._late:
            self.settle_late(row)
        if self.shares is not None:
            self.refund(frame)
        return frame

    def quarantine(self, row: int, tier: TierName, reason: MissReason) -> None:
        """Take every copy of a block out of service: the index now, the bytes later (R9)."""
        catalog = self.catalog
        self.counts["quarantines"] += 1
        self.outbox.tell(BlockQuarantined(tier=tier, key=catalog.key[row].hex()[:16], reason=reason))
        self.withdraw(row, reason)

    def withdraw(self, row: int, reason: MissReason) -> None:
        """No copy of the block may be served any more. A promotion under way finds out when it arrives."""
        catalog = self.catalog
        if catalog.frame[row] is not None:
            frame = self._detach(row)
            self.frames.move(frame, FrameState.QUARANTINED)
            if frame.pins == 0:
                self.wipe(frame)
        if catalog.segment[row] != NO_SEGMENT:
            self.drop_extent(row)
        catalog.promotion.pop(row, None)
        self.settle_late(row)
        self._forget(row, reason)
        if self._bereft:
            self._follow()

    def _forget(self, row: int, reason: MissReason) -> None:
        space = self.catalog.space[row]
        if not space.is_purged:
            space.remember(self.catalog.key[row], reason)
        if self.care.is_used:
            self.care.gone(row)
        self.catalog.drop(row)

    def forget_if_gone(self, row: int, reason: MissReason) -> None:
        """Drop a row that no tier holds any more. The lock is held by the caller."""
        if self.catalog.is_gone(row):
            self._forget(row, reason)

    def tokens(self, row: int) -> tuple[int, ...] | None:
        """Token ids of a block that is in dram; None for others."""
        frame, space = self.catalog.frame[row], self.catalog.space[row]
        if frame is None:
            return None
        with self.arena.readable(frame.offset, space.header_bytes) as header:
            return tokens_of(header, space.layout)

    # -- what is owed to ssd

    def owes_write(self, row: int, stamp: int) -> bool:
        """Whether the block is still on its way to ssd."""
        return self.catalog.is_same(row, stamp) and bool(self.catalog.is_unwritten[row])

    def queue_write(self, row: int, *, is_back: bool = False) -> None:
        """Note that a block that was just saved is to be made durable. `is_back`: every tier had evicted it before."""
        self.catalog.is_unwritten[row] = IS_BACK if is_back else 1
        self.unwritten.add((row, self.catalog.stamp[row]))
        self.outbox.changed.notify_all()

    def queue_write_again(self, row: int) -> None:
        """As `queue_write`, of one that the tier below did not take before: behind all that is saved now."""
        self.catalog.is_unwritten[row] = 1
        self.unwritten.add_again((row, self.catalog.stamp[row]))
        self.outbox.changed.notify_all()

    def write_ended(self, row: int, stamp: int) -> None:
        """The block is written or given up: it may be evicted again. The lock is held by the caller."""
        if self.catalog.is_same(row, stamp):
            self.catalog.is_unwritten[row] = 0
            frame = self.catalog.frame[row]
            if frame is not None and not frame.pins and row not in self._is_late:
                self.order.unpark(row)
        self.outbox.changed.notify_all()

    def unpin(self, frames: Sequence[Frame | None]) -> None:
        """Drop one pin of each frame and let what waited for that go on."""
        is_unwritten, is_late, unpark = self.catalog.is_unwritten, self._is_late, self.order.unpark
        for frame in frames:
            if frame is None:
                continue
            frame.pins -= 1
            if frame.pins:
                continue
            if frame.state is FrameState.QUARANTINED:
                self.wipe(frame)
            elif frame.state is FrameState.RESIDENT:
                row = frame.owner
                if not is_unwritten[row] and row not in is_late:
                    unpark(row)
        self.outbox.changed.notify_all()

    def why_missed(self, space: Space, key: BlockKey) -> MissReason:
        """What to say of a key that no readable tier holds."""
        if key in space.rows:
            return MissReason.UNAVAILABLE
        return space.ghosts.get(key, MissReason.COLD)

    def audit(self) -> None:
        """Recount everything. Raises InvariantError on the first thing that does not add up."""
        self.frames.audit()
        if self.shares is not None:
            self._charges.audit(self.shares, self.catalog)
        self._audit_rows()

    def _audit_rows(self) -> None:
        catalog, resident, count = self.catalog, 0, 0
        for space in self.spaces.values():
            for key, row in space.rows.items():
                count += 1
                frame = catalog.frame[row]
                if catalog.key[row] != key or catalog.space[row] is not space:
                    raise InvariantError("a row is filed under another key")
                if catalog.is_gone(row):
                    raise InvariantError("a row names a block that no tier holds")
                if frame is not None:
                    resident += frame.size
                    if frame.state is not FrameState.RESIDENT or frame.owner != row:
                        raise InvariantError("an indexed frame is not resident or not its own")
        if count != len(catalog):
            raise InvariantError(f"{len(catalog)} rows are taken, {count} are filed")
        if resident != self.frames.ledger[FrameState.RESIDENT]:
            raise InvariantError(
                f"{self.frames.ledger[FrameState.RESIDENT]} bytes resident, {resident} indexed"
            )
        in_dram = sum(frame is not None for frame in catalog.frame)
        if len(self.order) + len(self._is_late) != in_dram:
            raise InvariantError(f"{in_dram} blocks are in dram, the order has {len(self.order)}")


def _no_extent(row: int) -> None:
    raise InvariantError(f"row {row} has an ssd page but the store has no ssd tier")


def _nobody_to_tell(space: Space) -> None:
    del space


def _nothing_to_reclaim() -> int:
    return 0
