"""The header of a sealed page on disk: what it takes to open the page, and nothing else in the clear.

Byte table in docs/internals/journal-format.md. The header that lies in dram, tokens and checksums and all, is its
sealed part.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from workmem.core.errors import IntegrityError
from workmem.core.layout import KVLayout
from workmem.store.arena import align
from workmem.store.codecs.sealing import TAG_BYTES, Seal
from workmem.store.tiers.page_header import facts_bytes

MAGIC = b"WMSEAL\x00\x02"
_CLEAR = struct.Struct("<8sQ8s24s16sQII")
"""magic, checksum, key id, nonce, tag of the payload, stored bytes, codec, bytes of the secret part."""
_SUMMED_FROM = 16


class SealedHeader(msgspec.Struct, frozen=True):
    """What can be read without the key."""

    seal: Seal
    stored_bytes: int
    codec: int


def sealed_header_bytes(layout: KVLayout) -> int:
    """Bytes of a sealed header on disk, aligned like the payload behind it."""
    return align(_CLEAR.size + facts_bytes(layout) + TAG_BYTES)


def pack(header: SealedHeader, layout: KVLayout, into: memoryview) -> int:
    """Write `header` into `sealed_header_bytes(layout)` bytes. Returns its checksum."""
    seal, end = header.seal, sealed_header_bytes(layout)
    raw = _CLEAR.pack(
        MAGIC, 0, seal.key_id, seal.nonce, seal.tag, header.stored_bytes, header.codec, len(seal.secret)
    )
    raw += seal.secret
    into[:end] = raw.ljust(end, b"\0")
    checksum = xxhash.xxh3_64_intdigest(into[_SUMMED_FROM:end])
    struct.pack_into("<Q", into, 8, checksum)
    return checksum


def unpack(raw: memoryview, layout: KVLayout) -> tuple[SealedHeader, int]:
    """The header in `raw`, and its checksum. Raises IntegrityError on anything but what `pack` wrote."""
    end = sealed_header_bytes(layout)
    if len(raw) < end:
        raise IntegrityError(f"sealed page of {len(raw)} bytes, less than its header")
    magic, stated, key_id, nonce, tag, stored, codec, secret = _CLEAR.unpack_from(raw)
    if magic != MAGIC:
        raise IntegrityError(f"sealed page header starts with {magic!r}, not {MAGIC!r}")
    if xxhash.xxh3_64_intdigest(raw[_SUMMED_FROM:end]) != stated:
        raise IntegrityError("sealed page header does not match its own checksum")
    if secret != facts_bytes(layout) + TAG_BYTES:
        raise IntegrityError(f"sealed page header hides {secret} bytes, which is another layout's")
    hidden = bytes(raw[_CLEAR.size : _CLEAR.size + secret])
    return SealedHeader(Seal(key_id=key_id, nonce=nonce, tag=tag, secret=hidden), stored, codec), stated
