"""One page of a folder: read past the page cache where that can be, and checked as the store checks it (R6)."""

from __future__ import annotations

import mmap
from types import TracebackType
from typing import Self

from workmem.core.errors import IntegrityError
from workmem.store.arena import align
from workmem.store.device import Access, BlockDevice, DeviceFile
from workmem.store.tiers.journal_records import PutEntry
from workmem.store.tiers.page_check import Expected
from workmem.store.tiers.page_forms import PageForms
from workmem.store.tiers.page_header import PageHeader, header_bytes, unpack
from workmem.store.tiers.segments import SEGMENT_HEADER_BYTES, segment_path
from workmem.store.tools.folder_view import FolderView, SpaceView
from workmem.store.tools.read_only import ReadOnlyDevice


class PageReader:
    """Reads pages of a folder, in any order. A context manager; keeps the last segment's file open."""

    def __init__(self, view: FolderView, device: BlockDevice | None = None) -> None:
        self._view = view
        self._device = ReadOnlyDevice(device)
        self._forms = PageForms(keyring=view.keyring)
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

    def check(self, space: SpaceView, page: PutEntry) -> None:
        """Read `page` and check it as it lies.

        Raises IntegrityError when it is not what the journal says, OSError when it cannot be read.
        """
        self._forms.check(_expected(space, page), self._stored(page))

    def page(self, space: SpaceView, page: PutEntry) -> tuple[PageHeader, memoryview]:
        """Header and payload of `page`, checked, opened and decoded.

        Raises as `check` does.
        """
        layout = space.namespace.layout
        head = header_bytes(layout)
        frame = memoryview(bytearray(head + align(layout.page_bytes)))
        self._forms.open(_expected(space, page), self._stored(page), frame)
        header, _ = unpack(frame[:head], layout)
        return header, frame[head : head + layout.page_bytes]

    def _stored(self, page: PutEntry) -> memoryview:
        if page.offset < SEGMENT_HEADER_BYTES or page.length <= 0:
            raise IntegrityError(f"the journal has it at {page.offset} with {page.length} bytes")
        # Freed with its last view: an error on its way up still holds some.
        stored = memoryview(mmap.mmap(-1, page.length))
        self._segment(page.segment).readv([stored], page.offset)
        return stored

    def _segment(self, number: int) -> DeviceFile:
        if self._file is None or number != self._number:
            self.close()
            path = segment_path(self._view.segments_folder, number)
            self._file = self._device.open(path, Access.READ, direct=True)
            self._number = number
        return self._file


def _expected(space: SpaceView, page: PutEntry) -> Expected:
    return Expected(space.namespace.layout, space.root, page.key, page.parent, page.depth, page.header_sum)
