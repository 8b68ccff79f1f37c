"""Whether a page that was read is the one that was asked for, as it was written (R6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from workmem.core.errors import IntegrityError
from workmem.core.outcomes import MissReason
from workmem.store.ssd_index import StoredPage
from workmem.store.tiers.page_header import PageHeader, unpack

if TYPE_CHECKING:
    from workmem.store.catalog import Space


def read_page(page: StoredPage, into: memoryview) -> MissReason | None:
    """Read a page and check it. Returns what is wrong with it; None when it is what was written."""
    try:
        page.extent.segment.file.readv([into], page.extent.offset)
        verify(page.space, page.key, page.parent, page.depth, page.extent.header_sum, into)
    except OSError:
        return MissReason.UNAVAILABLE
    except IntegrityError:
        return MissReason.CORRUPT
    return None


def verify(
    space: Space, key: bytes, parent: bytes, depth: int, header_sum: int, page: memoryview
) -> PageHeader:
    """Check header and bytes of a page against what the index asks for (R6). Raises IntegrityError."""
    header, found_sum = unpack(page[: space.header_bytes], space.layout)
    if found_sum != header_sum:
        raise IntegrityError("the header is not the one that was journaled")
    if (header.root, header.key, header.parent, header.depth) != (space.root, key, parent, depth):
        raise IntegrityError("the header names another block")
    with page[space.header_bytes :] as payload:
        for (start, end), checksum in zip(space.spans, header.checksums, strict=True):
            if xxhash.xxh3_64_intdigest(payload[start:end]) != checksum:
                raise IntegrityError(f"bytes {start} to {end} are not what was written")
    return header
