"""The header in front of every page, in dram as on ssd: what the bytes behind it claim to be.

Byte table in docs/internals/journal-format.md. The last 8 bytes of a header belong to the frame it lies
in, not to the page: a generation that grows each time the frame gives its page up (R3).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import xxhash

from workmem.core.errors import IntegrityError
from workmem.core.keys import BlockKey
from workmem.core.layout import KVLayout
from workmem.store.arena import align
from workmem.store.codecs.raw import RAW_ID

MAGIC = b"WMPAGE\x00\x02"
GENERATION_BYTES = 8
_SUM = struct.Struct("<Q")
_START = struct.Struct("<8sQ")
_FACTS = "<32s32s32s32sQQIIIII4x"
_FIXED = struct.Struct(f"{_START.format}{_FACTS[1:]}")
"""magic, checksum, root, key, parent, layout digest, page bytes, stored bytes, depth, tokens, slices, header
bytes, codec."""
_SUMMED_FROM = 16
_NOTHING = struct.Struct("<QQ")
"""In place of magic and checksum."""
_STORED, _STORED_AT = struct.Struct("<Q"), 152
_CODEC, _CODEC_AT = struct.Struct("<I"), 176


class PageHeader(msgspec.Struct, frozen=True):
    """What a page says about itself."""

    root: bytes
    key: BlockKey
    parent: bytes
    depth: int
    tokens: tuple[int, ...]
    checksums: tuple[int, ...]
    codec: int = RAW_ID
    stored_bytes: int = 0
    """Bytes of the payload as it is stored; 0 stands for all of `page_bytes`."""


@lru_cache(maxsize=64)
def layout_digest(layout: KVLayout) -> bytes:
    """32 bytes that differ wherever two layouts do."""
    return hashlib.sha256(msgspec.json.encode(layout, order="sorted")).digest()


class HeaderForm:
    """What all headers of one layout have in common, worked out once: one is written for every page saved."""

    __slots__ = ("_counts", "_digest", "_facts", "_page_bytes", "_summed_to")

    def __init__(self, layout: KVLayout) -> None:
        size, slices = header_bytes(layout), layout.slice_count
        values = f"{_FACTS}{layout.block_tokens}I{slices}Q"
        self._summed_to = size - GENERATION_BYTES
        self._facts = struct.Struct(f"{values}{self._summed_to - _SUMMED_FROM - struct.calcsize(values)}x")
        """Everything but magic, checksum and generation, zeros behind the checksums included."""
        self._digest = layout_digest(layout)
        self._page_bytes = layout.page_bytes
        self._counts = layout.block_tokens, slices, size

    def write(
        self,
        into: memoryview,
        root: bytes,
        key: BlockKey,
        parent: bytes,
        depth: int,
        tokens: Sequence[int],
        checksums: Sequence[int],
        codec: int = RAW_ID,
        stored_bytes: int = 0,
    ) -> int:
        """See `pack`."""
        # Put together where the processor has it at hand: `into` is memory that nobody has touched for long, and is
        # written once, in one go, the magic last.
        facts = self._facts.pack(
            root,
            key,
            parent,
            self._digest,
            self._page_bytes,
            stored_bytes or self._page_bytes,
            depth,
            *self._counts,
            codec,
            *tokens,
            *checksums,
        )
        checksum = xxhash.xxh3_64_intdigest(facts)
        into[_SUMMED_FROM : self._summed_to] = facts
        _START.pack_into(into, 0, MAGIC, checksum)
        return checksum


@lru_cache(maxsize=64)
def header_form(layout: KVLayout) -> HeaderForm:
    """The form of a layout's headers."""
    return HeaderForm(layout)


@lru_cache(maxsize=64)
def header_bytes(layout: KVLayout) -> int:
    """Bytes a header takes, aligned like the payload behind it."""
    return align(_FIXED.size + 4 * layout.block_tokens + 8 * layout.slice_count + GENERATION_BYTES)


def pack(header: PageHeader, layout: KVLayout, into: memoryview) -> int:
    """Write `header` into the first `header_bytes(layout)` bytes, all but the generation. Returns its checksum."""
    return header_form(layout).write(
        into,
        header.root,
        header.key,
        header.parent,
        header.depth,
        header.tokens,
        header.checksums,
        header.codec,
        header.stored_bytes,
    )


def unpack(raw: memoryview, layout: KVLayout) -> tuple[PageHeader, int]:
    """The header in `raw`, and its checksum. Raises IntegrityError on anything but what `pack` wrote."""
    size = header_bytes(layout)
    (
        magic,
        stated,
        root,
        key,
        parent,
        digest,
        page_bytes,
        stored,
        depth,
        tokens,
        slices,
        stated_size,
        codec,
    ) = _FIXED.unpack_from(raw)
    if magic != MAGIC:
        raise IntegrityError(f"page header starts with {magic!r}, not {MAGIC!r}")
    if xxhash.xxh3_64_intdigest(raw[_SUMMED_FROM : size - GENERATION_BYTES]) != stated:
        raise IntegrityError("page header does not match its own checksum")
    if digest != layout_digest(layout) or page_bytes != layout.page_bytes or stated_size != size:
        raise IntegrityError("page header is of another layout")
    if tokens != layout.block_tokens or slices != layout.slice_count:
        raise IntegrityError(f"page header counts {tokens} tokens and {slices} slices")
    values = struct.unpack_from(f"<{tokens}I{slices}Q", raw, _FIXED.size)
    header = PageHeader(root, BlockKey(key), parent, depth, values[:tokens], values[tokens:], codec, stored)
    return header, stated


def facts_bytes(layout: KVLayout) -> int:
    """Bytes of a header that say something, from the root to the last checksum."""
    return _FIXED.size - _SUMMED_FROM + 4 * layout.block_tokens + 8 * layout.slice_count


def facts_of(raw: memoryview, layout: KVLayout, *, codec: int, stored_bytes: int) -> bytes:
    """What the header in `raw` says, for a payload that is stored by `codec` in `stored_bytes`."""
    facts = bytearray(raw[_SUMMED_FROM : _SUMMED_FROM + facts_bytes(layout)])
    _STORED.pack_into(facts, _STORED_AT - _SUMMED_FROM, stored_bytes)
    _CODEC.pack_into(facts, _CODEC_AT - _SUMMED_FROM, codec)
    return bytes(facts)


def pack_facts(facts: bytes, layout: KVLayout, into: memoryview) -> int:
    """Write the header that says `facts`, its last 8 bytes zero. Returns its checksum."""
    size = header_bytes(layout)
    into[:size] = (MAGIC + bytes(8) + facts).ljust(size, b"\0")
    checksum = xxhash.xxh3_64_intdigest(into[_SUMMED_FROM : size - GENERATION_BYTES])
    _SUM.pack_into(into, 8, checksum)
    return checksum


def identity_of(raw: memoryview) -> tuple[BlockKey, bytes, int]:
    """Key, parent and depth that a header states. For headers in dram, which were checked on the way in."""
    fields = _FIXED.unpack_from(raw)
    return BlockKey(fields[3]), fields[4], fields[8]


def root_of(raw: memoryview) -> bytes:
    """Namespace root that a header states, likewise."""
    return _FIXED.unpack_from(raw)[2]


def checksum_of(raw: memoryview) -> int:
    """The checksum that a header states of itself."""
    return _SUM.unpack_from(raw, 8)[0]


def tokens_of(raw: memoryview, layout: KVLayout) -> tuple[int, ...]:
    """Token ids that a header states. For headers in dram, which were checked on the way in."""
    return struct.unpack_from(f"<{layout.block_tokens}I", raw, _FIXED.size)


@lru_cache(maxsize=64)
def slice_spans(layout: KVLayout) -> tuple[tuple[int, int], ...]:
    """Byte ranges [start, end) of the slices of a page."""
    return tuple(layout.slice_span(index) for index in range(layout.slice_count))


def slice_sums(layout: KVLayout) -> tuple[struct.Struct, int]:
    """How to read the checksums of the slices from a header, and where they begin.

    To be made once a layout: a reader asks for them at every page.
    """
    return struct.Struct(f"<{layout.slice_count}Q"), _FIXED.size + 4 * layout.block_tokens


def blank(memory: memoryview, at: int, size: int, generation: int) -> None:
    """Before the frame at `at` is filled: nobody may take what lies there for the page that was or will be.

    `size`: of its header.
    """
    _NOTHING.pack_into(memory, at, 0, 0)
    _SUM.pack_into(memory, at + size - GENERATION_BYTES, generation)


def set_generation(raw: memoryview, generation: int) -> None:
    """Put a frame's generation back: a page read from a disk carries that of the frame it once left."""
    _SUM.pack_into(raw, len(raw) - GENERATION_BYTES, generation)


def generation_of(raw: memoryview) -> int:
    """Generation of the frame that a header lies in; `raw` is the header, whole."""
    return _SUM.unpack_from(raw, len(raw) - GENERATION_BYTES)[0]
