"""Memory runs out at the Nth allocation, for every N: it costs pages, never a frame, a strike or a wrong byte."""

from __future__ import annotations

import logging
import mmap
import os
import random
import threading

import numpy as np
import pytest

from workmem.core.errors import ConfigError
from workmem.store import residents, saver, saving
from workmem.store.tiers import journal, journal_records, page_header, segment_files
from workmem.testing.pages import Chain, namespace, read_all, settle

pytestmark = pytest.mark.timeout(120)

STEP = int(os.environ.get("FAIL_STEP", "5"))
"""Of the places to fail at, a run takes every so many, the first of them by its seed; 1 takes all."""


class Allocations:
    """Counts what the store asks memory for in bulk, and refuses one of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.fail_at = 0
        for module in (residents, saver, saving, journal, journal_records, page_header, segment_files):
            for name, make in (("bytes", bytes), ("bytearray", bytearray)):
                patch.setattr(module, name, self._counted(make), raising=False)
        # What has no constructor to be caught at: the journal's records and batches.
        for name in ("encode", "_batch"):
            patch.setattr(journal, name, self._counted(getattr(journal, name)))
        patch.setattr(mmap, "mmap", self._counted(mmap.mmap))
        patch.setattr(np, "zeros", self._counted(np.zeros))

    def _counted(self, make):
        def counted(*how, **named):
            with self._lock:
                self.count += 1
                refused = self.count == self.fail_at
            if refused:
                raise MemoryError
            return make(*how, **named)

        return counted


def test_failing_the_nth_allocation_loses_no_frame_and_no_strike(kit, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    memory = Allocations(monkeypatch)
    number = random.randrange(STEP) + 1 - STEP
    while True:
        number += STEP
        memory.count, memory.fail_at = 0, number
        is_struck = live(kit, number)
        fired = memory.count >= number
        memory.fail_at = 0
        look_again(kit, number, is_struck=is_struck)
        if not fired:
            break
        assert number < 300
    # It came to where nothing is left to fail.
    assert number > 20


KEPT = Chain(namespace("kept"), 3)
STRUCK = Chain(namespace("kept"), 2, seed=9)
PURGED = Chain(namespace("purged"), 3)


def live(kit, number: int) -> bool:
    """A short life: save, read, strike one page, purge a namespace, push all of it through. Returns whether there was a page to strike."""
    try:
        store = kit.open(path=kit.folder / str(number), dram="64KiB", ssd="512KiB", retry_s=0.1)
    except (MemoryError, ConfigError):
        return False
    KEPT.save(store)
    # The next batch writes the journal anew.
    store._below.tier._journal.is_broken = True
    PURGED.save(store)
    STRUCK.save(store)
    lease = store.lease(KEPT.root, STRUCK.keys, owner="t", ttl_s=60)
    settle(lease)
    if lease.ready > 1:
        lease.quarantine(1)
    is_struck = lease.ready > 1
    lease.release()
    store.purge(lambda space: space == PURGED.space)
    for seed in (1, 2):
        Chain(KEPT.space, 3, seed=seed).save(store)
    KEPT.save(store)
    assert store.flush(20), "something waits for ever"
    store.audit()
    gauges = store.gauges()
    assert gauges["store_dram_used_bytes"] == gauges["store_dram_resident_bytes"], "a frame is lost"
    assert PURGED.tiers(store) == ()
    KEPT.save(store)
    assert read_all(store, KEPT.root, KEPT.keys) == 3
    store.close()
    return is_struck


def look_again(kit, number: int, *, is_struck: bool) -> None:
    """The next start: what was purged is gone, what is there is right, and all can be saved."""
    store = kit.open(path=kit.folder / str(number), dram="64KiB", ssd="512KiB")
    for chain in (KEPT, PURGED):
        store.register(chain.space)
    assert PURGED.tiers(store) == (), "a purge was forgotten"
    assert len(STRUCK.tiers(store)) < 2 or not is_struck, "a strike was forgotten"
    read_all(store, KEPT.root, KEPT.keys)
    assert store.gauges()["store_quarantines_total"] == 0
    KEPT.save(store)
    assert read_all(store, KEPT.root, KEPT.keys) == 3
    store.close()
