"""Segment files: append-only runs of [header page | payload], each under one number for ever."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from workmem.core.errors import IntegrityError
from workmem.store.arena import ALIGNMENT_BYTES
from workmem.store.device import DeviceFile

if TYPE_CHECKING:
    from workmem.store.catalog import Catalog

SEGMENT_BYTES_MAX = 64 * 2**20
SEGMENT_HEADER_BYTES = ALIGNMENT_BYTES
_NAME = re.compile(r"([0-9]{10})\.seg")
_NUMBER_MAX = 2**31
"""A file of a higher number is not ours: counting on from it, the 32 bits of the journal would run out."""
_MAGIC = b"WMSEGMT\x01"
_HEADER = struct.Struct("<8sQ16sQ")
"""magic, number, store id, checksum of the fields before it."""


class Extent:
    """Where a page lies on ssd: header and payload, `length` bytes from `offset` on."""

    __slots__ = ("header_sum", "length", "offset", "segment")

    def __init__(self, segment: Segment, offset: int, length: int, header_sum: int) -> None:
        self.segment = segment
        self.offset = offset
        self.length = length
        self.header_sum = header_sum
        """The header's checksum as journaled: a header that says otherwise is of another page (R6)."""

    def is_of(self, catalog: Catalog, row: int) -> bool:
        """Whether this is where the catalog has the page of `row` now."""
        return (
            catalog.segment[row] == self.segment.number
            and catalog.offset[row] * ALIGNMENT_BYTES == self.offset
        )


class Segment:
    """One file. `size` is where the next page goes; what lies before is never overwritten."""

    __slots__ = (
        "file",
        "is_dropped",
        "is_sealed",
        "is_whole_tier",
        "live_bytes",
        "number",
        "page_count",
        "path",
        "readers",
        "size",
    )

    def __init__(self, number: int, path: Path, file: DeviceFile, size: int) -> None:
        self.number = number
        self.path = path
        self.file = file
        self.size = size
        self.live_bytes = 0
        self.page_count = 0
        """Live pages in it."""
        self.readers = 0
        """Reads under way: the file stays open for them after it is unlinked."""
        self.is_sealed = False
        self.is_dropped = False
        self.is_whole_tier = False
        """It stands for a tier that keeps no segments: its pages leave one by one."""


def segment_path(folder: Path, number: int) -> Path:
    """File of segment `number`."""
    return folder / f"{number:010d}.seg"


def segment_numbers(folder: Path) -> list[int]:
    """Numbers of the segment files in `folder`, ascending. Files of any other name are left alone."""
    names = [_NAME.fullmatch(file.name) for file in folder.glob("*.seg")]
    return sorted(number for name in names if name and (number := int(name[1])) <= _NUMBER_MAX)


def segment_header(number: int, store_id: bytes) -> bytes:
    """The first page of a segment file."""
    body = _HEADER.pack(_MAGIC, number, store_id, 0)[:-8]
    return (body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")).ljust(SEGMENT_HEADER_BYTES, b"\0")


def check_segment_header(raw: bytes, number: int, store_id: bytes) -> None:
    """Raises IntegrityError unless `raw` starts the file that segment `number` of this store was."""
    if raw[: _HEADER.size] != segment_header(number, store_id)[: _HEADER.size]:
        raise IntegrityError(f"segment {number} carries another file's header")
