"""Records of the journal: what each says, and how it lies in a batch.

Byte by byte in docs/internals/journal-format.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from workmem.core.errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAMESPACE = struct.Struct("<BxHI32s")
"""kind, JSON bytes, number, root; the JSON follows."""
_PUT = struct.Struct("<BxHI32s32sIIIIQ")
"""kind, unused, namespace number, key, parent, depth, segment, offset and length in 4 KiB, header checksum."""
_DELETE = struct.Struct("<BxHI32s")
"""kind, unused, namespace number, key."""
_DROP = struct.Struct("<BxHI")
"""kind, unused, namespace number."""
PUTS = np.dtype(
    [
        ("kind", "u1"),
        ("zero", "u1"),
        ("unused", "<u2"),
        ("number", "<u4"),
        ("key", "V32"),
        ("parent", "V32"),
        ("depth", "<u4"),
        ("segment", "<u4"),
        ("offset", "<u4"),
        ("length", "<u4"),
        ("header_sum", "<u8"),
    ]
)
"""Put records side by side, as they lie in a batch: a million of them are read and written at once."""


class NamespaceEntry(msgspec.Struct, frozen=True, gc=False):
    """A namespace got a number."""

    number: int
    root: bytes
    json: bytes


class PutEntry(msgspec.Struct, frozen=True, gc=False):
    """A page became durable, or moved."""

    number: int
    key: bytes
    parent: bytes
    depth: int
    segment: int
    offset: int
    """Bytes; a multiple of 4096, as `length`."""
    length: int
    header_sum: int


class DeleteEntry(msgspec.Struct, frozen=True, gc=False):
    """A page left the tier."""

    number: int
    key: bytes


class DropEntry(msgspec.Struct, frozen=True, gc=False):
    """A namespace was purged: all that was said under its number is void, and the number is not used again."""

    number: int


Entry = NamespaceEntry | PutEntry | DeleteEntry | DropEntry
if TYPE_CHECKING:
    Record = Entry | NDArray[np.void]
    """One record, or puts side by side."""


def encode(entry: Record) -> bytes:
    """One record, or puts side by side."""
    if isinstance(entry, np.ndarray):
        return entry.tobytes()
    if isinstance(entry, PutEntry):
        return _PUT.pack(
            2,
            0,
            entry.number,
            entry.key,
            entry.parent,
            entry.depth,
            entry.segment,
            entry.offset >> 12,
            entry.length >> 12,
            entry.header_sum,
        )
    if isinstance(entry, DeleteEntry):
        return _DELETE.pack(3, 0, entry.number, entry.key)
    if isinstance(entry, DropEntry):
        return _DROP.pack(4, 0, entry.number)
    return _NAMESPACE.pack(1, len(entry.json), entry.number, entry.root) + entry.json


def decode(payload: bytes | memoryview) -> Iterator[Record]:
    """The records of a batch, puts side by side as arrays of PUTS. Raises IntegrityError on an unknown kind."""
    at = 0
    while at < len(payload):
        kind = payload[at]
        if kind == 2:
            puts = np.frombuffer(payload, PUTS, (len(payload) - at) // PUTS.itemsize, at)
            others = np.flatnonzero(puts["kind"] != 2)
            # In a batch puts come last; a record behind them is met at its own kind.
            count = int(others[0]) if len(others) else len(puts)
            if not count:
                raise IntegrityError("a whole batch holds half a record")
            yield puts[:count]
            at += count * PUTS.itemsize
        elif kind == 3:
            _, _, number, key = _DELETE.unpack_from(payload, at)
            yield DeleteEntry(number, key)
            at += _DELETE.size
        elif kind == 4:
            _, _, number = _DROP.unpack_from(payload, at)
            yield DropEntry(number)
            at += _DROP.size
        elif kind == 1:
            _, size, number, root = _NAMESPACE.unpack_from(payload, at)
            at += _NAMESPACE.size
            yield NamespaceEntry(number, root, bytes(payload[at : at + size]))
            at += size
        else:
            raise IntegrityError(f"journal record of unknown kind {kind}")


def count_records(entries: Sequence[Record]) -> int:
    """Records in `entries`, each of those side by side counted."""
    return sum(len(entry) if isinstance(entry, np.ndarray) else 1 for entry in entries)
