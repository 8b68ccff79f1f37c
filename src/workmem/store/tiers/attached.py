"""A tier of the contract below the store: its pages are rows of the index, its writes the writer thread's.

It stands where the ssd tier stands: same index, same eviction order, same breaker.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Container, Sequence
from pathlib import Path

from workmem.core.errors import IntegrityError
from workmem.core.keys import BlockKey
from workmem.policy.choose import EvictionName
from workmem.store.catalog import Space
from workmem.store.pool import Pool
from workmem.store.ssd_index import FoundPage, SsdIndex
from workmem.store.ssd_strikes import Owed
from workmem.store.ssd_writes import WriteJob, WriteQueue
from workmem.store.tiers.advice import Advice
from workmem.store.tiers.contract import (
    CLOSE_S,
    PUT_S,
    AdvisedTier,
    ArenaMemory,
    HeldPage,
    ListeningTier,
    LosingTier,
    Outcome,
    PageName,
    PageOut,
    SharedTier,
    Tier,
)
from workmem.store.tiers.journal_records import DeleteEntry
from workmem.store.tiers.page_forms import PageForms
from workmem.store.tiers.page_header import checksum_of, identity_of
from workmem.store.tiers.segments import Extent, Segment

log = logging.getLogger(__name__)

_BATCH_BYTES = 32 * 2**20
_NO_BOUND = 1 << 60
_ADOPT_STEP = 256
_PLACE = 1
"""All pages lie in one place: where exactly is the tier's business."""


class AttachedTier:
    """See `tiers.ssd.SsdTier`, whose place it takes."""

    def __init__(
        self, tier: Tier, pool: Pool, eviction: EvictionName = "value", index: SsdIndex | None = None
    ) -> None:
        """Opens the tier. Raises OSError where it cannot be used.

        `index`: that of the tier which this one comes in place of; it is empty. Follow with `restore`, or with `adopt`.
        """
        self.tier = tier
        self.forms = PageForms()
        self._pool = pool
        self._held = _opened(tier, pool)
        # Not before: only then a medium has to know its size.
        self.capacity_bytes = tier.usage().capacity_bytes or _NO_BOUND
        self.index = index or SsdIndex(pool.state, self.capacity_bytes, eviction)
        self.writes = WriteQueue(pool.state, self.index, self.capacity_bytes)
        self._advice = Advice(pool, tier, self.index) if isinstance(tier, AdvisedTier) else None
        if self._advice is not None:
            self.writes.facts_of = self._advice.facts_of
        self.place = Segment(_PLACE, Path(), _NoFile(), 0)
        self.place.is_whole_tier = True
        self.index.segments[_PLACE] = self.place
        self.roots: dict[int, bytes] = {}
        """Of every namespace that has had a page here, by its number: strikes know it by that."""
        self._listening = threading.Lock()
        self._is_deaf = False

    @property
    def batch_bytes(self) -> int:
        """Most bytes to hand to one `write`."""
        return min(_BATCH_BYTES, max(self.capacity_bytes // 4, 1))

    def restore(self) -> None:
        """Take over what it holds from before, at a start."""
        self._adopt_all({}, lambda: True)
        self._listen()

    def adopt(
        self, before: AttachedTier | None, owed: Owed, purged: set[bytes], may_go_on: Callable[[], bool]
    ) -> bool:
        """As `restore`, beside a pool in use and in place of `before`, step by step. False where `may_go_on` ended that.

        `owed` is what left `before` and it may not know; `purged` are roots of namespaces that were purged
        meanwhile, empty afterwards.
        """
        state, strikes = self._pool.state, self.index.strikes
        if before is not None:
            self.roots |= before.roots
        names = {
            PageName(self.roots[entry.number], bytes(entry.key))
            for entry in owed.entries
            if isinstance(entry, DeleteEntry) and entry.number in self.roots
        }
        with state.outbox:
            strikes.take_over(owed)
            roots = set(purged)
            purged.clear()
            state.drop_space = strikes.drop_space
        gone = [page for page in self._held if page.name.root in roots]
        for page in gone:
            space, _ = self._pool.add_space(page.namespace)
            self.roots[space.number] = space.root
            names.add(page.name)
            strikes.return_deletes([DeleteEntry(space.number, page.name.key)])
        is_done = self._adopt_all(names, may_go_on)
        if is_done:
            self._strike()
            self._listen()
        return is_done

    def look_sooner(self, seconds: float) -> None:
        """Somebody waits for pages that other stores put."""
        if isinstance(self.tier, ListeningTier):
            self.tier.look_sooner(seconds)

    def turn_deaf(self) -> None:
        """Take in nothing more that other stores put. On return none is being taken in."""
        self._is_deaf = True
        with self._listening:
            pass

    def _listen(self) -> None:
        if isinstance(self.tier, LosingTier):
            self.tier.watch_losses(self._lost)
        if isinstance(self.tier, SharedTier):
            self.tier.watch(self._seen)

    def _seen(self, pages: Sequence[HeldPage]) -> None:
        """Others put these: hits from now on, believed when they come."""
        with self._listening:
            self._take_in(pages, {}, lambda: not self._is_deaf)

    def _lost(self, names: Sequence[PageName]) -> None:
        """The tier has these no more: they are no hits any longer, before somebody asks in vain."""
        with self._listening:
            if not self._is_deaf:
                self.index.lose([(name.root, BlockKey(name.key)) for name in names])

    def _adopt_all(self, but: Container[PageName], may_go_on: Callable[[], bool]) -> bool:
        held, self._held = self._held, []
        return self._take_in(held, but, may_go_on)

    def _take_in(
        self, held: Sequence[HeldPage], but: Container[PageName], may_go_on: Callable[[], bool]
    ) -> bool:
        known: dict[bytes, Space] = {}
        for at in range(0, len(held), _ADOPT_STEP):
            if not may_go_on():
                return False
            by_space: dict[Space, list[FoundPage]] = {}
            for page in held[at : at + _ADOPT_STEP]:
                space = None if page.name in but else self._space_of(page, known)
                if space is not None:
                    extent = Extent(self.place, 0, page.length, page.header_sum)
                    found = (BlockKey(page.name.key), page.parent, page.depth, extent)
                    by_space.setdefault(space, []).append(found)
            for known_space, pages in by_space.items():
                space, is_taken = known_space, self.index.take_in(known_space, pages)
                if not is_taken and space.is_forgotten:
                    # It was empty a moment ago. To strike its pages out would take them from all who share the tier.
                    space = known[space.root] = self._pool.add_space(space.namespace)[0]
                    self.roots[space.number] = space.root
                    is_taken = self.index.take_in(space, pages)
                if not is_taken:
                    # Purged meanwhile: nothing else remembers them.
                    self.index.strikes.return_deletes([DeleteEntry(space.number, page[0]) for page in pages])
        return True

    def write(self, jobs: list[WriteJob]) -> list[Extent | None]:
        """Have pages kept. None stands for one that was refused. Raises OSError with nothing acknowledged."""
        self._strike()
        self._make_room(sum(job.length for job in jobs))
        arena = self._pool.state.arena
        frames = [arena.writable(job.frame.offset, job.frame.size) for job in jobs]
        out = [self._out(job, frame) for job, frame in zip(jobs, frames, strict=True)]
        try:
            outcomes = self._put(out)
        except OSError:
            # It may have kept any of them, and nothing else remembers that: a purge would miss them.
            self.index.strikes.return_deletes(
                [
                    DeleteEntry(job.space.number, page.about.name.key)
                    for job, page in zip(jobs, out, strict=True)
                ]
            )
            raise
        finally:
            for frame in frames:
                frame.release()
        return [
            Extent(self.place, 0, page.about.length, page.about.header_sum)
            if outcome is Outcome.DONE
            else None
            for page, outcome in zip(out, outcomes, strict=True)
        ]

    def _put(self, out: Sequence[PageOut]) -> list[Outcome]:
        outcomes = gather(len(out), lambda done: self.tier.put(out, done))
        if Outcome.FAILED in outcomes:
            raise OSError(errno.EIO, f"{outcomes.count(Outcome.FAILED)} of {len(out)} pages were not kept")
        return outcomes

    def tend(self) -> None:
        """Pass on what left. Raises OSError where the tier fails to drop it."""
        self._strike()

    def probe(self) -> None:
        """Do something that does no harm. Raises OSError while the tier refuses."""
        self._drop([PageName(bytes(32), bytes(32))])

    def folder_is_ours(self) -> bool:
        """There is no folder to be lost."""
        return True

    def close(self) -> bool:
        """Let go of the tier. False where it may still touch the arena."""
        self.turn_deaf()
        ended = self.tier.close(CLOSE_S)
        if not ended:
            log.warning("the tier below dram did not end in %g s; the arena's memory is kept", CLOSE_S)
        return ended

    def _space_of(self, page: HeldPage, known: dict[bytes, Space]) -> Space | None:
        """The namespace of a page that can be what it says; None of another."""
        root = page.name.root
        if not (0 <= page.depth < 1 << 32 and 0 <= page.header_sum < 1 << 64):
            return None
        if root not in known:
            if page.namespace.root() != root:
                return None
            known[root] = self._pool.add_space(page.namespace)[0]
        space = known[root]
        if page.length != space.frame_bytes:
            return None
        self.roots[space.number] = root
        return space

    def _out(self, job: WriteJob, frame: memoryview) -> PageOut:
        space = job.space
        self.roots[space.number] = space.root
        key, parent, depth = identity_of(frame)
        name = PageName(space.root, bytes(key))
        about = HeldPage(name, space.namespace, parent, depth, len(frame), checksum_of(frame))
        return PageOut(about, frame.toreadonly(), job.facts)

    def _make_room(self, need: int) -> None:
        over = self.index.live_bytes + need - self.capacity_bytes
        if over > 0:
            self.index.evict(over)
            self._strike()

    def _strike(self) -> None:
        """Have the tier drop what left, before anything newer is put under the same names."""
        strikes = self.index.strikes
        entries = strikes.take_deletes()
        names = [
            PageName(self.roots[entry.number], bytes(entry.key))
            for entry in entries
            if isinstance(entry, DeleteEntry) and entry.number in self.roots
        ]
        try:
            self._drop(names)
        except BaseException:
            # Whatever it was: a purge that is forgotten leaves pages behind.
            strikes.return_deletes(entries)
            raise
        strikes.strikes_are_durable()

    def _drop(self, names: Sequence[PageName]) -> None:
        if names and Outcome.FAILED in gather(len(names), lambda done: self.tier.drop(names, done)):
            raise OSError(errno.EIO, "the tier failed to drop pages")


def _opened(tier: Tier, pool: Pool) -> list[HeldPage]:
    arena = pool.state.arena
    try:
        # All of it before the first page is believed: it may come from a generator that fails half-way.
        return list(tier.open(ArenaMemory(arena.base_address, arena.capacity_bytes)))
    except OSError:
        tier.close(CLOSE_S)
        raise
    except Exception as error:  # plugin boundary: a tier is other people's code
        log.exception("a tier raised instead of opening")
        tier.close(CLOSE_S)
        raise OSError(errno.EIO, f"the tier raised {error!r}") from error


def gather(count: int, call: Callable[[Callable[[int, Outcome], None]], None]) -> list[Outcome]:
    """Run a batch and wait until all of it is done; what is not within PUT_S has failed."""
    outcomes: list[Outcome | None] = [None] * count
    left, lock, ended = [count], threading.Lock(), threading.Event()

    def done(index: int, outcome: Outcome) -> None:
        with lock:
            if outcomes[index] is None:
                outcomes[index] = outcome
                left[0] -= 1
                if not left[0]:
                    ended.set()

    try:
        call(done)
    except Exception as error:  # plugin boundary: a tier is other people's code
        log.exception("a tier raised instead of answering")
        raise OSError(errno.EIO, f"the tier raised {error!r}") from error
    ended.wait(PUT_S)
    with lock:
        return [outcome or Outcome.FAILED for outcome in outcomes]


class _NoFile:
    """The pages of an attached tier lie in no file of ours."""

    is_direct = False

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        del buffers, offset
        raise IntegrityError("a page of an attached tier was asked for as if it lay in a segment")

    def writev(self, buffers: Sequence[memoryview], offset: int) -> None:
        self.readv(buffers, offset)

    def sync(self) -> None:
        pass

    def size(self) -> int:
        return 0

    def truncate(self, size: int) -> None:
        del size

    def close(self) -> None:
        pass
