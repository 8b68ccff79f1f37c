"""What an engine asks of the store.

Implemented by `store.store.Store` and, over the store that a host's processes share, by `store.host.client.HostStore`.

Threads: every method may be called from any thread and none but `purge`, `flush` and `close` waits for a disk (over the
host's store lookups and leases take a round trip to its server); work goes on behind and reports through callbacks,
which run on a store thread and must be short.

Ownership (rule R3): a page is read only through a `Lease`, which holds it in dram until `release`,
called exactly once. What a caller writes goes through `save`, which copies and then lets go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from workmem.core.keys import BlockKey
from workmem.core.layout import KVLayout, Namespace
from workmem.core.outcomes import Lookup, MissReason, TierName
from workmem.policy.order import Prospect
from workmem.store.selector import Purged, PurgeSelector


class BlockId(msgspec.Struct, frozen=True):
    """Identity of a block, written into its page header and compared on the way back in."""

    key: BlockKey
    parent: bytes
    """Key of the block before, or the namespace root."""
    tokens: tuple[int, ...]
    depth: int
    """Number of blocks before it."""


class SaveState(StrEnum):
    """How a save ended for the caller: in each case the source may now be reused."""

    STORED = "stored"
    ALREADY_THERE = "already_there"
    DROPPED = "dropped"
    """No room or queue full; counted and named by an event (rule R10)."""


class PageWrite(msgspec.Struct, frozen=True):
    """A page to store. `copy_into` fills a writable buffer of `page_bytes` bytes, on a store thread.

    It returns the xxh3-64 of each slice of what it wrote where it took them on the way (`PageCopy.writing`); else
    None, and the store reads the page once more for them.
    """

    block: BlockId
    copy_into: Callable[[memoryview], tuple[int, ...] | None]
    done: Callable[[SaveState], None]
    workflow: str = ""
    """For which workflow of the tenant it is saved, where that counts for a quota."""


class PinResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a pin. It never fails for want of room."""

    blocks: int
    """Of the keys, how many a tier holds now; the others are pinned when they come."""
    demoted: tuple[str, ...] = ()
    """Names of the owner's pins that ended because its budget was exceeded, the oldest first. The new one's own name
    is among them where it is larger than the budget alone, or the owner is one too many."""


class Lease(Protocol):
    """A prefix of blocks held in dram. Pages are readable from the moment they are `ready`."""

    @property
    def layout(self) -> KVLayout:
        """Layout of every page."""
        ...

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """Keys asked for, in prefix order."""
        ...

    @property
    def ready(self) -> int:
        """How many leading pages are in dram now."""
        ...

    @property
    def failed(self) -> MissReason | None:
        """Set when page number `ready` can no longer arrive; pages before it stay valid."""
        ...

    def on_settled(self, callback: Callable[[], None]) -> None:
        """Call back once, when all pages are ready or one has failed (at once if so already)."""
        ...

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call back whenever `ready` has grown and a last time when settled (at once if so already).

        Where progress is not known in between, the last time is the only one.
        """
        ...

    def page(self, index: int) -> memoryview:
        """Read-only bytes of page `index`, in place. Raises LeaseError after release."""
        ...

    def checksums(self, index: int) -> tuple[int, ...]:
        """xxh3-64 of each slice of page `index`; compare on your own copy, then use it (R3, R6)."""
        ...

    def source(self, index: int) -> tuple[memoryview, int, tuple[int, ...]]:
        """As `page` and `checksums` at once, with the address of the page in this process, for who copies it.

        The address is good for as long as the view is kept.
        """
        ...

    def is_current(self, index: int) -> bool:
        """Whether page `index` is held, and the hold has lasted: to be asked after a read in place (R3)."""
        ...

    def quarantine(self, index: int) -> None:
        """The caller found page `index` corrupt: every copy of it leaves service."""
        ...

    def release(self) -> None:
        """Give all pages back. Raises LeaseError the second time."""
        ...


class KVStore(Protocol):
    """The tiers below vram as one."""

    def register(self, namespace: Namespace) -> bytes:
        """Declare a namespace and get its root. Blocks are saved and looked up under a root."""
        ...

    def lookup(self, root: bytes, keys: Sequence[BlockKey]) -> Lookup:
        """Longest resident prefix of `keys`, by index only: no I/O, no side effect on recency."""
        ...

    def lease(self, root: bytes, keys: Sequence[BlockKey], *, owner: str, ttl_s: float) -> Lease:
        """Hold the resident prefix of `keys`; pages on ssd start their way to dram at once.

        Raises CapacityError when the pages cannot all be held in dram at the same time.
        """
        ...

    def save(self, root: bytes, pages: Sequence[PageWrite]) -> None:
        """Queue pages for dram (and, behind that, ssd). Parents come before their children."""
        ...

    def purge(self, chosen: PurgeSelector) -> Purged:
        """Take the namespaces that `chosen` fits out of every tier. None of their blocks is a hit from then on (R9).

        Blocks for as long as that takes.
        """
        ...

    def dram_capacity_bytes(self) -> int:
        """Bytes of dram that a single lease could hold if nothing else were held."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until all saves are in their last tier. False on timeout."""
        ...

    def gauges(self) -> dict[str, float]:
        """Current readings by metric name without prefix."""
        ...

    def close(self) -> None:
        """Flush within a bound, sync, stop threads, release memory. Idempotent."""
        ...


class Steering(Protocol):
    """What a caller may say about blocks it cares for.

    Advice: it may cost others time, never an answer. Nothing here makes a save or a lease fail but a quota.
    """

    def pin(self, root: bytes, keys: Sequence[BlockKey], *, owner: str, name: str, ttl_s: float) -> PinResult:
        """Keep blocks for `ttl_s` seconds: in every tier they leave after all that is not pinned.

        A pin of the same owner and name is replaced and renewed. The pins of an owner may name bytes up to
        `store.pins.budget`; past it its oldest are demoted. Raises InvariantError for an unknown root, ClientError
        where `ttl_s` is not above 0.
        """
        ...

    def unpin(self, owner: str, name: str) -> bool:
        """End a pin. False when there is none."""
        ...

    def announce(self, root: bytes, keys: Sequence[BlockKey], prospect: Prospect) -> int:
        """Say what is known of the next use of blocks: EXPECTED until it comes, DONE when there will be none.

        Returns how many of the keys a tier holds; the others are not remembered, and what is pinned stays so. Where
        one that is EXPECTED is nowhere, what other stores put into a tier they share is heard of sooner for a while.
        Raises ClientError for another prospect.
        """
        ...

    def bind(self, root: bytes, keys: Sequence[BlockKey], group: str) -> int:
        """Let blocks live and die together.

        In each tier a use of one is a use of all, and when one is evicted the rest follows as soon as nobody holds it.
        `group` is told apart by tenant and may span namespaces (ranks, adapters). A block is in one group at most
        and stays where it is. Returns how many of the keys are in the group now; those that no tier holds are not.
        Raises ClientError where the group would be too large.
        """
        ...

    def set_quota(
        self, group: str, tier: TierName, *, floor_bytes: int = 0, ceiling_bytes: int | None = None
    ) -> None:
        """What a tenant, or a "tenant/workflow", may count on in a tier, and what it may not exceed.

        A floor of 0 without a ceiling ends the quota. What is over a new ceiling leaves at once, but for what is
        held. Raises ClientError where the tier cannot keep it.
        """
        ...


class SteeredStore(KVStore, Steering, Protocol):
    """A store that takes advice."""
