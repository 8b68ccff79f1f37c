"""The ssd tier: pages in append-only segments, a journal that says where, and the room they take.

One thread writes (`write`, `tend`); any number read. What is acknowledged has reached the disk in this
order: data, sync, journal, sync, index (R2).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TYPE_CHECKING

from workmem.core.errors import ConfigError, IntegrityError
from workmem.core.events import BoundReached, EventSink
from workmem.core.layout import Namespace
from workmem.policy.choose import EvictionName
from workmem.store.catalog import Catalog, Space
from workmem.store.codecs.contract import UnreadableError
from workmem.store.device import BlockDevice
from workmem.store.pool import Pool
from workmem.store.ssd_index import FoundPage, SsdIndex
from workmem.store.ssd_strikes import Owed
from workmem.store.ssd_writes import WriteJob, WriteQueue
from workmem.store.tiers.entries import erase_entries, namespace_entry
from workmem.store.tiers.folder import StoreFolder
from workmem.store.tiers.free_space import KeepFree
from workmem.store.tiers.journal import Journal
from workmem.store.tiers.journal_records import DropEntry, NamespaceEntry, PutEntry
from workmem.store.tiers.page_forms import PageForms
from workmem.store.tiers.replay import Replay
from workmem.store.tiers.room import Room
from workmem.store.tiers.segment_files import SegmentFiles
from workmem.store.tiers.segments import SEGMENT_BYTES_MAX, SEGMENT_HEADER_BYTES, Extent
from workmem.store.tiers.staging import Staging, release

if TYPE_CHECKING:
    from workmem.store.tiers.journal_records import Record

log = logging.getLogger(__name__)

WRITE_BATCH_BYTES = 32 * 2**20
"""Most bytes under one pair of syncs."""


ADOPT_STEP = 256
"""Pages that are taken in under one hold of the lock: a millisecond or two."""


def promised_bytes(capacity_bytes: int) -> int:
    """What of a capacity is always there for pages: two segments are kept back. No page may take more."""
    return capacity_bytes - 2 * _segment_bytes(capacity_bytes)


def _segment_bytes(capacity_bytes: int) -> int:
    return min(SEGMENT_BYTES_MAX, max(capacity_bytes // 8, 2 * SEGMENT_HEADER_BYTES))


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
        eviction: EvictionName = "value",
        forms: PageForms | None = None,
        index: SsdIndex | None = None,
    ) -> None:
        """`index`: that of the tier which this one comes in place of; it is empty."""
        self._folder = folder
        self._pool = pool
        self._sink = sink
        self.capacity_bytes = capacity_bytes
        self.index = index or SsdIndex(pool.state, capacity_bytes, eviction)
        self.writes = WriteQueue(pool.state, self.index, promised_bytes(capacity_bytes))
        self._files = SegmentFiles(folder, self.index, device, sink, _segment_bytes(capacity_bytes))
        self.forms = forms or PageForms()
        self._staging = Staging(pool.state.arena, self.forms)
        self._room = Room(
            folder,
            pool,
            self.index,
            self._files,
            self.forms,
            sink,
            capacity_bytes,
            keep_free or KeepFree(),
            self._append,
        )
        self._journal = Journal(device, folder.journal, folder.store_id, folder.keyring)
        self._announced: set[int] = set()
        """Numbers of namespaces that the journal knows."""

    @property
    def batch_bytes(self) -> int:
        """Most bytes to hand to one `write`."""
        return min(WRITE_BATCH_BYTES, self.capacity_bytes // 4)

    def use_buffered(self) -> None:
        """Go through the page cache."""
        self._files.use_buffered()

    # -- start

    def open(self) -> None:
        """Replay the journal. Time is proportional to it, not to the data."""
        with _collector_off():
            state = self._pool.state
            replay = self._replay(
                state.catalog,
                lambda namespace, number: self._pool.add_space(namespace, number=number)[0],
                self._pool.forget_space,
            )
            for space in replay.spaces:
                self._announced.add(space.number)
                self.index.restore(space, replay.rows(space), replay.parents(space))
            self._pool.number_from(replay.last_number + 1)
            self.index.strikes.erase(replay.erasures & self.index.segments.keys())
            self._settle(replay)
        _give_back_memory()

    def open_beside(self, owed: Owed) -> Replay:
        """As `open`, beside a pool in use, which sees nothing of it until `adopt`. `owed`: what left since the journal."""
        spaces: dict[bytes, Space] = {}

        def open_space(namespace: Namespace, number: int) -> Space:
            return spaces.setdefault(namespace.root(), Space(namespace, number))

        def close_space(space: Space) -> None:
            if spaces.get(space.root) is space:
                del spaces[space.root]

        with _collector_off():
            return self._replay(Catalog(), open_space, close_space, owed.entries)

    def adopt(self, found: Replay, owed: Owed, purged: set[bytes], may_go_on: Callable[[], bool]) -> bool:
        """Put what `open_beside` found into the index, step by step. False where `may_go_on` ended that.

        `purged` are roots of namespaces that were purged meanwhile; it is empty afterwards.
        """
        state, strikes = self._pool.state, self.index.strikes
        with state.outbox:
            theirs = list(dict.fromkeys(found.spaces))
            stays = [space for space in theirs if space.root not in purged]
            ours = self._pool.number_as(stays, found.last_number)
            gone = [space for space in theirs if space.root in purged]
            strikes.take_over(owed + self._purged_meanwhile(found, gone))
            purged.clear()
            state.drop_space = strikes.drop_space
        self._announced = {space.number for space in theirs}
        for space, known in zip(stays, ours, strict=True):
            rows = found.rows(space)
            for at in range(0, len(rows), ADOPT_STEP):
                if not may_go_on():
                    return False
                if not self.index.take_in(known, self._found(found, rows[at : at + ADOPT_STEP])):
                    strikes.erase(set(map(found.segment_of, rows)) & self.index.segments.keys())
                    break
        if owed.has_purge:
            # It is done once a journal without those names is in place.
            strikes.leave_names()
        self._settle(found)
        return True

    def _purged_meanwhile(self, found: Replay, gone: Sequence[Space]) -> Owed:
        rows = [row for space in gone for row in found.rows(space)]
        erasures = (found.erasures | set(map(found.segment_of, rows))) & self.index.segments.keys()
        return Owed([DropEntry(space.number) for space in gone], erasures, bool(gone))

    def _found(self, found: Replay, rows: Sequence[int]) -> list[FoundPage]:
        return [found.page(row, self.index.segments) for row in rows]

    def _settle(self, replay: Replay) -> None:
        """What a start owes the folder: a journal that says what is there, and no file without a page."""
        if not replay.is_clean:
            self._pool.count("journal_records_dropped", replay.dropped)
            self.index.strikes.leave_names()
            self._try_rewrite()
        if self._journal.is_broken or not self._folder.is_under_current_key:
            self._try_rewrite()
        for segment in list(self.index.segments.values()):
            if not segment.page_count:
                self._files.remove(segment)

    def _records(self) -> Sequence[Record]:
        try:
            records = self._journal.open()
        except UnreadableError as error:
            # Starting empty would throw away what another key opens.
            raise ConfigError(
                f"$.store.ssd.key_file: the journal in {self._folder.path} does not open: {error}; "
                "name the file of that key here or in store.ssd.older_key_files"
            ) from error
        except IntegrityError as error:
            log.warning("ssd tier starts empty: %s", error)
            self._sink(BoundReached(name="store.ssd.journal", limit=0, detail=str(error)))
            self._journal.is_broken = True
            records = []
        if self._journal.torn_bytes:
            detail = f"{self._journal.torn_bytes} bytes behind the last whole batch were cut off"
            self._sink(BoundReached(name="store.ssd.journal_tail", limit=0, detail=detail))
        return records

    def _replay(
        self,
        into: Catalog,
        open_space: Callable[[Namespace, int], Space],
        close_space: Callable[[Space], None],
        later: Sequence[Record] = (),
    ) -> Replay:
        records = self._records()
        self._files.open()
        self._pool.count("segments_left_out", self._files.left_out)
        sizes = {number: segment.size for number, segment in self.index.segments.items()}
        replay = Replay(into, sizes, open_space=open_space, close_space=close_space)
        replay.take([*records, *later])
        self._files.number_from(replay.last_segment + 1)
        return replay

    def _try_rewrite(self) -> None:
        """A failure is not the end: the writer rewrites a broken journal before it adds anything."""
        try:
            self._announce_all()
        except OSError as error:
            self._journal.is_broken = True
            log.warning("the journal could not be rewritten yet: %s", error)

    def _announce_all(self) -> None:
        records = self.index.snapshot()
        if self._files.last_number and self._files.last_number not in self.index.segments:
            # Neither a page nor a file tells the next start of it, and no number is used twice.
            records += erase_entries([self._files.last_number])
        # As written, and known before the first page that is added: one without a page the journal does not know.
        announced = {entry.number for entry in records if isinstance(entry, NamespaceEntry)}
        self._journal.rewrite(records)
        self._announced = announced
        self._folder.note_current_key()
        self.index.strikes.strikes_are_durable()

    # -- writing

    def write(self, jobs: list[WriteJob]) -> list[Extent]:
        """Make pages durable. Raises OSError with nothing acknowledged."""
        if self._journal.is_broken:
            self._announce_all()
        pages = self._staging.ready(jobs)
        try:
            self._room.make(sum(page.length for page in pages))
            extents = self._files.write(pages)
        finally:
            release(pages)
        self._append(self.writes.put_entries(jobs, extents))
        return extents

    def tend(self) -> None:
        """What is due without new pages: strike outs, dead segments, a journal that is mostly dead."""
        if self._journal.is_broken or self._journal.should_rewrite(self.index.page_count):
            self._announce_all()
        if self.index.strikes.has_deletes:
            self._append([])
        self._erase()
        if self.index.strikes.names_are_left and self.index.strikes.may_erase:
            self._announce_all()
        for segment in list(self.index.segments.values()):
            if segment.is_sealed and not segment.page_count:
                self._files.remove(segment)

    def _erase(self) -> None:
        """Bytes of a purged namespace leave the disk: what else lies beside them is written again first (R9)."""
        strikes = self.index.strikes
        numbers = strikes.take_erasures()
        left = [self.index.segments[number] for number in numbers if number in self.index.segments]
        try:
            while left and strikes.may_erase:
                self._files.seal(left[-1])
                if not left[-1].page_count:
                    self._files.remove(left[-1])
                elif not self._room.compact(left[-1], lambda: strikes.may_erase):
                    break
                left.pop()
            if numbers:
                self._files.sync_removals()
        except BaseException:
            strikes.return_erasures(numbers)
            raise
        if left:
            strikes.return_erasures(numbers)
        else:
            strikes.erasures_are_done()

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
        # Those that the last run left to erase have holes, and are among them.
        self.index.strikes.take_erasures()
        for done, segment in enumerate(holed, 1):
            self._room.compact(segment)
            if on_segment is not None:
                on_segment(done, len(holed))
        self.index.strikes.erasures_are_done()
        self._announce_all()

    def probe(self) -> None:
        """Write something that does no harm. Raises OSError while the disk refuses."""
        self._announce_all()

    @property
    def store_id(self) -> bytes:
        """Of the folder."""
        return self._folder.store_id

    @property
    def last_segment(self) -> int:
        """Highest number that a segment has had."""
        return self._files.last_number

    def number_from(self, number: int) -> None:
        """Give no segment a number below: who remembers a place of before must not find another's page there."""
        self._files.number_from(number)

    @property
    def can_write(self) -> bool:
        """The journal can be added to, as far as is known."""
        return not self._journal.is_broken

    def folder_is_ours(self) -> bool:
        """Whether what is written now will be found at the next start."""
        return self._folder.is_ours()

    def close(self) -> bool:
        """Let go of all files. True: nothing of the arena is in use."""
        for segment in self.index.segments.values():
            segment.file.close()
        self._journal.close()
        self._folder.close()
        return True

    def _append(self, puts: Sequence[PutEntry]) -> None:
        strikes = self.index.strikes
        deletes = strikes.take_deletes()
        if not deletes and not puts:
            return
        try:
            # After the deletes were taken: a namespace that they drop is not named again.
            news = self._news(puts)
            self._journal.append([*deletes, *news, *puts])
        except BaseException:
            # Whatever it was: a strike, or a purge, that is forgotten brings pages back at the next start.
            strikes.return_deletes(deletes)
            raise
        if any(isinstance(entry, DropEntry) for entry in (*deletes, *news)):
            strikes.leave_names()
        strikes.strikes_are_durable()
        self._announced.update(entry.number for entry in news)

    def _news(self, puts: Sequence[PutEntry]) -> list[NamespaceEntry | DropEntry]:
        """What the journal must know before it hears of pages: a namespace is named with its first."""
        numbers = {put.number for put in puts} - self._announced
        if not numbers:
            return []
        spaces = {space.number: space for space in list(self._pool.state.spaces.values())}
        # One that is not there was purged while its pages were under way: the next start is to erase them.
        return [
            namespace_entry(spaces[number]) if number in spaces else DropEntry(number)
            for number in sorted(numbers)
        ]


@contextlib.contextmanager
def _collector_off() -> Generator[None]:
    """A million new records make the collector walk the heap again and again, for nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _give_back_memory() -> None:
    """What replay took for a while and freed stays with the C library otherwise: half again what the index takes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
