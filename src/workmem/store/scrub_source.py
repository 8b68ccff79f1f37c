"""What the ssd tier shows the scrubber: its live pages, read and checked one at a time."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

from workmem.core.outcomes import MissReason
from workmem.store.codecs.contract import UnreadableError
from workmem.store.pool import Pool
from workmem.store.ssd_index import SsdIndex, StoredPage
from workmem.store.tiers.page_forms import PageForms


class SsdScrubSource:
    """See `scrubber.ScrubSource`. `is_left_alone` tells whether the disk is tripped."""

    def __init__(
        self, pool: Pool, index: SsdIndex, forms: PageForms, is_left_alone: Callable[[], bool]
    ) -> None:
        self._pool = pool
        self._index = index
        self._forms = forms
        self._is_left_alone = is_left_alone

    def segments(self) -> Sequence[int]:
        """See `ScrubSource.segments`."""
        return sorted(segment.number for segment in list(self._index.segments.values()) if segment.page_count)

    def pages(self, segment: int) -> Sequence[StoredPage]:
        """See `ScrubSource.pages`."""
        found = self._index.segments.get(segment)
        return [] if found is None else self._index.pages_of(found)

    def read(self, page: StoredPage) -> int | None:
        """See `ScrubSource.read`."""
        extent = page.extent
        if not self._index.begin_read(extent.segment):
            return None
        try:
            # Freed with its last view: an error on its way up still holds some.
            view = memoryview(mmap.mmap(-1, extent.length))
            extent.segment.file.readv([view], extent.offset)
            self._forms.check(page.expected, view)
        except UnreadableError:
            self._pool.withdraw_extent(page.row, page.stamp, extent, MissReason.UNAVAILABLE)
            return None
        finally:
            self._index.end_read(extent.segment, 1)
        return extent.length

    def quarantine(self, page: StoredPage, reason: MissReason) -> None:
        """See `ScrubSource.quarantine`."""
        self._pool.quarantine_extent(page.row, page.stamp, page.extent, reason)

    def is_busy(self) -> bool:
        """See `ScrubSource.is_busy`."""
        return bool(self._pool.state.catalog.promotion) or self._is_left_alone()
