"""What every codec but raw stores: a checksum, then its parts. Nothing is decoded before the checksum holds."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from workmem.core.errors import IntegrityError

_SUM = struct.Struct("<Q")
SUM_BYTES = _SUM.size
_SEED = struct.Struct("<Q")


def pack(parts: Sequence[bytes | memoryview], *, key: bytes) -> bytes:
    """`parts` in a row behind their checksum, which also depends on the block's `key`."""
    hasher = xxhash.xxh3_64(seed=_seed(key))
    for part in parts:
        hasher.update(part)
    return b"".join((_SUM.pack(hasher.intdigest()), *parts))


def unpack(stored: memoryview, *, key: bytes, codec: str) -> memoryview:
    """The bytes behind the checksum. Raises IntegrityError unless `pack` made them for this `key`."""
    if len(stored) < SUM_BYTES:
        raise IntegrityError(f"page stored by {codec!r} has {len(stored)} bytes, less than its checksum")
    (stated,) = _SUM.unpack_from(stored)
    inner = stored[SUM_BYTES:]
    if xxhash.xxh3_64_intdigest(inner, seed=_seed(key)) != stated:
        raise IntegrityError(f"page stored by {codec!r} does not match its checksum")
    return inner


def _seed(key: bytes) -> int:
    return _SEED.unpack_from(key)[0]
