"""A lease: the hold on a prefix of pages in dram (R3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from workmem.core.errors import LeaseError
from workmem.core.keys import BlockKey
from workmem.core.layout import KVLayout
from workmem.core.outcomes import MissReason
from workmem.store.frames import Frame
from workmem.store.tiers.page_header import tokens_of

if TYPE_CHECKING:
    from workmem.store.catalog import Space
    from workmem.store.leases import LeaseTable


class PageLease:
    """See `store.contract.Lease`. Made by `LeaseTable.lease`; its fields are the table's, under its lock."""

    __slots__ = (
        "_keys",
        "_space",
        "_table",
        "callbacks",
        "deadline",
        "ended",
        "failed",
        "frames",
        "listeners",
        "lost",
        "missing",
        "owner",
        "ready",
        "released",
        "rows",
    )

    def __init__(
        self, table: LeaseTable, space: Space, keys: tuple[BlockKey, ...], owner: str, deadline: float
    ) -> None:
        self._table = table
        self._space = space
        self._keys = keys
        self.owner = owner
        self.deadline = deadline
        """On the store's monotonic clock, in seconds."""
        self.ready = 0
        self.failed: MissReason | None = None
        self.rows: list[int] = []
        """Of the blocks whose page is held or awaited; pins keep a frame's row from being given out again."""
        self.frames: list[Frame | None] = []
        self.missing: set[int] = set()
        """Indices of pages that are still on their way."""
        self.lost: dict[int, MissReason] = {}
        self.callbacks: list[Callable[[], None]] = []
        """To be called once, when it settles."""
        self.listeners: list[Callable[[], None]] = []
        """To be called whenever `ready` has grown."""
        self.ended = ""
        """Why the hold is gone; empty while it lasts."""
        self.released = False

    @property
    def layout(self) -> KVLayout:
        """See `Lease.layout`."""
        return self._space.layout

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """See `Lease.keys`."""
        return self._keys

    @property
    def is_settled(self) -> bool:
        """All pages are ready, or the next one can no longer arrive."""
        return self.failed is not None or self.ready == len(self._keys)

    def on_settled(self, callback: Callable[[], None]) -> None:
        """See `Lease.on_settled`."""
        if self._table.subscribe(self, callback):
            callback()

    def on_ready(self, callback: Callable[[], None]) -> None:
        """See `Lease.on_ready`."""
        if self._table.subscribe(self, callback, each_time=True):
            callback()

    def page(self, index: int) -> memoryview:
        """See `Lease.page`. Copies nothing."""
        space = self._space
        return self._table.arena.readable(self._frame(index).offset + space.header_bytes, space.page_bytes)

    def page_address(self, index: int) -> int:
        """Address of page `index` in this process, for native readers. Valid while the lease holds."""
        return self._table.arena.base_address + self._frame(index).offset + self._space.header_bytes

    def checksums(self, index: int) -> tuple[int, ...]:
        """See `Lease.checksums`. As the page's header states them."""
        space = self._space
        return space.sums.unpack_from(self._table.arena.memory, self._frame(index).offset + space.sums_at)

    def source(self, index: int) -> tuple[memoryview, int, tuple[int, ...]]:
        """See `Lease.source`."""
        offset, space, arena = self._frame(index).offset, self._space, self._table.arena
        sums = space.sums.unpack_from(arena.memory, offset + space.sums_at)
        start = offset + space.header_bytes
        return arena.readable(start, space.page_bytes), arena.base_address + start, sums

    def tokens(self, index: int) -> tuple[int, ...]:
        """Token ids of block `index` as its header states them."""
        space = self._space
        with self._table.arena.readable(self._frame(index).offset, space.header_bytes) as header:
            return tokens_of(header, space.layout)

    def is_current(self, index: int) -> bool:
        """See `Lease.is_current`."""
        return not (self.ended or self.released) and 0 <= index < self.ready

    def quarantine(self, index: int) -> None:
        """See `Lease.quarantine`."""
        self._table.quarantine(self._frame(index), MissReason.CORRUPT)

    def renew(self, ttl_s: float) -> None:
        """Move the deadline to `ttl_s` seconds from now. Raises LeaseError when it has passed."""
        self._table.renew(self, ttl_s)

    def release(self) -> None:
        """See `Lease.release`. The first call after expiry is quiet: the pages are back already."""
        if self.released:
            raise LeaseError(f"lease of {len(self._keys)} pages by {self.owner!r} was released twice")
        self.released = True
        self._table.release(self)

    def _frame(self, index: int) -> Frame:
        if self.ended or self.released:
            raise LeaseError(
                f"lease of {self.owner!r} is {self.ended or 'released'}: page {index} is out of reach"
            )
        if not 0 <= index < self.ready:
            raise LeaseError(
                f"page {index} is not ready ({self.ready} of {len(self._keys)} are); wait for it"
            )
        frame = self.frames[index]
        assert frame is not None
        return frame
