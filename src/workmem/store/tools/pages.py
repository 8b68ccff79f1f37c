"""One page of a folder: read past the page cache where that can be, and checked as the store checks it (R6)."""

from __future__ import annotations

import mmap
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import xxhash

from workmem.core.errors import IntegrityError
from workmem.store.device import Access, BlockDevice, DeviceFile
from workmem.store.tiers.journal import PutEntry
from workmem.store.tiers.page_header import RAW, PageHeader, header_bytes, unpack
from workmem.store.tiers.segments import SEGMENT_HEADER_BYTES, segment_path
from workmem.store.tools.folder_view import FolderView, SpaceView
from workmem.store.tools.read_only import ReadOnlyDevice


class PageReader:
    """Reads pages of a folder, in any order. A context manager; keeps the last segment's file open."""

    def __init__(self, view: FolderView, device: BlockDevice | None = None) -> None:
        self._view = view
        self._device = ReadOnlyDevice(device)
        self._number = 0
        self._file: DeviceFile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @contextmanager
    def page(self, space: SpaceView, page: PutEntry) -> Generator[tuple[PageHeader, memoryview]]:
        """Header and payload of `page`, checked; the payload is valid inside the context only.

        Raises IntegrityError when it is not what the journal says, OSError when it cannot be read.
        """
        layout = space.namespace.layout
        head_bytes = header_bytes(layout)
        if page.offset < SEGMENT_HEADER_BYTES or page.length <= head_bytes:
            raise IntegrityError(f"the journal has it at {page.offset} with {page.length} bytes")
        with mmap.mmap(-1, page.length) as scratch, memoryview(scratch) as whole:
            self._segment(page.segment).readv([whole], page.offset)
            with whole[:head_bytes] as head:
                header = _check_header(head, space, page)
            end = head_bytes + (header.stored_bytes or layout.page_bytes)
            if end > page.length:
                raise IntegrityError(f"the header counts {end} bytes, the journal {page.length}")
            with whole[head_bytes:end] as payload:
                if header.codec == RAW:
                    _check_slices(payload, header, space)
                yield header, payload

    def _segment(self, number: int) -> DeviceFile:
        if self._file is None or number != self._number:
            self.close()
            path = segment_path(self._view.segments_folder, number)
            self._file = self._device.open(path, Access.READ, direct=True)
            self._number = number
        return self._file


def _check_header(head: memoryview, space: SpaceView, page: PutEntry) -> PageHeader:
    header, header_sum = unpack(head, space.namespace.layout)
    if header_sum != page.header_sum:
        raise IntegrityError("the header is not the one that was journaled")
    if (header.root, header.key, header.parent, header.depth) != (
        space.root,
        page.key,
        page.parent,
        page.depth,
    ):
        raise IntegrityError("the header names another block")
    return header


def _check_slices(payload: memoryview, header: PageHeader, space: SpaceView) -> None:
    layout = space.namespace.layout
    for index, checksum in enumerate(header.checksums):
        start, end = layout.slice_span(index)
        if xxhash.xxh3_64_intdigest(payload[start:end]) != checksum:
            raise IntegrityError(f"bytes {start} to {end} are not what was written")
