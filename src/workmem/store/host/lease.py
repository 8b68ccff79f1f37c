"""A lease on pages of the server's arena, read in place through this process's mapping (R3)."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from workmem.core.errors import LeaseError
from workmem.core.keys import BlockKey
from workmem.core.layout import KVLayout
from workmem.core.outcomes import MissReason
from workmem.store.host import messages
from workmem.store.host.frame_page import is_page_of, stated_checksums
from workmem.store.host.wire import Kind
from workmem.store.outbox import run_callback

if TYPE_CHECKING:
    from workmem.store.catalog import Space
    from workmem.store.host.link import Link

_settling = threading.Lock()
"""One for all leases: it is held for some attributes, and a lease is made with every request."""


class HostLease:
    """See `store.contract.Lease`.

    It has two ends: `until`, which its owner asked for, and `deadline`, up to which the server has
    promised to keep the pages and which is moved on in the background. Past it, or once the connection is
    lost while the server lives, the frames may hold other pages, so nothing is handed out any more. When
    the server is dead its memory can change no more: what was held stays readable until `release`.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_ended",
        "_grant",
        "_header_bytes",
        "_keys",
        "_layout",
        "_link",
        "_released",
        "deadline",
        "failed",
        "id",
        "owner",
        "ready",
        "until",
    )

    def __init__(
        self, space: Space, keys: tuple[BlockKey, ...], owner: str, link: Link | None = None
    ) -> None:
        self.owner = owner
        self.ready = 0
        self.failed: MissReason | None = None
        self.deadline = -math.inf
        self.until = -math.inf
        self.id = 0
        self._layout = space.layout
        self._header_bytes = space.header_bytes
        self._keys = keys
        self._link = link
        self._grant: messages.Leased | None = None
        self._ended = ""
        self._released = False
        self._callbacks: list[Callable[[], None]] = []

    def grant(self, leased: messages.Leased, now: float, until: float) -> None:
        """Take what the server gave, asked for at `now`."""
        self._grant = leased
        self.id = leased.id
        self.ready, self.failed = leased.ready, leased.failed
        # From when it was asked for: the server counts from later on.
        self.deadline = now + leased.ttl_s
        self.until = until

    @property
    def layout(self) -> KVLayout:
        """See `Lease.layout`."""
        return self._layout

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
        with _settling:
            if not self.is_settled:
                self._callbacks.append(callback)
                return
        callback()

    def on_ready(self, callback: Callable[[], None]) -> None:
        """See `Lease.on_ready`. The host tells of the end alone."""
        self.on_settled(callback)

    def page(self, index: int) -> memoryview:
        """See `Lease.page`. Copies nothing. A copy counts if `checksums`, taken before, agree with it."""
        link, offset = self._held(index)
        return link.arena.at(offset + self._header_bytes, self._layout.page_bytes)

    def checksums(self, index: int) -> tuple[int, ...]:
        """See `Lease.checksums`. As the page's header states them; never those of a page that came after."""
        link, offset = self._held(index)
        with link.arena.at(offset, self._header_bytes) as header:
            stated = stated_checksums(header, self._layout)
        # Whoever took the frame meanwhile has changed its generation before anything else.
        self._held(index)
        return stated

    def source(self, index: int) -> tuple[memoryview, int, tuple[int, ...]]:
        """See `Lease.source`."""
        sums, page = self.checksums(index), self.page(index)
        link, offset = self._held(index)
        return page, link.arena.base_address + offset + self._header_bytes, sums

    def is_current(self, index: int) -> bool:
        """See `Lease.is_current`. Of all pages of the lease: what ends it early is that the server hangs up."""
        try:
            link, _ = self._held(index)
        except LeaseError:
            return False
        return not link.has_hung_up()

    def quarantine(self, index: int) -> None:
        """See `Lease.quarantine`. Counts only while the page is held: a stale copy proves nothing."""
        link, _ = self._held(index)
        link.tell(Kind.QUARANTINE, messages.pack_quarantine(self.id, index))

    def release(self) -> None:
        """See `Lease.release`. The first call after expiry is quiet: the pages are back already."""
        if self._released:
            raise LeaseError(f"lease of {len(self._keys)} pages by {self.owner!r} was released twice")
        self._released = True
        link = self._link
        if link is not None and link.leases.take(self.id) is not None:
            link.tell(Kind.RELEASE, messages.pack_ids([self.id]))

    def renewed(self, now: float, ttl_s: float) -> None:
        """Keeper: the server, asked at `now`, holds the pages for `ttl_s` more."""
        self.deadline = now + ttl_s

    def settle(self, ready: int, failed: MissReason | None) -> None:
        """Keeper: so many pages have arrived, or the next one cannot. Calls back when that settles it."""
        with _settling:
            if self.is_settled:
                return
            self.ready, self.failed = max(self.ready, ready), failed
            if not self.is_settled:
                return
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            run_callback(callback)

    def end(self, how: str, reason: MissReason) -> None:
        """Keeper: the hold is gone; what has not arrived never will."""
        self._ended = how
        self.settle(self.ready, reason)

    def _held(self, index: int) -> tuple[Link, int]:
        """The link and where the frame of page `index` starts, if it may be read now. Raises LeaseError."""
        why = self._why_out_of_reach()
        if why:
            raise LeaseError(f"lease of {self.owner!r} is {why}: page {index} is out of reach")
        if not 0 <= index < self.ready:
            raise LeaseError(
                f"page {index} is not ready ({self.ready} of {len(self._keys)} are); wait for it"
            )
        link, grant = self._link, self._grant
        assert link is not None
        assert grant is not None
        offset = grant.numbers[index]
        with link.arena.at(offset, self._header_bytes) as header:
            if not is_page_of(header, self._keys[index], grant.numbers[grant.pages + index]):
                raise LeaseError(f"lease of {self.owner!r} is stale: page {index} is of another block by now")
        return link, offset

    def _why_out_of_reach(self) -> str:
        if self._released:
            return "released"
        if self._ended or self._link is None:
            return self._ended
        lost_at = self._link.lost_at
        if lost_at is None:
            return "" if time.monotonic() < self.deadline else "expired"
        if lost_at < self.deadline and self._link.server_is_dead():
            return ""
        return "revoked: the connection to the store was lost"


class HeldLeases:
    """Leases by id, for as long as somebody else refers to them: one that nobody does is not renewed and ends.

    A dict of weak references, for its price: what the library's own does with each costs as much as a reply.
    """

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[HostLease]] = {}

    def add(self, lease: HostLease) -> None:
        """File a lease under its id."""
        self._refs[lease.id] = weakref.ref(lease)

    def get(self, number: int) -> HostLease | None:
        """The lease, unless it was taken or nobody refers to it any more."""
        ref = self._refs.get(number)
        return None if ref is None else ref()

    def take(self, number: int) -> HostLease | None:
        """The same, and forget it."""
        ref = self._refs.pop(number, None)
        return None if ref is None else ref()

    def live(self) -> list[HostLease]:
        """All of them. What is no longer referred to is forgotten here; the keeper calls it with each renewal."""
        found: list[HostLease] = []
        for number, ref in list(self._refs.items()):
            lease = ref()
            if lease is None:
                self._refs.pop(number, None)
            else:
                found.append(lease)
        return found
