"""The segment files of a folder: opening those that are there, filling the one that is active."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

from workmem.core.errors import IntegrityError
from workmem.core.events import BoundReached, EventSink
from workmem.store.device import Access, BlockDevice, DeviceFile
from workmem.store.ssd_index import SsdIndex
from workmem.store.tiers.folder import StoreFolder
from workmem.store.tiers.segments import (
    SEGMENT_HEADER_BYTES,
    Extent,
    Segment,
    check_segment_header,
    segment_header,
    segment_path,
)
from workmem.store.tiers.staging import ReadyPage

log = logging.getLogger(__name__)

_WRITE_CALL_BYTES = 8 * 2**20


class SegmentFiles:
    """Owned by the writer thread. A segment is filled by one process only, front to back, and never written over."""

    def __init__(
        self,
        folder: StoreFolder,
        index: SsdIndex,
        device: BlockDevice,
        sink: EventSink,
        segment_bytes: int,
    ) -> None:
        self._folder = folder
        self._index = index
        self._device = device
        self._sink = sink
        self.segment_bytes = segment_bytes
        """Most bytes of a segment that holds more than one page."""
        self.active: Segment | None = None
        """Where the next page goes."""
        self.left_out = 0
        """Files that `open` could not use."""
        self._left: list[Path] = []
        """Files that are to go and are still there."""
        self._next_number = 1
        self._direct = True

    def use_buffered(self) -> None:
        """Go through the page cache."""
        self._direct = False

    def open(self) -> None:
        """Put every usable segment of the folder into the index, sealed."""
        for number in self._folder.segment_numbers():
            self._next_number = max(self._next_number, number + 1)
            path = segment_path(self._folder.segments, number)
            head = bytearray(SEGMENT_HEADER_BYTES)
            try:
                with_header = self._device.open(path, Access.READ, direct=False)
                try:
                    if with_header.size() >= SEGMENT_HEADER_BYTES:
                        with_header.readv([memoryview(head)], 0)
                finally:
                    with_header.close()
                if not any(head):
                    # It was begun when the power went: its header is durable before a page of it is named.
                    self._device.unlink(path)
                    continue
                check_segment_header(bytes(head), number, self._folder.store_id)
                file = self._open_file(number, Access.READ)
            except (OSError, IntegrityError) as error:
                log.warning("segment %d is left out: %s", number, error)
                self.left_out += 1
                continue
            segment = Segment(number, path, file, file.size())
            segment.is_sealed = True
            self._index.segments[number] = segment

    @property
    def last_number(self) -> int:
        """The highest that a segment has had."""
        return self._next_number - 1

    def number_from(self, number: int) -> None:
        """The journal knows segments below `number` that are gone: what it says of them must meet no new one."""
        self._next_number = max(self._next_number, number)

    def write(self, pages: Sequence[ReadyPage]) -> list[Extent]:
        """Put pages into segments and sync them. Raises OSError; where they lie then is in doubt."""
        extents: list[Extent] = []
        touched: dict[int, Segment] = {}
        try:
            for group in _groups(pages, min(_WRITE_CALL_BYTES, self.segment_bytes - SEGMENT_HEADER_BYTES)):
                segment = self.with_room(sum(page.length for page in group))
                touched[segment.number] = segment
                extents.extend(self._write_group(segment, group))
            for segment in touched.values():
                segment.file.sync()
        except OSError:
            self.doubt(touched)
            raise
        return extents

    def doubt(self, touched: dict[int, Segment]) -> None:
        """What reached these files is uncertain: nothing is ever written over it."""
        if self.active is not None:
            touched[self.active.number] = self.active
        for segment in touched.values():
            self.seal(segment)
            with contextlib.suppress(OSError):
                segment.file.truncate(segment.size)

    def _write_group(self, segment: Segment, pages: list[ReadyPage]) -> list[Extent]:
        extents: list[Extent] = []
        at = segment.size
        for page in pages:
            extents.append(Extent(segment, at, page.length, page.header_sum))
            at += page.length
        segment.file.writev([page.view for page in pages], segment.size)
        segment.size = at
        return extents

    def with_room(self, need: int) -> Segment:
        """The segment that the next `need` bytes go to. Raises OSError where a new one cannot be made."""
        active = self.active
        if active is not None and (
            active.is_sealed
            or (active.size + need > self.segment_bytes and active.size > SEGMENT_HEADER_BYTES)
        ):
            self.seal(active)
            active = None
        if active is None:
            active = self.active = self._create_segment()
        return active

    def _create_segment(self) -> Segment:
        number = self._next_number
        self._next_number += 1
        path = segment_path(self._folder.segments, number)
        file = self._open_file(number, Access.CREATE)
        try:
            with mmap.mmap(-1, SEGMENT_HEADER_BYTES) as page:
                page[:] = segment_header(number, self._folder.store_id)
                with memoryview(page) as view:
                    file.writev([view], 0)
            self._device.sync_folder(self._folder.segments)
        except BaseException:
            file.close()
            self._device.unlink(path)
            raise
        segment = Segment(number, path, file, SEGMENT_HEADER_BYTES)
        self._index.segments[number] = segment
        return segment

    def _open_file(self, number: int, access: Access) -> DeviceFile:
        file = self._device.open(segment_path(self._folder.segments, number), access, direct=self._direct)
        if self._direct and not file.is_direct:
            self._direct = False
            detail = f"{self._folder.path} refuses O_DIRECT; the page cache is used"
            self._sink(BoundReached(name="store.ssd.direct", limit=0, detail=detail))
        return file

    def seal(self, segment: Segment) -> None:
        """Nothing is added to `segment` any more."""
        segment.is_sealed = True
        if self.active is segment:
            self.active = None

    def remove(self, segment: Segment) -> None:
        """Take a segment out of the index and the folder."""
        self._index.drop_segment(segment)
        self._left.append(segment.path)
        try:
            self._remove_left()
        except OSError as error:
            # Nothing refers to it any more: the next removal is early enough, or the next start.
            log.warning("segment %d could not be removed: %s", segment.number, error)

    def sync_removals(self) -> None:
        """Return once all that was removed is off the disk for good. Raises OSError."""
        self._remove_left()
        self._device.sync_folder(self._folder.segments)

    def _remove_left(self) -> None:
        while self._left:
            self._device.unlink(self._left[-1])
            self._left.pop()


def _groups(pages: Sequence[ReadyPage], bytes_max: int) -> Iterator[list[ReadyPage]]:
    group: list[ReadyPage] = []
    total = 0
    for page in pages:
        if group and total + page.length > bytes_max:
            yield group
            group, total = [], 0
        group.append(page)
        total += page.length
    if group:
        yield group
