"""The header in front of every page on ssd: what the bytes behind it claim to be.

Byte table in docs/internals/journal-format.md.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

import msgspec
import xxhash

from workmem.core.errors import IntegrityError
from workmem.core.keys import BlockKey
from workmem.core.layout import KVLayout
from workmem.store.arena import align

MAGIC = b"WMPAGE\x00\x01"
_SUM = struct.Struct("<Q")
_FIXED = struct.Struct("<8sQ32s32s32s32sQIIII")
"""magic, header checksum, root, key, parent, layout digest, page bytes, depth, tokens, slices, header bytes."""
_SUMMED_FROM = 16


class PageHeader(msgspec.Struct, frozen=True):
    """What a page says about itself."""

    root: bytes
    key: BlockKey
    parent: bytes
    depth: int
    tokens: tuple[int, ...]
    checksums: tuple[int, ...]


@lru_cache(maxsize=64)
def layout_digest(layout: KVLayout) -> bytes:
    """32 bytes that differ wherever two layouts do."""
    return hashlib.sha256(msgspec.json.encode(layout, order="sorted")).digest()


@lru_cache(maxsize=64)
def header_bytes(layout: KVLayout) -> int:
    """Bytes a header takes on disk, aligned like the payload behind it."""
    return align(_FIXED.size + 4 * layout.block_tokens + 8 * layout.slice_count)


def pack(header: PageHeader, layout: KVLayout, into: memoryview) -> int:
    """Write `header` into `header_bytes(layout)` bytes. Returns its checksum."""
    size = header_bytes(layout)
    tokens, checksums = header.tokens, header.checksums
    body = _FIXED.pack(
        MAGIC,
        0,
        header.root,
        header.key,
        header.parent,
        layout_digest(layout),
        layout.page_bytes,
        header.depth,
        len(tokens),
        len(checksums),
        size,
    )
    body += struct.pack(f"<{len(tokens)}I{len(checksums)}Q", *tokens, *checksums)
    into[: len(body)] = body
    into[len(body) : size] = bytes(size - len(body))
    checksum = xxhash.xxh3_64_intdigest(into[_SUMMED_FROM:size])
    _SUM.pack_into(into, 8, checksum)
    return checksum


def unpack(raw: memoryview, layout: KVLayout) -> tuple[PageHeader, int]:
    """The header in `raw`, and its checksum. Raises IntegrityError on anything but what `pack` wrote."""
    size = header_bytes(layout)
    magic, stated, root, key, parent, digest, page_bytes, depth, tokens, slices, stated_size = (
        _FIXED.unpack_from(raw)
    )
    if magic != MAGIC:
        raise IntegrityError(f"page header starts with {magic!r}, not {MAGIC!r}")
    if xxhash.xxh3_64_intdigest(raw[_SUMMED_FROM:size]) != stated:
        raise IntegrityError("page header does not match its own checksum")
    if digest != layout_digest(layout) or page_bytes != layout.page_bytes or stated_size != size:
        raise IntegrityError("page header is of another layout")
    if tokens != layout.block_tokens or slices != layout.slice_count:
        raise IntegrityError(f"page header counts {tokens} tokens and {slices} slices")
    values = struct.unpack_from(f"<{tokens}I{slices}Q", raw, _FIXED.size)
    header = PageHeader(root, BlockKey(key), parent, depth, values[:tokens], values[tokens:])
    return header, stated
