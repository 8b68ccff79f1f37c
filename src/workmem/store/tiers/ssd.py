"""The ssd tier: pages in append-only segments, a journal that says where, and the room they take.

One thread writes (`write`, `tend`); any number read. What is acknowledged has reached the disk in this
order: data, sync, journal, sync, index (R2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import logging
import mmap
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import xxhash

from workmem.core.errors import IntegrityError
from workmem.core.events import BoundReached, EventSink
from workmem.core.outcomes import MissReason
from workmem.store.device import Access, BlockDevice, DeviceFile
from workmem.store.pool import Pool
from workmem.store.ssd_index import SsdIndex, StoredPage, WriteJob, namespace_entry, put_entry
from workmem.store.tiers.folder import StoreFolder
from workmem.store.tiers.free_space import KeepFree, read_free_space, usable_bytes
from workmem.store.tiers.journal import Journal, NamespaceEntry
from workmem.store.tiers.page_header import PageHeader, checksum_of, unpack
from workmem.store.tiers.replay import Replay
from workmem.store.tiers.segments import (
    SEGMENT_BYTES_MAX,
    SEGMENT_HEADER_BYTES,
    Extent,
    Segment,
    check_segment_header,
    segment_header,
    segment_path,
)

if TYPE_CHECKING:
    from workmem.store.catalog import Space
    from workmem.store.tiers.journal import Record

log = logging.getLogger(__name__)

WRITE_BATCH_BYTES = 32 * 2**20
"""Most bytes under one pair of syncs."""
_WRITE_CALL_BYTES = 8 * 2**20


class SsdTier:
    """The files and their bookkeeping. `index` is shared with the pool; the rest is the writer's."""

    def __init__(
        self,
        folder: StoreFolder,
        pool: Pool,
        device: BlockDevice,
        sink: EventSink,
        capacity_bytes: int,
        keep_free: KeepFree | None = None,
    ) -> None:
        self._folder = folder
        self._pool = pool
        self._device = device
        self._sink = sink
        self.capacity_bytes = capacity_bytes
        self._keep_free = keep_free or KeepFree()
        self._is_tight = False
        self._segment_bytes = min(SEGMENT_BYTES_MAX, max(capacity_bytes // 8, 2 * SEGMENT_HEADER_BYTES))
        self.index = SsdIndex(pool.state, capacity_bytes)
        self._journal = Journal(device, folder.journal, folder.store_id)
        self.index.extent_bytes_max = capacity_bytes - 2 * self._segment_bytes
        self._active: Segment | None = None
        self._next_number = 1
        self._direct = True
        self._announced: set[int] = set()
        """Numbers of namespaces that the journal knows."""

    @property
    def batch_bytes(self) -> int:
        """Most bytes to hand to one `write`."""
        return min(WRITE_BATCH_BYTES, self.capacity_bytes // 4)

    def use_buffered(self) -> None:
        """Go through the page cache."""
        self._direct = False

    # -- start

    def open(self) -> None:
        """Replay the journal. Time is proportional to it, not to the data."""
        # A million new records make the collector walk the heap again and again, for nothing.
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._open()
        finally:
            if collecting:
                gc.enable()
        _give_back_memory()

    def _open(self) -> None:
        try:
            records = self._journal.open()
        except IntegrityError as error:
            log.warning("ssd tier starts empty: %s", error)
            self._sink(BoundReached(name="store.ssd.journal", limit=0, detail=str(error)))
            self._journal.is_broken = True
            records = []
        if self._journal.torn_bytes:
            detail = f"{self._journal.torn_bytes} bytes behind the last whole batch were cut off"
            self._sink(BoundReached(name="store.ssd.journal_tail", limit=0, detail=detail))
        self._open_segments()
        self._replay(records)
        if self._journal.is_broken:
            self._try_rewrite()
        for segment in list(self.index.segments.values()):
            if not segment.page_count:
                self._remove(segment)

    def _open_segments(self) -> None:
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
                self._pool.count("segments_left_out", 1)
                continue
            segment = Segment(number, path, file, file.size())
            segment.is_sealed = True
            self.index.segments[number] = segment

    def _replay(self, records: Sequence[Record]) -> None:
        replay = Replay(
            self._pool.state.catalog,
            {number: segment.size for number, segment in self.index.segments.items()},
            open_space=lambda namespace, number: self._pool.add_space(namespace, number=number)[0],
            close_space=self._pool.forget_space,
        )
        replay.take(records)
        for space in replay.spaces:
            self._announced.add(space.number)
            self.index.restore(space, replay.rows(space), replay.parents(space))
        if not replay.is_clean:
            self._pool.count("journal_records_dropped", replay.dropped)
            self._try_rewrite()

    def _try_rewrite(self) -> None:
        """A failure is not the end: the writer rewrites a broken journal before it adds anything."""
        try:
            self._announce_all()
        except OSError as error:
            self._journal.is_broken = True
            log.warning("the journal could not be rewritten yet: %s", error)

    def _announce_all(self) -> None:
        self._journal.rewrite(self.index.snapshot())
        self.index.strikes_are_durable()
        self._announced = {space.number for space in self._pool.state.spaces.values()}

    # -- writing

    def write(self, jobs: list[WriteJob]) -> list[Extent]:
        """Make pages durable. Raises OSError with nothing acknowledged."""
        if self._journal.is_broken:
            self._announce_all()
        self._make_room(sum(job.length for job in jobs))
        extents = self._write_data(jobs)
        self._append(self.index.put_entries(jobs, extents))
        return extents

    def tend(self) -> None:
        """What is due without new pages: strike outs, dead segments, a journal that is mostly dead."""
        if self._journal.is_broken or self._journal.should_rewrite(self.index.page_count):
            self._announce_all()
        if self.index.has_deletes:
            self._append([])
        self._erase()
        for segment in list(self.index.segments.values()):
            if segment.is_sealed and not segment.page_count:
                self._remove(segment)

    def _erase(self) -> None:
        """Bytes of a purged namespace leave the disk: what else lies beside them is written again first (R9)."""
        left = self.index.take_erasures()
        try:
            while left:
                self._seal(left[-1])
                if left[-1].page_count:
                    self._compact(left[-1])
                else:
                    self._remove(left[-1])
                left.pop()
        except OSError:
            self.index.return_erasures(left)
            raise
        self.index.erasures_are_done()

    def compact_all(
        self, on_segment: Callable[[int, int], None] | None = None, *, also: Collection[int] = ()
    ) -> None:
        """Take the dead bytes out of all segments and the dead records out of the journal.

        For a store that nobody uses. Segments numbered in `also` are written again though nothing in them is
        dead. `on_segment` hears how many segments of how many are done. Raises OSError.
        """
        holed = [
            segment
            for segment in self.index.segments.values()
            if segment.is_sealed
            and (segment.live_bytes + SEGMENT_HEADER_BYTES < segment.size or segment.number in also)
        ]
        for done, segment in enumerate(holed, 1):
            self._compact(segment)
            if on_segment is not None:
                on_segment(done, len(holed))
        self._announce_all()

    def probe(self) -> None:
        """Write something that does no harm. Raises OSError while the disk refuses."""
        self._announce_all()

    def folder_is_ours(self) -> bool:
        """Whether what is written now will be found at the next start."""
        return self._folder.is_ours()

    def close(self) -> None:
        """Let go of all files."""
        for segment in self.index.segments.values():
            segment.file.close()
        self._journal.close()
        self._folder.close()

    def _append(self, entries: Sequence[Record]) -> None:
        deletes = self.index.take_deletes()
        news: list[NamespaceEntry] = [
            namespace_entry(space)
            for space in list(self._pool.state.spaces.values())
            if space.number not in self._announced
        ]
        batch: list[Record] = [*deletes, *news, *entries]
        if not batch:
            return
        try:
            self._journal.append(batch)
        except OSError:
            self.index.return_deletes(deletes)
            raise
        self.index.strikes_are_durable()
        self._announced.update(entry.number for entry in news)

    def _write_data(self, jobs: list[WriteJob]) -> list[Extent]:
        extents: list[Extent] = []
        touched: dict[int, Segment] = {}
        try:
            for group in _groups(jobs, min(_WRITE_CALL_BYTES, self._segment_bytes - SEGMENT_HEADER_BYTES)):
                segment = self._segment_with_room(sum(job.length for job in group))
                touched[segment.number] = segment
                extents.extend(self._write_group(segment, group))
            for segment in touched.values():
                segment.file.sync()
        except OSError:
            self._doubt(touched)
            raise
        return extents

    def _doubt(self, touched: dict[int, Segment]) -> None:
        """What reached these files is uncertain: nothing is ever written over it."""
        if self._active is not None:
            touched[self._active.number] = self._active
        for segment in touched.values():
            self._seal(segment)
            with contextlib.suppress(OSError):
                segment.file.truncate(segment.size)

    def _write_group(self, segment: Segment, jobs: list[WriteJob]) -> list[Extent]:
        extents: list[Extent] = []
        arena, at = self._pool.state.arena, segment.size
        pages = [arena.writable(job.frame.offset, job.frame.size) for job in jobs]
        try:
            for page in pages:
                extents.append(Extent(segment, at, len(page), checksum_of(page)))
                at += len(page)
            segment.file.writev(pages, segment.size)
        finally:
            for page in pages:
                page.release()
        segment.size = at
        return extents

    def _segment_with_room(self, need: int) -> Segment:
        active = self._active
        if active is not None and (
            active.is_sealed
            or (active.size + need > self._segment_bytes and active.size > SEGMENT_HEADER_BYTES)
        ):
            self._seal(active)
            active = None
        if active is None:
            active = self._active = self._create_segment()
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
        except OSError:
            file.close()
            self._device.unlink(path)
            raise
        segment = Segment(number, path, file, SEGMENT_HEADER_BYTES)
        self.index.segments[number] = segment
        return segment

    def _open_file(self, number: int, access: Access) -> DeviceFile:
        file = self._device.open(segment_path(self._folder.segments, number), access, direct=self._direct)
        if self._direct and not file.is_direct:
            self._direct = False
            detail = f"{self._folder.path} refuses O_DIRECT; the page cache is used"
            self._sink(BoundReached(name="store.ssd.direct", limit=0, detail=detail))
        return file

    def _seal(self, segment: Segment) -> None:
        segment.is_sealed = True
        if self._active is segment:
            self._active = None

    # -- room

    def _make_room(self, need: int) -> None:
        """Raises OSError where others have filled the disk and there is nothing left to give up."""
        usable = self._usable_bytes()
        # One segment is kept back: compaction writes before it frees.
        budget = usable - self._segment_bytes
        while self.index.file_bytes + need > budget:
            victim = self._emptiest()
            if victim is None:
                if self._active is None:
                    break
                self._seal(self._active)
            elif not victim.page_count:
                self._append([])
                self._remove(victim)
            elif victim.live_bytes * 2 <= victim.size:
                self._compact(victim)
            elif not self.index.evict(max(need, self._segment_bytes // 4)):
                break
        if usable < self.capacity_bytes and self.index.file_bytes + need > usable:
            raise OSError(errno.ENOSPC, f"{need} bytes would take what store.ssd.keep_free leaves to others")

    def _usable_bytes(self) -> int:
        """What of its capacity the tier may fill now: others live on the disk too."""
        try:
            space = read_free_space(self._folder.segments)
        except OSError:
            return self.capacity_bytes
        usable = usable_bytes(self.capacity_bytes, self.index.file_bytes, space, self._keep_free)
        if (usable < self.capacity_bytes) != self._is_tight:
            self._is_tight = not self._is_tight
            if self._is_tight:
                detail = f"{space.free_bytes} bytes are free on the disk: the tier gives way"
                self._sink(BoundReached(name="store.ssd.keep_free", limit=usable, detail=detail))
        return usable

    def _emptiest(self) -> Segment | None:
        sealed = [segment for segment in self.index.segments.values() if segment.is_sealed]
        return min(sealed, key=lambda segment: segment.live_bytes / segment.size, default=None)

    def _compact(self, victim: Segment) -> None:
        """Write a segment's live pages again and remove it: at most one byte moved for each one freed."""
        moves: list[tuple[StoredPage, Extent]] = []
        touched: dict[int, Segment] = {}
        try:
            for page in self.index.pages_of(victim):
                new = self._rewrite_page(page)
                if new is not None:
                    touched[new.segment.number] = new.segment
                    moves.append((page, new))
            for segment in touched.values():
                segment.file.sync()
        except OSError:
            self._doubt(touched)
            raise
        self._append([put_entry(page.space, page.key, page.parent, page.depth, new) for page, new in moves])
        for page, new in moves:
            self.index.move(page, new)
            self._pool.count("ssd_moved_bytes", new.length)
        self._append([])
        self._remove(victim)

    def _rewrite_page(self, page: StoredPage) -> Extent | None:
        """A page's new place, or None when the old one does not hold it any more. Raises OSError on writes."""
        old = page.extent
        with mmap.mmap(-1, old.length) as scratch, memoryview(scratch) as view:
            reason = read_page(page, view)
            if reason is not None:
                self._pool.quarantine_extent(page.row, page.stamp, old, reason)
                return None
            segment = self._segment_with_room(old.length)
            segment.file.writev([view], segment.size)
            new = Extent(segment, segment.size, old.length, old.header_sum)
            segment.size += old.length
            return new

    def _remove(self, segment: Segment) -> None:
        self.index.drop_segment(segment)
        try:
            self._device.unlink(segment.path)
        except OSError as error:
            # Nothing refers to it any more; the next start removes it.
            log.warning("segment %d could not be removed: %s", segment.number, error)


def _give_back_memory() -> None:
    """What replay took for a while and freed stays with the C library otherwise: half again what the index takes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


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


def _groups(jobs: list[WriteJob], bytes_max: int) -> Iterator[list[WriteJob]]:
    group: list[WriteJob] = []
    total = 0
    for job in jobs:
        if group and total + job.length > bytes_max:
            yield group
            group, total = [], 0
        group.append(job)
        total += job.length
    if group:
        yield group
