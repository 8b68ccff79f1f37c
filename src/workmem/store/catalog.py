"""The index: every block that a tier holds is a row, and what is known of it lies in columns.

A row costs some 240 bytes, key, links of the eviction orders and index entry included: millions of
blocks on disk must not fill the memory that is there to hold pages. Rows are given out again after a
block has left; a `stamp` tells its uses apart.

No lock here: what changes the catalog holds the pool's (R1). Reading one field needs none.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workmem.core.errors import InvariantError
from workmem.core.keys import KEY_BYTES, BlockKey
from workmem.core.layout import KVLayout, Namespace
from workmem.core.outcomes import MissReason
from workmem.store.arena import align
from workmem.store.contract import BlockId
from workmem.store.copying import PageCopy
from workmem.store.frames import Frame
from workmem.store.tiers.page_header import header_bytes, header_form, slice_sums

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workmem.store.lease import PageLease
    from workmem.store.tiers.segments import Extent

GHOSTS_MAX = 1 << 17
"""Keys remembered per namespace after they left, to tell "evicted" from "never seen"."""
WORKFLOWS_MAX = 65_535
"""That can be told apart: what fits into a column."""
QUOTA_WORKFLOWS = 4_096
"""Of them, kept for those that get a quota: clients may well name a new workflow with every request."""
NO_SEGMENT = 0
"""In `Catalog.segment`: the block has no page on ssd. Segment numbers begin at 1."""
IS_BACK = 2
"""In `Catalog.is_unwritten`, instead of 1: every tier had evicted the block before."""
IS_COUNTED = 4
"""In `Catalog.is_unwritten`, beside these: the ghosts of the tier below have heard of it. A write may be tried again."""
NO_PARENT, UNKNOWN_PARENT = -1, -2
"""In place of a parent's row."""
_NO_KEY = BlockKey(b"")
"""Of a row that is free."""


class Space:
    """The blocks of one namespace: key to row."""

    __slots__ = (
        "copy",
        "filling",
        "form",
        "frame_bytes",
        "ghosts",
        "header_bytes",
        "is_forgotten",
        "is_purged",
        "layout",
        "namespace",
        "number",
        "page_bytes",
        "root",
        "rows",
        "spans",
        "sums",
        "sums_at",
    )

    def __init__(self, namespace: Namespace, number: int) -> None:
        self.namespace = namespace
        self.number = number
        """Short name inside one store, used in the journal."""
        self.root = namespace.root()
        self.layout: KVLayout = namespace.layout
        self.header_bytes = header_bytes(self.layout)
        self.page_bytes = self.layout.page_bytes
        self.frame_bytes = self.header_bytes + align(self.page_bytes)
        """A frame holds a page as it lies on disk: header, then payload."""
        self.copy = PageCopy(self.layout)
        self.form = header_form(self.layout)
        self.sums, self.sums_at = slice_sums(self.layout)
        self.spans = [self.layout.slice_span(index) for index in range(self.layout.slice_count)]
        self.rows: dict[bytes, int] = {}
        self.filling: dict[BlockKey, int] = {}
        """Keys whose first copy is being written into a frame, and the number of the workflow it is for."""
        self.ghosts: OrderedDict[BlockKey, MissReason] = OrderedDict()
        """Not a dict: that looks for its first entry past all that have been deleted before it."""
        self.is_purged = False
        self.is_forgotten = False
        """Nobody purged it: it held nothing, and is registered anew by whoever comes with a page."""
        """Its blocks are gone for good and nothing is taken in any more (R9)."""

    def check(self, block: BlockId) -> None:
        """Raises InvariantError on a block that does not fit the namespace."""
        if len(block.key) != KEY_BYTES or len(block.parent) != KEY_BYTES:
            raise InvariantError(f"block key and parent are {KEY_BYTES} bytes each")
        if len(block.tokens) != self.layout.block_tokens:
            raise InvariantError(
                f"a block has {self.layout.block_tokens} tokens here, not {len(block.tokens)}"
            )

    def remember(self, key: BlockKey, reason: MissReason) -> None:
        """Note why `key` is gone; the oldest note makes room."""
        ghosts = self.ghosts
        ghosts.pop(key, None)
        if len(ghosts) >= GHOSTS_MAX:
            ghosts.popitem(last=False)
        ghosts[key] = reason


class Promotion:
    """A page on its way from ssd to dram, shared by every lease that waits for it."""

    __slots__ = ("extent", "frame", "key", "row", "space", "stamp", "waiters")

    def __init__(self, catalog: Catalog, row: int, frame: Frame, extent: Extent) -> None:
        self.row = row
        self.stamp = catalog.stamp[row]
        self.space = catalog.space[row]
        self.key = catalog.key[row]
        self.frame = frame
        self.extent = extent
        self.waiters: list[tuple[PageLease, int]] = []


class Catalog:
    """All rows of a store. `space[row]` and so on are the columns."""

    def __init__(self) -> None:
        self.space: list[Space] = []
        self.key: list[BlockKey] = []
        self.parent: list[bytes] = []
        """Key of the block before, or the namespace's root; the same object as that block's own key."""
        self.depth = array("I")
        self.workflow = array("H")
        """For which workflow of its tenant a block was saved, as `workflow_number` counts them."""
        self._workflows = [""]
        self._workflow_numbers = {"": 0}
        self.stamp = array("I")
        """Grows when a row is given up: who remembers a row remembers its stamp."""
        self.frame: list[Frame | None] = []
        """Set exactly while a RESIDENT page is in dram (R2)."""
        self.segment = array("I")
        """Set, with the three below, exactly while a journaled page is on ssd (R2)."""
        self.offset = array("I")
        """In units of 4096 bytes, as `length`."""
        self.length = array("I")
        self.header_sum = array("Q")
        self.is_unwritten = bytearray()
        """In dram and on its way to ssd: evicting it now would lose it."""
        self.promotion: dict[int, Promotion] = {}
        self._free = array("I")

    def __len__(self) -> int:
        return len(self.key) - len(self._free)

    def workflow_number(self, name: str, *, has_quota: bool = False) -> int:
        """A number for a workflow; 0, that of none, once there are more than a column can tell apart."""
        number = self._workflow_numbers.get(name)
        if number is None:
            if len(self._workflows) > WORKFLOWS_MAX - (0 if has_quota else QUOTA_WORKFLOWS):
                return 0
            number = self._workflow_numbers[name] = len(self._workflows)
            self._workflows.append(name)
        return number

    def workflow_name(self, number: int) -> str:
        """The workflow with a number."""
        return self._workflows[number]

    def workflow_of(self, row: int) -> str:
        """Name of the workflow that a block was saved for; empty where nobody said, and after a restart."""
        return self._workflows[self.workflow[row]]

    def add(self, space: Space, key: BlockKey, parent: bytes, depth: int, workflow: int = 0) -> int:
        """A row for a block, filed under its key."""
        parent_row = space.rows.get(parent)
        if parent_row is not None:
            parent = self.key[parent_row]
        if self._free:
            row = self._free.pop()
            self.space[row] = space
            self.key[row] = key
            self.parent[row] = parent
            self.depth[row] = depth
            self.workflow[row] = workflow
        else:
            row = len(self.key)
            self.space.append(space)
            self.key.append(key)
            self.parent.append(parent)
            self.depth.append(depth)
            self.workflow.append(workflow)
            self.stamp.append(0)
            self.frame.append(None)
            self.segment.append(NO_SEGMENT)
            self.offset.append(0)
            self.length.append(0)
            self.header_sum.append(0)
            self.is_unwritten.append(0)
        space.rows[key] = row
        return row

    def extend(self, space: Space, puts: NDArray[np.void]) -> array[int]:
        """Rows for many blocks of one namespace that are on ssd: `puts` of the journal, not empty.

        A block that had a row already is filed under its new one; `strays` finds the old. Returns the rows
        of their parents, or NO_PARENT, or UNKNOWN_PARENT where it is not here (yet).
        """
        keys: list[BlockKey] = puts["key"].tolist()
        first, count = len(self.key), len(keys)
        rows = range(first, first + count)
        space.rows.update(zip(keys, rows, strict=True))
        self.key += keys
        # Sharing the parent's object saves 80 bytes a block; mostly it is the block before.
        find, known = space.rows.get, self.key
        shared: list[bytes] = [b"", *keys[:-1]]
        words = (puts[name].reshape(-1, 1).view(np.uint64) for name in ("key", "parent"))
        key_words, parent_words = words
        differs = parent_words[1:] != key_words[:-1]
        others = np.flatnonzero(differs[:, 0] | differs[:, 1] | differs[:, 2] | differs[:, 3]) + 1
        parent_rows = np.arange(first - 1, first + count - 1, dtype=np.int32)
        begins = np.concatenate(([0], others))
        for index, parent in zip(begins.tolist(), puts["parent"][begins].tolist(), strict=True):
            row = find(parent)
            shared[index] = parent if row is None else known[row]
            nobody = NO_PARENT if parent == space.root else UNKNOWN_PARENT
            parent_rows[index] = nobody if row is None else row
        self.parent += shared
        self.space += [space] * count
        self.frame += [None] * count
        self.depth.frombytes(_column(puts["depth"], np.uint32))
        self.segment.frombytes(_column(puts["segment"], np.uint32))
        self.offset.frombytes(_column(puts["offset"], np.uint32))
        self.length.frombytes(_column(puts["length"], np.uint32))
        self.header_sum.frombytes(_column(puts["header_sum"], np.uint64))
        self.stamp.frombytes(bytes(4 * count))
        self.workflow.frombytes(bytes(2 * count))
        self.is_unwritten.extend(bytes(count))
        return array("i", parent_rows.tobytes())

    def strays(self) -> list[int]:
        """Rows that are not filed under their key: their block was put in anew."""
        return [
            row
            for row, (space, key) in enumerate(zip(self.space, self.key, strict=True))
            if key and space.rows.get(key) != row
        ]

    def drop(self, row: int) -> None:
        """Give a row up. No tier holds its block any more and no promotion is under way."""
        rows, key = self.space[row].rows, self.key[row]
        if rows.get(key) == row:
            del rows[key]
        self.key[row] = _NO_KEY
        self.parent[row] = _NO_KEY
        self.stamp[row] = (self.stamp[row] + 1) & 0xFFFFFFFF
        self.is_unwritten[row] = 0
        self._free.append(row)

    def is_same(self, row: int, stamp: int) -> bool:
        """Whether `row` is still the block it was when it had `stamp`."""
        return self.stamp[row] == stamp

    def parent_row(self, row: int) -> int:
        """Row of the block before, or -1.

        One that is not less deep is none: of blocks that name each other no order could let any go (E1).
        """
        found = self.space[row].rows.get(self.parent[row])
        return found if found is not None and self.depth[found] < self.depth[row] else NO_PARENT

    def is_gone(self, row: int) -> bool:
        """No tier holds the block and none is about to."""
        return self.frame[row] is None and self.segment[row] == NO_SEGMENT and row not in self.promotion

    def on_segment(self, number: int) -> Sequence[int]:
        """Rows whose page lies in segment `number`, in no order."""
        column = np.frombuffer(self.segment, dtype=np.uint32)
        return np.flatnonzero(column == number).tolist()


def _column(values: NDArray[np.generic], dtype: type[np.generic]) -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()
