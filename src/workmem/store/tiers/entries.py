"""What the ssd tier says in its journal about namespaces and places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from workmem.store.arena import ALIGNMENT_BYTES
from workmem.store.catalog import NO_SEGMENT, Catalog, Space
from workmem.store.tiers.journal import REWRITE_RECORDS
from workmem.store.tiers.journal_records import PUTS, DropEntry, Entry, NamespaceEntry, PutEntry
from workmem.store.tiers.segments import SEGMENT_HEADER_BYTES, Extent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workmem.store.tiers.journal_records import Record


NOBODY = 0
"""Number that no namespace has. It is dropped and then put under: its pages are to leave the disk."""


def put_entry(space: Space, key: bytes, parent: bytes, depth: int, extent: Extent) -> PutEntry:
    """The journal's word for a page at a place."""
    assert extent.offset >= SEGMENT_HEADER_BYTES
    assert extent.offset % ALIGNMENT_BYTES == 0
    return PutEntry(
        space.number,
        key,
        parent,
        depth,
        extent.segment.number,
        extent.offset,
        extent.length,
        extent.header_sum,
    )


def namespace_entry(space: Space) -> NamespaceEntry:
    """The journal's word for a namespace."""
    return NamespaceEntry(space.number, space.root, msgspec.json.encode(space.namespace))


def erase_entries(segments: Sequence[int]) -> list[Entry]:
    """The journal's word for segments that hold pages of a namespace it does not name any more."""
    if not segments:
        return []
    place, none = SEGMENT_HEADER_BYTES, bytes(32)
    return [
        DropEntry(NOBODY),
        *(PutEntry(NOBODY, none, none, 0, number, place, ALIGNMENT_BYTES, 0) for number in segments),
    ]


def snapshot(catalog: Catalog, spaces: Sequence[Space]) -> list[Record]:
    """Everything a fresh journal must say, and no name of a namespace without pages (R9).

    The lock is held by the caller.
    """
    puts = {space: found for space in spaces if len(found := _puts_of(catalog, space))}
    entries: list[Record] = [namespace_entry(space) for space in puts]
    for mine in puts.values():
        entries += [mine[at : at + REWRITE_RECORDS] for at in range(0, len(mine), REWRITE_RECORDS)]
    return entries


def _puts_of(catalog: Catalog, space: Space) -> NDArray[np.void]:
    segment = catalog.segment
    rows = [row for row in space.rows.values() if segment[row] != NO_SEGMENT]
    puts = np.zeros(len(rows), PUTS)
    puts["kind"] = 2
    puts["number"] = space.number
    puts["key"] = np.frombuffer(b"".join(map(catalog.key.__getitem__, rows)), "V32")
    puts["parent"] = np.frombuffer(b"".join(map(catalog.parent.__getitem__, rows)), "V32")
    for name, column in (
        ("depth", catalog.depth),
        ("segment", segment),
        ("offset", catalog.offset),
        ("length", catalog.length),
        ("header_sum", catalog.header_sum),
    ):
        puts[name] = np.frombuffer(column, dtype=f"u{column.itemsize}")[rows]
    return puts
