"""The writer thread: pages that dram took in go to ssd in batches, behind everything else."""

from __future__ import annotations

import logging
import threading

from workmem.store.breaker import Breaker
from workmem.store.pool import Pool
from workmem.store.ssd_index import WriteJob
from workmem.store.tiers.ssd import SsdTier

log = logging.getLogger(__name__)

_TICK_S = 0.5
"""Longest sleep: lease deadlines and a tripped tier are looked at this often."""


class WriterThread:
    """Owns everything that changes the ssd tier's files."""

    def __init__(self, pool: Pool, tier: SsdTier, breaker: Breaker) -> None:
        self._pool = pool
        self._tier = tier
        self._breaker = breaker
        self._stopping = False
        self.is_idle = True
        self._thread = threading.Thread(target=self._main, name="workmem-ssd-write", daemon=True)
        self._thread.start()

    @property
    def is_settled(self) -> bool:
        """Nothing is waiting or under way. Ask under the pool's lock."""
        return self.is_idle and not self._pool.unwritten

    def close(self, timeout_s: float) -> bool:
        """Stop after the batch under way. False if the disk holds it longer than `timeout_s`."""
        with self._pool.outbox:
            self._stopping = True
            self._pool.outbox.changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        outbox = self._pool.outbox
        while True:
            with outbox:
                self.is_idle = True
                outbox.changed.notify_all()
                while not self._stopping and not self._pool.unwritten and not self._tier.index.has_deletes:
                    outbox.changed.wait(_TICK_S)
                    if self._breaker.is_open and self._breaker.may_try():
                        break
                if self._stopping:
                    return
                self.is_idle = False
            self._step()

    def _step(self) -> None:
        if not self._breaker.may_try():
            self._tier.index.give_up_writes()
            with self._pool.outbox:
                self._pool.outbox.changed.wait(_TICK_S)
            return
        if self._breaker.is_open:
            self._pool.wants_writes = True
            self._pool.requeue_writes()
        jobs = self._tier.index.take_writes(self._tier.batch_bytes)
        try:
            extents = self._tier.write(jobs) if jobs else None
            self._tier.tend()
        except Exception as error:  # thread main: the tier is left alone, serving goes on from dram
            self._failed(jobs, error)
            return
        if extents is not None:
            self._tier.index.settle(jobs, extents)
        if self._breaker.write_worked():
            self._pool.requeue_writes()

    def _failed(self, jobs: list[WriteJob], error: Exception) -> None:
        if not isinstance(error, OSError):
            log.exception("the ssd writer met a bug of ours")
        self._breaker.write_failed(error)
        self._pool.counts["ssd_writes_failed"] += len(jobs)
        if self._breaker.is_open:
            self._pool.wants_writes = False
            self._tier.index.settle(jobs, None)
            self._tier.index.give_up_writes()
        else:
            self._tier.index.retry(jobs)
