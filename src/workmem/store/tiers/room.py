"""The room that the ssd tier takes: it stays under its capacity, and gives way where others fill the disk.

Segments without live pages go first; then the emptiest is compacted, then blocks are evicted.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from workmem.core.errors import IntegrityError
from workmem.core.events import BoundReached, EventSink
from workmem.core.outcomes import MissReason
from workmem.store.codecs.contract import UnreadableError
from workmem.store.pool import Pool
from workmem.store.ssd_index import SsdIndex, StoredPage
from workmem.store.tiers.entries import put_entry
from workmem.store.tiers.folder import StoreFolder
from workmem.store.tiers.free_space import KeepFree, read_free_space, usable_bytes
from workmem.store.tiers.page_forms import PageForms
from workmem.store.tiers.segment_files import SegmentFiles
from workmem.store.tiers.segments import SEGMENT_HEADER_BYTES, Extent, Segment

if TYPE_CHECKING:
    from workmem.store.tiers.journal_records import PutEntry


class Room:
    """Owned by the writer thread. `append` journals places and the strikes that are due."""

    def __init__(
        self,
        folder: StoreFolder,
        pool: Pool,
        index: SsdIndex,
        files: SegmentFiles,
        forms: PageForms,
        sink: EventSink,
        capacity_bytes: int,
        keep_free: KeepFree,
        append: Callable[[Sequence[PutEntry]], None],
    ) -> None:
        self._folder = folder
        self._pool = pool
        self._index = index
        self._files = files
        self._forms = forms
        self._sink = sink
        self.capacity_bytes = capacity_bytes
        self._keep_free = keep_free
        self._append = append
        self._is_tight = False

    def make(self, need: int) -> None:
        """Raises OSError where others have filled the disk and there is nothing left to give up."""
        usable = self._usable_bytes()
        # One segment is kept back: compaction writes before it frees.
        budget = usable - self._files.segment_bytes
        while self._index.file_bytes + need > budget:
            victim = self._emptiest()
            if victim is None:
                if self._files.active is None:
                    break
                self._files.seal(self._files.active)
            elif not victim.page_count:
                self._append([])
                self._files.remove(victim)
            elif victim.live_bytes * 2 <= victim.size:
                self.compact(victim)
            elif not self._index.evict(max(need, self._files.segment_bytes // 4)):
                if victim.live_bytes + SEGMENT_HEADER_BYTES >= victim.size:
                    break
                # What is left is promised to somebody: dead bytes between it are all there is to gain.
                self.compact(victim)
        if usable < self.capacity_bytes and self._index.file_bytes + need > usable:
            raise OSError(errno.ENOSPC, f"{need} bytes would take what store.ssd.keep_free leaves to others")

    def _usable_bytes(self) -> int:
        """What of its capacity the tier may fill now: others live on the disk too."""
        try:
            space = read_free_space(self._folder.segments)
        except OSError:
            return self.capacity_bytes
        usable = usable_bytes(self.capacity_bytes, self._index.file_bytes, space, self._keep_free)
        if (usable < self.capacity_bytes) != self._is_tight:
            self._is_tight = not self._is_tight
            if self._is_tight:
                detail = f"{space.free_bytes} bytes are free on the disk: the tier gives way"
                self._sink(BoundReached(name="store.ssd.keep_free", limit=usable, detail=detail))
        return usable

    def _emptiest(self) -> Segment | None:
        sealed = [segment for segment in self._index.segments.values() if segment.is_sealed]
        return min(sealed, key=lambda segment: segment.live_bytes / segment.size, default=None)

    def compact(self, victim: Segment, may_go_on: Callable[[], bool] = lambda: True) -> bool:
        """Write a sealed segment's live pages again and remove it: at most one byte moved for each one freed.

        `may_go_on` is asked before each page. False where it ended that: the rest stays where it is.
        """
        moves: list[tuple[StoredPage, Extent]] = []
        touched: dict[int, Segment] = {}
        is_cut = False
        try:
            for page in self._index.pages_of(victim):
                if is_cut := not may_go_on():
                    break
                if page.space.is_purged:
                    # A purge is about to take it out: it goes with the segment.
                    continue
                new = self._rewrite_page(page)
                if new is not None:
                    touched[new.segment.number] = new.segment
                    moves.append((page, new))
            for segment in touched.values():
                segment.file.sync()
        except OSError:
            self._files.doubt(touched)
            raise
        self._append([put_entry(page.space, page.key, page.parent, page.depth, new) for page, new in moves])
        for page, new in moves:
            self._index.move(page, new)
            self._pool.count("ssd_moved_bytes", new.length)
        self._append([])
        if not is_cut:
            self._files.remove(victim)
        return not is_cut

    def _rewrite_page(self, page: StoredPage) -> Extent | None:
        """A page's new place, or None when the old one does not hold it any more. Raises OSError on writes."""
        old = page.extent
        # Freed with its last view: an error on its way up still holds some.
        view = memoryview(mmap.mmap(-1, old.length))
        if not self._is_sound(page, view):
            return None
        segment = self._files.with_room(old.length)
        segment.file.writev([view], segment.size)
        new = Extent(segment, segment.size, old.length, old.header_sum)
        segment.size += old.length
        return new

    def _is_sound(self, page: StoredPage, into: memoryview) -> bool:
        """Read a page and check it; one that is not what was written leaves service, as one that cannot be read."""
        try:
            page.extent.segment.file.readv([into], page.extent.offset)
            self._forms.check(page.expected, into)
        except UnreadableError:
            self._pool.withdraw_extent(page.row, page.stamp, page.extent, MissReason.UNAVAILABLE)
        except OSError:
            self._pool.quarantine_extent(page.row, page.stamp, page.extent, MissReason.UNAVAILABLE)
        except IntegrityError:
            self._pool.quarantine_extent(page.row, page.stamp, page.extent, MissReason.CORRUPT)
        else:
            return True
        return False
