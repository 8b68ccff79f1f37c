"""What lies below dram, with its threads: one that reads, one that writes and opens it anew, one that scrubs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workmem.core.clock import Clock
from workmem.core.events import EventSink
from workmem.core.units import parse_bytes
from workmem.store.breaker import Breaker
from workmem.store.catalog import Promotion
from workmem.store.config import SsdConfig
from workmem.store.pool import Pool
from workmem.store.reader import ReaderThreads
from workmem.store.rebuilding import Rebuilding
from workmem.store.scrub_source import SsdScrubSource
from workmem.store.scrubber import Scrubber, ScrubThread
from workmem.store.ssd_index import StoredPage
from workmem.store.tiers.attached import AttachedTier
from workmem.store.tiers.attached_reader import AttachedReader
from workmem.store.tiers.opening import TierOpening
from workmem.store.tiers.ssd import SsdTier
from workmem.store.writer import WriterThread

SOON_FOR_S = 0.5
"""Longer than whoever waits takes to say so again."""


class Below:
    """Opened with the store; where nothing is configured it holds nothing and does nothing.

    Raises ConfigError on a folder that is not to be taken.
    """

    def __init__(
        self, opening: TierOpening, config: SsdConfig, pool: Pool, sink: EventSink, clock: Clock
    ) -> None:
        self.opening = opening
        self._readers = config.readers
        self._pool = pool
        self._sink = sink
        self._clock = clock
        self._rate = parse_bytes(config.scrub_bytes_per_s, "$.store.ssd.scrub_bytes_per_s")
        self.breaker = Breaker(clock, sink, config.retry_s, pool.state.below)
        attached = None if self.opening.is_ssd else AttachedReader(pool, self.breaker, clock, sink)
        self.life = Rebuilding(pool, self.opening, self.breaker, attached, clock, config.retry_s)
        if self.opening.is_wanted:
            self.life.start()
        self.reader: ReaderThreads | AttachedReader | None = attached
        self.scrubber: Scrubber[StoredPage] | None = None
        self._writer: WriterThread | None = None
        self._scrub_thread: ScrubThread | None = None

    @property
    def tier(self) -> SsdTier | AttachedTier | None:
        """The one that is open, or was last."""
        return self.life.tier

    def begin(self) -> None:
        """Start the threads. Nothing of the store can fail any more."""
        if not self.opening.is_wanted:
            return
        index = self.opening.index
        if self.opening.is_ssd and index is not None:
            self.reader = ReaderThreads(
                self._pool,
                index,
                self.opening.forms,
                self.breaker,
                self._clock,
                self._sink,
                self._readers,
            )
        self._writer = WriterThread(self._pool, self.life, self.breaker)
        if self._rate and (scrubber := self.scrub(self._rate)) is not None:
            self.scrubber = scrubber
            self._scrub_thread = ScrubThread(scrubber.step)

    def scrub(self, bytes_per_s: int) -> Scrubber[StoredPage] | None:
        """A scrubber of its own for one pass; None without an ssd tier."""
        index = self.opening.index
        if not self.opening.is_ssd or index is None:
            return None
        forms = self.opening.forms
        source = SsdScrubSource(self._pool, index, forms, lambda: self.breaker.reads_open)
        return Scrubber(source, self._clock, self._sink, bytes_per_s)

    def submit(self, promotions: Sequence[Promotion]) -> None:
        """Bring these to dram, given in prefix order."""
        if promotions:
            assert self.reader is not None
            self.reader.submit(promotions)

    def look_sooner(self) -> None:
        """Somebody waits for a block that is nowhere: other stores may be putting it into a tier that all share."""
        tier = self.life.tier
        if isinstance(tier, AttachedTier) and not self.life.is_away:
            tier.look_sooner(SOON_FOR_S)

    def tick(self) -> None:
        """What is due although nobody calls: look whether the folder is still there, end pauses."""
        life, breaker = self.life, self.breaker
        if life.is_away:
            return
        tier = life.tier
        if tier is not None and not tier.folder_is_ours() and tier is life.tier and not life.is_away:
            breaker.folder_lost()
        breaker.tick()
        with self._pool.state.outbox:
            if not life.is_away:
                self._pool.state.reads_ssd = not breaker.reads_open

    def is_settled(self) -> bool:
        """Nothing waits for it, of what can be waited for: what it was to forget while it fails comes later."""
        index = self.opening.index
        return index is None or self.breaker.writes_open or index.strikes.is_settled

    def owes_purge(self) -> bool:
        """Something of a purged namespace may come back with its files. One that lost its folder has none."""
        return self.opening.is_wanted and not self.breaker.is_lost and self.life.owes_purge

    def end(self, left: Callable[[], float]) -> list[bool]:
        """Have the threads end, each after the call under way. Whether each did within `left` seconds."""
        threads = (self._scrub_thread, self.reader, self._writer)
        return [thread.close(left()) for thread in threads if thread is not None]

    def close(self) -> bool:
        """Let go of the tier, once no thread uses it. False where it may still touch the arena."""
        return self.life.tier is None or self.life.tier.close()
