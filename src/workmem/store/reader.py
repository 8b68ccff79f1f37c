"""Reader threads: pages from ssd into their frames, neighbours in one call, each one checked (R6)."""

from __future__ import annotations

import logging
import mmap
import queue
import threading
from collections.abc import Sequence

from workmem.core.clock import Clock
from workmem.core.errors import IntegrityError
from workmem.core.events import BlockPromoted, EventSink
from workmem.core.outcomes import MissReason, TierName
from workmem.store.breaker import Breaker
from workmem.store.catalog import Promotion
from workmem.store.codecs.contract import UnreadableError
from workmem.store.pool import Pool
from workmem.store.ssd_index import SsdIndex
from workmem.store.tiers.page_check import Expected
from workmem.store.tiers.page_forms import PageForms
from workmem.store.tiers.page_header import set_generation

log = logging.getLogger(__name__)

_RUN_BYTES = 2 * 2**20
"""Most bytes of one read: long enough for the disk's full rate, short enough that page 1 is early."""


class ReaderThreads:
    """`count` threads that serve promotions in the order they were asked for."""

    def __init__(
        self,
        pool: Pool,
        index: SsdIndex,
        forms: PageForms,
        breaker: Breaker,
        clock: Clock,
        sink: EventSink,
        count: int,
    ) -> None:
        self._pool = pool
        self._index = index
        self._forms = forms
        self._scratch = Scratch()
        self._breaker = breaker
        self._clock = clock
        self._sink = sink
        self._runs: queue.SimpleQueue[list[Promotion] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._main, name=f"workmem-ssd-read-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, promotions: Sequence[Promotion]) -> None:
        """Read these, given in prefix order."""
        for run in _runs(promotions):
            self._runs.put(run)

    def close(self, timeout_s: float) -> bool:
        """End after what is queued. False if a read takes longer than `timeout_s`."""
        for _ in self._threads:
            self._runs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _main(self) -> None:
        while (run := self._runs.get()) is not None:
            try:
                self._read(run)
            except Exception as error:  # thread main: whoever waits must hear of it
                log.exception("reading pages met a bug of ours")
                self._fail(run, error)
            self._index.end_read(run[0].extent.segment, len(run))

    def _read(self, run: list[Promotion]) -> None:
        started = self._clock.monotonic()
        arena = self._pool.state.arena
        pages = [arena.writable(promotion.frame.offset, promotion.frame.size) for promotion in run]
        stored = self._landing(run, pages)
        try:
            error = self._fill(run, stored)
            if error is None:
                arrived = self._settle(run, stored, pages)
            else:
                arrived = self._retry_alone(run, stored, pages, error)
        finally:
            for page in pages:
                page.release()
        if not arrived:
            return
        seconds = self._clock.monotonic() - started
        self._sink(
            BlockPromoted(
                source=TierName.SSD,
                target=TierName.DRAM,
                blocks=arrived,
                page_bytes=run[0].space.layout.page_bytes,
                seconds=seconds,
            )
        )

    def _landing(self, run: list[Promotion], pages: list[memoryview]) -> list[memoryview]:
        """Where the bytes on disk go: into the frame as they are, or beside it to be decoded from there."""
        lands = [
            self._forms.lands_in_frame(promotion.extent.length, len(page))
            for promotion, page in zip(run, pages, strict=True)
        ]
        lengths = [promotion.extent.length for promotion in run]
        if all(lands):
            return pages
        room, at = self._scratch.room(sum(lengths)), 0
        stored: list[memoryview] = []
        for page, straight, length in zip(pages, lands, lengths, strict=True):
            stored.append(page if straight else room[at : at + length])
            at += length
        return stored

    def _fill(self, run: list[Promotion], stored: list[memoryview]) -> OSError | None:
        try:
            run[0].extent.segment.file.readv(stored, run[0].extent.offset)
        except OSError as error:
            return error
        return None

    def _retry_alone(
        self, run: list[Promotion], stored: list[memoryview], pages: list[memoryview], error: OSError
    ) -> int:
        """One bad sector must not cost its neighbours: read each page by itself. Returns how many arrived."""
        if len(run) == 1:
            self._breaker.read_failed(error)
            self._pool.leases.promotion_failed(run[0], MissReason.UNAVAILABLE)
            return 0
        arrived = 0
        for promotion, source, page in zip(run, stored, pages, strict=True):
            alone = self._fill([promotion], [source])
            if alone is None:
                arrived += self._settle([promotion], [source], [page])
            else:
                arrived += self._retry_alone([promotion], [source], [page], alone)
        return arrived

    def _settle(self, run: list[Promotion], stored: list[memoryview], pages: list[memoryview]) -> int:
        """Check the pages that were read and give them out. Returns how many are what was written."""
        self._breaker.read_worked()
        catalog = self._pool.state.catalog
        arrived = 0
        for promotion, source, page in zip(run, stored, pages, strict=True):
            row, space = promotion.row, promotion.space
            # Read before it is known to be the same block still: if it is not, the page is lost below.
            parent, depth, header_sum = catalog.parent[row], catalog.depth[row], promotion.extent.header_sum
            expected = Expected(space.layout, space.root, promotion.key, parent, depth, header_sum)
            try:
                self._forms.open(expected, source, page)
            except UnreadableError:
                self._pool.count("ssd_unreadable", 1)
                self._pool.leases.promotion_gone(promotion, MissReason.UNAVAILABLE)
            except IntegrityError:
                self._pool.leases.promotion_failed(promotion, MissReason.CORRUPT)
            else:
                set_generation(page[: promotion.space.header_bytes], promotion.frame.generation)
                arrived += self._pool.leases.promoted(promotion)
        return arrived

    def _fail(self, run: list[Promotion], error: Exception) -> None:
        self._breaker.read_failed(error)
        for promotion in run:
            if self._pool.state.catalog.promotion.get(promotion.row) is promotion:
                self._pool.leases.promotion_failed(promotion, MissReason.UNAVAILABLE)


def _runs(promotions: Sequence[Promotion]) -> list[list[Promotion]]:
    """Cut into runs that lie side by side on disk."""
    runs: list[list[Promotion]] = []
    total = 0
    for promotion in promotions:
        extent = promotion.extent
        if runs:
            last = runs[-1][-1].extent
            follows = extent.segment is last.segment and extent.offset == last.offset + last.length
            if follows and total + extent.length <= _RUN_BYTES:
                runs[-1].append(promotion)
                total += extent.length
                continue
        runs.append([promotion])
        total = extent.length
    return runs


class Scratch(threading.local):
    """Memory of a reader thread, aligned for the disk and kept, for pages that are not stored as they lie in a frame."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def room(self, size: int) -> memoryview:
        """The first `size` bytes; valid until asked again."""
        if self._memory is None or len(self._memory) < size:
            # The old one goes once nobody looks at it any more.
            self._memory = mmap.mmap(-1, size)
        return memoryview(self._memory)[:size]
