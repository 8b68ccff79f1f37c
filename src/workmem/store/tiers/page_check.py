"""Whether a page is the one that was asked for, as it was written (R6)."""

from __future__ import annotations

import msgspec
import xxhash

from workmem.core.errors import IntegrityError
from workmem.core.layout import KVLayout
from workmem.store.tiers.page_header import PageHeader, header_bytes, slice_spans, unpack


class Expected(msgspec.Struct, frozen=True):
    """The page that the index asks for."""

    layout: KVLayout
    root: bytes
    key: bytes
    parent: bytes
    depth: int
    header_sum: int
    """The stored header's checksum as journaled: one that says otherwise is of another page."""

    def check_identity(self, header: PageHeader) -> None:
        """Raises IntegrityError where `header` names another block."""
        if (header.root, header.key, header.parent, header.depth) != (
            self.root,
            self.key,
            self.parent,
            self.depth,
        ):
            raise IntegrityError("the header names another block")


def check_header(expected: Expected, raw: memoryview) -> PageHeader:
    """The header in the clear that begins `raw`. Raises IntegrityError where it is not the one asked for."""
    header, found_sum = unpack(raw[: header_bytes(expected.layout)], expected.layout)
    if found_sum != expected.header_sum:
        raise IntegrityError("the header is not the one that was journaled")
    expected.check_identity(header)
    return header


def check_slices(header: PageHeader, layout: KVLayout, payload: memoryview) -> None:
    """Raises IntegrityError where bytes of the plain `payload` are not those that `header` vouches for."""
    for (start, end), checksum in zip(slice_spans(layout), header.checksums, strict=True):
        if xxhash.xxh3_64_intdigest(payload[start:end]) != checksum:
            raise IntegrityError(f"bytes {start} to {end} are not what was written")
