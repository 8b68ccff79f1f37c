"""What an engine asks of the store. Implemented by `store.store.Store`.

Threads: every method may be called from any thread and none blocks on I/O; work goes on behind and
reports through callbacks, which run on a store thread and must be short.

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
from workmem.core.outcomes import Lookup, MissReason


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
    """A page to store. `copy_into` fills a writable buffer of `page_bytes` bytes, on a store thread."""

    block: BlockId
    copy_into: Callable[[memoryview], None]
    done: Callable[[SaveState], None]


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

    def page(self, index: int) -> memoryview:
        """Read-only bytes of page `index`, in place. Raises LeaseError after release."""
        ...

    def checksums(self, index: int) -> tuple[int, ...]:
        """xxh3-64 of each slice of page `index`; compare on your own copy, then use it (R3, R6)."""
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
