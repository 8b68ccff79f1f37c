"""The writer thread: pages that dram took in go to the tier below in batches, behind everything else."""

from __future__ import annotations

import logging
import threading

from workmem.store.breaker import Breaker
from workmem.store.pool import Pool
from workmem.store.rebuilding import Rebuilding
from workmem.store.ssd_writes import WriteJob
from workmem.store.tiers.attached import AttachedTier
from workmem.store.tiers.ssd import SsdTier

log = logging.getLogger(__name__)

_TICK_S = 0.5
"""Longest sleep: a tripped tier is looked at this often."""


class WriterThread:
    """Owns everything that changes the tier's files, and gives the tier up and opens it anew where it fails."""

    def __init__(self, pool: Pool, life: Rebuilding, breaker: Breaker) -> None:
        self._pool = pool
        self._life = life
        self._breaker = breaker
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="workmem-ssd-write", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Stop after the batch under way, or the page that is moved. False if the disk holds it longer than `timeout_s`."""
        with self._pool.state.outbox:
            self._stopping = True
            if self._life.index is not None:
                self._life.index.strikes.close()
            self._pool.state.outbox.changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while self._wait():
            if self._life.is_due():
                self._life.step(lambda: not self._stopping)
            else:
                self._step()
        if not (self._breaker.is_lost or self._life.is_away):
            # Also where the tier has failed: a purge that it never hears of comes back with the next start.
            self._work([])

    def _wait(self) -> bool:
        """Sleep until something is to be done. False when the thread is to end."""
        outbox = self._pool.state.outbox
        with outbox:
            while not self._stopping:
                tier = self._life.tier
                if self._life.is_due():
                    return True
                if tier is None:
                    pass
                elif not self._breaker.may_write():
                    # Nothing is waited for while the tier is left alone.
                    tier.writes.give_up_writes()
                elif (
                    self._breaker.writes_open or self._pool.state.unwritten or tier.index.strikes.has_deletes
                ):
                    return True
                outbox.changed.wait(_TICK_S)
        return False

    @property
    def _tier(self) -> SsdTier | AttachedTier:
        assert self._life.tier is not None
        return self._life.tier

    def _step(self) -> None:
        if self._breaker.writes_open:
            # The pause is over: what only dram holds is what there is to try with.
            self._pool.requeue_writes()
        jobs = self._tier.writes.take_writes(self._tier.batch_bytes)
        self._work(jobs)

    def _work(self, jobs: list[WriteJob]) -> None:
        unsettled = jobs
        try:
            if jobs:
                extents = self._tier.write(jobs)
                unsettled = []
                self._tier.writes.settle(jobs, extents)
            elif self._breaker.writes_open:
                self._tier.probe()
            self._tier.tend()
        except Exception as error:  # thread main: the tier is left alone, serving goes on from dram
            if not isinstance(error, OSError):
                log.exception("the ssd writer met a bug of ours")
            self._failed(unsettled, error)
            return
        if self._breaker.write_worked():
            self._pool.state.wants_writes = True
            self._pool.requeue_writes()

    def _failed(self, jobs: list[WriteJob], error: Exception) -> None:
        self._breaker.write_failed(error)
        self._pool.count("ssd_writes_failed", len(jobs))
        if self._breaker.writes_open:
            self._pool.state.wants_writes = False
            self._tier.writes.settle(jobs, None)
        else:
            self._tier.writes.retry(jobs)
