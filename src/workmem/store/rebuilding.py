"""The tier below dram from the start of a store to its end: opened, given up where it keeps failing, opened anew.

Giving up is draining: what waits for a read is a miss at once, no block counts as there any more, and files and folder are
let go. Then the tier is opened on the same settings by the code of a start. Dram serves all the while. What had
left, and what was purged, is kept in mind meanwhile: none of it comes back with the files (R9).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from workmem.core.clock import Clock
from workmem.core.errors import ConfigError
from workmem.core.outcomes import MissReason
from workmem.store.breaker import Breaker
from workmem.store.catalog import Space
from workmem.store.pool import Pool
from workmem.store.ssd_index import SsdIndex
from workmem.store.ssd_strikes import Owed
from workmem.store.tiers.attached import AttachedTier
from workmem.store.tiers.attached_reader import AttachedReader
from workmem.store.tiers.contract import CLOSE_S, TierUsage
from workmem.store.tiers.folder import Identity
from workmem.store.tiers.opening import TierOpening
from workmem.store.tiers.ssd import SsdTier

log = logging.getLogger(__name__)

PAUSE_MAX_S = 600.0
"""Pauses between attempts begin at `retry_s` and double; longer than this, or `retry_s`, they do not become."""
_STEP = 256
"""Blocks that leave the index under one hold of the lock."""


class Rebuilding:
    """Which tier lies below dram now. What changes that is the writer thread's to call, but for `start`."""

    def __init__(
        self,
        pool: Pool,
        opening: TierOpening,
        breaker: Breaker,
        reader: AttachedReader | None,
        clock: Clock,
        retry_s: float,
    ) -> None:
        """`reader`: where the tier is one that somebody installed."""
        self._pool = pool
        self.opening = opening
        self._breaker = breaker
        self._reader = reader
        self._clock = clock
        self._retry_s = retry_s
        self.tier: SsdTier | AttachedTier | None = None
        """The one that is open, or was last; None until one has been."""
        self.is_away = True
        """It is not there: drained, or not open yet."""
        self.problem = ""
        """Why it is away; empty while it is not."""
        self.rebuilds = 0
        self._is_closed = True
        """Nothing of `tier` is in use any more."""
        self._identity: Identity | None = None
        """None: whatever folder is there is taken, as at a start."""
        self._owed = Owed()
        self._purged: set[bytes] = set()
        """Roots of namespaces that were purged while it was away."""
        self._last_segment = 0
        self._failed_attempts = 0
        self._next_at = 0.0
        """While it is away: when to open it next."""
        self._back_at = self._not_before = 0.0
        self._pool.state.drop_space = self._note_purge

    @property
    def index(self) -> SsdIndex | None:
        """Of whichever tier is open; None until the first, where its size is not known before."""
        return self.opening.index

    @property
    def owes_purge(self) -> bool:
        """Something of a purged namespace may still be in the tier."""
        if self.is_away and (self._purged or self._owed.has_purge):
            return True
        return self.index is not None and self.index.strikes.owes_purge

    def usage(self) -> TierUsage:
        """Of an installed tier; zeros while it is not there."""
        if self.is_away or not isinstance(self.tier, AttachedTier):
            return TierUsage(0, 0, 0)
        try:
            return self.tier.tier.usage()
        except Exception:  # plugin boundary: readings of others must not fail with it
            log.exception("a tier raised instead of telling its usage")
            return TierUsage(0, 0, 0)

    def start(self) -> None:
        """Open it for the first time. Raises ConfigError; where only the medium fails, that is tried again."""
        try:
            tier = self.opening.open()
        except OSError as error:
            # The medium, not the setting: what can be served without it is served.
            self._breaker.tier = self._pool.state.below
            self._breaker.leave_alone()
            self._put_off(error)
            return
        self._breaker.tier = self._pool.state.below
        self._take(tier)
        self._pool.state.drop_space = tier.index.strikes.drop_space
        self._serve(tier)

    def is_due(self) -> bool:
        """It fails for good, or its turn to be opened has come."""
        now = self._clock.monotonic()
        if self.is_away:
            return now >= self._next_at
        return self._breaker.is_lost or (self._breaker.is_failing and now >= self._not_before)

    def step(self, may_go_on: Callable[[], bool]) -> None:
        """Drain it where that is due, and try to open it. Blocks; `may_go_on` is asked now and then."""
        if not self.is_away:
            self._breaker.tell(
                "draining", "it keeps failing; what it holds is a miss until it is opened anew"
            )
            self._drain()
        if not (self._is_closed or self._close()):
            self._put_off(OSError("what was asked of it has not ended"))
            return
        self._breaker.tell("rebuilding", "it is being opened; dram serves alone meanwhile")
        try:
            is_done = self._open_anew(may_go_on)
        except (OSError, ConfigError) as error:
            self._put_off(error)
        except Exception as error:  # thread main: dram serves on
            log.exception("opening the tier below dram anew met a bug of ours")
            self._put_off(error)
        else:
            if is_done:
                self._come_back()

    # -- giving up

    def _drain(self) -> None:
        tier, state = self.tier, self._pool.state
        assert tier is not None
        self._breaker.leave_alone()
        if self._reader is not None:
            self._reader.let_go()
        if isinstance(tier, AttachedTier):
            tier.turn_deaf()
        with state.outbox:
            self.is_away = True
            state.reads_ssd = state.wants_writes = False
            state.drop_space = self._note_purge
            if isinstance(tier, AttachedTier):
                # It hears of each page that left, and not of those that are still to be given up.
                self._purged.update(space.root for space in state.leaving.values())
            tier.writes.give_up_writes()
            self._pool.leases.abandon(MissReason.UNAVAILABLE)
        self._is_closed = False
        self._withdraw(tier)

    def _withdraw(self, tier: SsdTier | AttachedTier) -> None:
        """Nothing of it is in the index from now on."""
        rows = tier.index.rows()
        for at in range(0, len(rows), _STEP):
            tier.index.withdraw(rows[at : at + _STEP])
        self._owed += tier.index.strikes.hand_over()
        tier.index.let_go()
        if isinstance(tier, SsdTier):
            self._last_segment = max(self._last_segment, tier.last_segment)

    def _close(self) -> bool:
        """Let go of what it has open. False where it still uses pages of the arena."""
        tier = self.tier
        assert tier is not None
        if self._reader is not None:
            self._reader.close(CLOSE_S)
        if not tier.close():
            return False
        if self._reader is not None:
            self._reader.give_up()
        self._is_closed = True
        return True

    def _note_purge(self, space: Space) -> None:
        self._purged.add(space.root)

    # -- coming back

    def _open_anew(self, may_go_on: Callable[[], bool]) -> bool:
        if self.opening.is_ssd:
            return self._open_ssd(may_go_on)
        before = self.tier if isinstance(self.tier, AttachedTier) else None
        tier = self.opening.attach()
        self._take(tier)
        return self._adopted(tier, lambda: tier.adopt(before, self._owed, self._purged, may_go_on))

    def _open_ssd(self, may_go_on: Callable[[], bool]) -> bool:
        tier = self.opening.open_ssd(self._identity)
        if self._identity is None or tier.store_id != self._identity.before:
            # What left was of another folder.
            self._owed = Owed()
        self._take(tier)
        tier.number_from(self._last_segment + 1)

        def adopt() -> bool:
            return tier.adopt(tier.open_beside(self._owed), self._owed, self._purged, may_go_on)

        return self._adopted(tier, adopt)

    def _take(self, tier: SsdTier | AttachedTier) -> None:
        self.tier = tier
        self._is_closed = False
        self._breaker.tier = self._pool.state.below
        if isinstance(tier, SsdTier):
            self._identity = Identity.of(tier.store_id)

    def _adopted(self, tier: SsdTier | AttachedTier, adopt: Callable[[], bool]) -> bool:
        """Whether it is all in the index; where that fails nothing is."""
        try:
            return adopt()
        except BaseException:
            with self._pool.state.outbox:
                self._pool.state.drop_space = self._note_purge
            self._withdraw(tier)
            self._close()
            raise

    def _come_back(self) -> None:
        tier, now = self.tier, self._clock.monotonic()
        assert tier is not None
        if now - self._back_at > 10 * max(self._retry_s, self._not_before - self._back_at):
            self._failed_attempts = 0
        self.rebuilds += 1
        self._owed = Owed()
        self._back_at, self._not_before = now, now + self._pause()
        self._failed_attempts += 1
        is_well = self._serve(tier)
        pages = f"it was opened anew and holds {tier.index.page_count} blocks"
        if is_well:
            self._breaker.tell("ok", pages)
            self._pool.requeue_writes()
        else:
            self._breaker.tell("error", f"{pages}; it cannot be written to; again in {self._retry_s:g} s")

    def _serve(self, tier: SsdTier | AttachedTier) -> bool:
        """It is there. Returns whether it takes pages."""
        state = self._pool.state
        can_write = isinstance(tier, AttachedTier) or tier.can_write
        with state.outbox:
            self._pool.leases.extent_of = tier.index.extent
            state.wants_writes = can_write
            self.is_away, self.problem = False, ""
        if self._reader is not None and isinstance(tier, AttachedTier):
            self._reader.ask(tier)
        self._breaker.begin_anew(can_write=can_write)
        state.reads_ssd = True
        return can_write

    def _put_off(self, error: Exception) -> None:
        pause = self._pause()
        self._failed_attempts += 1
        self._next_at = self._clock.monotonic() + pause
        self.problem = f"cannot be opened ({error}); dram serves alone; again in {pause:g} s"
        self._breaker.tell("error", self.problem)

    def _pause(self) -> float:
        return min(self._retry_s * 2.0 ** min(self._failed_attempts, 32), max(PAUSE_MAX_S, self._retry_s))
