"""Pages from an attached tier into their frames, each one checked as it arrives (R6)."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Sequence

from workmem.core.clock import Clock
from workmem.core.errors import IntegrityError
from workmem.core.events import BlockPromoted, EventSink
from workmem.core.outcomes import MissReason, TierName
from workmem.store.breaker import Breaker
from workmem.store.catalog import Promotion
from workmem.store.pool import Pool
from workmem.store.tiers.attached import AttachedTier
from workmem.store.tiers.contract import Outcome, PageIn, PageName
from workmem.store.tiers.page_check import Expected
from workmem.store.tiers.page_header import set_generation

log = logging.getLogger(__name__)


class AttachedReader:
    """See `reader.ReaderThreads`, whose place it takes. Threads are the tier's."""

    def __init__(self, pool: Pool, breaker: Breaker, clock: Clock, sink: EventSink) -> None:
        self._pool = pool
        self._attached: AttachedTier | None = None
        """None while there is none to ask."""
        self._breaker = breaker
        self._clock = clock
        self._sink = sink
        self._changed = threading.Condition()
        self._under_way = 0
        self._asked: set[_Batch] = set()

    def ask(self, attached: AttachedTier) -> None:
        """Bring pages from this one from now on."""
        with self._changed:
            self._attached = attached

    def let_go(self) -> None:
        """Ask the tier for nothing any more: what is asked for is a miss."""
        with self._changed:
            self._attached = None

    def give_up(self) -> None:
        """The tier has closed and writes to no page any more: what it never answered for will not come."""
        with self._changed:
            asked = list(self._asked)
        for batch in asked:
            batch.give_up()

    def submit(self, promotions: Sequence[Promotion]) -> None:
        """Read these, given in prefix order; returns at once."""
        if not promotions:
            return
        with self._changed:
            attached = self._attached
            batch = _Batch(self, attached, promotions, self._clock.monotonic())
            self._under_way += len(promotions)
            self._asked.add(batch)
        if attached is None:
            batch.give_up()
            return
        try:
            attached.tier.get(batch.pages, batch.done)
        except Exception:  # plugin boundary: whoever waits must hear of it
            log.exception("a tier raised instead of answering")
            for index in range(len(promotions)):
                batch.done(index, Outcome.FAILED)

    def close(self, timeout_s: float) -> bool:
        """Wait for what is under way. False if it takes longer than `timeout_s`: frames may still be written to."""
        until = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, until - time.monotonic())

    def page_of(self, promotion: Promotion) -> PageIn:
        """What to ask the tier for."""
        frame = promotion.frame
        into = self._pool.state.arena.writable(frame.offset, frame.size)
        return PageIn(PageName(promotion.space.root, bytes(promotion.key)), into)

    def settle(
        self,
        attached: AttachedTier | None,
        promotion: Promotion,
        page: memoryview,
        outcome: Outcome,
        started: float,
    ) -> None:
        """A page arrived, or did not."""
        leases = self._pool.leases
        if attached is None:
            leases.promotion_gone(promotion, MissReason.UNAVAILABLE)
        elif outcome is Outcome.DONE:
            self._breaker.read_worked()
            self._check(attached, promotion, page, started)
        elif outcome is Outcome.FAILED:
            self._breaker.read_failed(OSError(errno.EIO, "the tier failed to bring a page"))
            leases.promotion_failed(promotion, MissReason.UNAVAILABLE)
        else:
            leases.promotion_gone(promotion, MissReason.EVICTED)

    def ended(self, batch: _Batch, promotion: Promotion, *, is_last: bool) -> None:
        """The tier has let go of the page's memory."""
        with self._pool.state.outbox:
            # Nothing closes with the last read of it: it stands for the whole tier.
            promotion.extent.segment.readers -= 1
        with self._changed:
            self._under_way -= 1
            if is_last:
                self._asked.discard(batch)
            self._changed.notify_all()

    def _check(self, attached: AttachedTier, promotion: Promotion, page: memoryview, started: float) -> None:
        catalog, row, space = self._pool.state.catalog, promotion.row, promotion.space
        parent, depth, header_sum = catalog.parent[row], catalog.depth[row], promotion.extent.header_sum
        expected = Expected(space.layout, space.root, promotion.key, parent, depth, header_sum)
        try:
            attached.forms.open(expected, page, page)
        except IntegrityError as error:
            log.warning("a page from the tier below dram is not what was put there: %s", error)
            self._pool.leases.promotion_failed(promotion, MissReason.CORRUPT)
            return
        with page[: space.header_bytes] as header:
            set_generation(header, promotion.frame.generation)
        if self._pool.leases.promoted(promotion):
            self._sink(
                BlockPromoted(
                    source=attached.tier.kind,
                    target=TierName.DRAM,
                    blocks=1,
                    page_bytes=space.layout.page_bytes,
                    seconds=self._clock.monotonic() - started,
                )
            )


class _Batch:
    """One call of `get`: each page is settled once, whatever the tier calls."""

    def __init__(
        self,
        reader: AttachedReader,
        attached: AttachedTier | None,
        promotions: Sequence[Promotion],
        started: float,
    ) -> None:
        self._reader = reader
        self._attached = attached
        self._promotions = promotions
        self._started = started
        self._lock = threading.Lock()
        self._left = set(range(len(promotions)))
        self.pages = [reader.page_of(promotion) for promotion in promotions]

    def done(self, index: int, outcome: Outcome) -> None:
        """See `contract.Tier.get`."""
        with self._lock:
            if index not in self._left:
                log.warning("a tier answered for a page twice, or for none")
                return
            self._left.discard(index)
            is_last = not self._left
        promotion, page = self._promotions[index], self.pages[index].into
        try:
            self._reader.settle(self._attached, promotion, page, outcome, self._started)
        finally:
            # A tier that has not let go of it says DONE too early; the read is over all the same.
            with contextlib.suppress(BufferError):
                page.release()
            self._reader.ended(self, promotion, is_last=is_last)

    def give_up(self) -> None:
        """Nobody answers any more."""
        with self._lock:
            left = list(self._left)
            self._attached = None
        for index in left:
            self.done(index, Outcome.ABSENT)
