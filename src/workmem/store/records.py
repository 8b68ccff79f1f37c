"""The index: one `Record` per block that any tier holds, in one `Space` per namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workmem.core.keys import BlockKey
from workmem.core.layout import KVLayout, Namespace
from workmem.core.outcomes import MissReason
from workmem.store.arena import align
from workmem.store.frames import Frame

if TYPE_CHECKING:
    from workmem.policy.eviction import Node
    from workmem.store.lease import PageLease
    from workmem.store.tiers.segments import Extent

GHOSTS_MAX = 1 << 17
"""Keys remembered per namespace after they left, to tell "evicted" from "never seen"."""


class Record:
    """A block and where its pages are. Fields change only under the pool's lock (R1)."""

    __slots__ = (
        "checksums",
        "depth",
        "dram_node",
        "extent",
        "frame",
        "key",
        "parent",
        "promotion",
        "space",
        "ssd_node",
        "tokens",
        "unwritten",
    )

    def __init__(self, space: Space, key: BlockKey, parent: bytes, depth: int) -> None:
        self.space = space
        self.key = key
        self.parent = parent
        self.depth = depth
        self.tokens: tuple[int, ...] | None = None
        """Known while the block is in dram."""
        self.checksums: tuple[int, ...] = ()
        """Of the page in dram, one per slice."""
        self.frame: Frame[Record] | None = None
        """Set exactly while a RESIDENT page is in dram (R2)."""
        self.extent: Extent | None = None
        """Set exactly while a journaled page is on ssd (R2)."""
        self.promotion: Promotion | None = None
        self.unwritten = False
        """In dram and on its way to ssd: evicting it now would lose it."""
        self.dram_node: Node[Record] | None = None
        self.ssd_node: Node[Record] | None = None


class Promotion:
    """A page on its way from ssd to dram, shared by every lease that waits for it."""

    __slots__ = ("extent", "frame", "record", "waiters")

    def __init__(self, record: Record, frame: Frame[Record], extent: Extent) -> None:
        self.record = record
        self.frame = frame
        self.extent = extent
        self.waiters: list[tuple[PageLease, int]] = []


class Space:
    """The blocks of one namespace."""

    __slots__ = (
        "filling",
        "frame_bytes",
        "ghosts",
        "layout",
        "namespace",
        "number",
        "records",
        "root",
        "spans",
    )

    def __init__(self, namespace: Namespace, number: int) -> None:
        self.namespace = namespace
        self.number = number
        """Short name inside one store, used in the journal."""
        self.root = namespace.root()
        self.layout: KVLayout = namespace.layout
        self.frame_bytes = align(self.layout.page_bytes)
        self.spans = [self.layout.slice_span(index) for index in range(self.layout.slice_count)]
        self.records: dict[BlockKey, Record] = {}
        self.filling: set[BlockKey] = set()
        """Keys whose first copy is being written into a frame."""
        self.ghosts: dict[BlockKey, MissReason] = {}

    def remember(self, key: BlockKey, reason: MissReason) -> None:
        """Note why `key` is gone; the oldest note makes room."""
        ghosts = self.ghosts
        ghosts.pop(key, None)
        if len(ghosts) >= GHOSTS_MAX:
            del ghosts[next(iter(ghosts))]
        ghosts[key] = reason
