"""The index says that a page is there, and it is not: a miss at once, for the next one who asks as well."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable

import pytest
from tests.store.test_tier_suite import opened

from workmem.core.events import BlockQuarantined
from workmem.core.outcomes import MissReason
from workmem.testing.pages import Chain, namespace, read_all
from workmem.testing.tiers import MemoryTier

pytestmark = pytest.mark.timeout(60)
MISS_S = 0.05
PAGES = 12


def ask_each(store, lost: Chain, kept: Chain, why: MissReason) -> tuple[list[float], list[float]]:
    """Lease the lost pages one by one, a kept one after each; seconds that the misses took, and the hits."""
    misses: list[float] = []
    hits: list[float] = []
    for index, key in enumerate(lost.keys):
        assert store.lookup(lost.root, [key]).blocks == 1, "the index does not know yet"
        settled = threading.Event()
        begin = time.perf_counter()
        lease = store.lease(lost.root, [key], owner="asks", ttl_s=60.0)
        lease.on_settled(settled.set)
        assert settled.wait(10.0)
        misses.append(time.perf_counter() - begin)
        assert (lease.ready, lease.failed) == (0, why)
        lease.release()
        # At the next look the index says what was found, and why.
        found = store.lookup(lost.root, [key])
        assert (found.blocks, found.reason) == (0, why)
        # One that is there: the tier as such is well, and stays in service.
        begin = time.perf_counter()
        assert read_all(store, kept.root, kept.keys[index : index + 1]) == 1
        hits.append(time.perf_counter() - begin)
    return misses, hits


def check(store, lost: Chain, kept: Chain, why: MissReason, pages: Callable[[], float]) -> None:
    assert pages() == 2 * PAGES
    misses, hits = ask_each(store, lost, kept, why)
    # On a machine that has other things to do a hit takes long as well.
    assert statistics.median(misses) <= max(MISS_S, 3 * statistics.median(hits))
    assert pages() == PAGES
    assert store.lookup(kept.root, kept.keys).blocks == PAGES
    store.audit()
    # And it takes them again.
    lost.save(store)
    assert read_all(store, lost.root, lost.keys) == PAGES


def test_pages_cut_off_a_segment_under_a_store_that_runs_are_misses_at_once(kit):
    kept, lost = Chain(namespace(), PAGES, seed=1), Chain(namespace(), PAGES, seed=2)
    for chain in (kept, lost):
        store = kit.open()
        chain.save(store)
        store.close()
    *_, newest = sorted((kit.folder / "segments").iterdir())
    store = kit.open()
    store.register(kept.space)
    os.truncate(newest, 4096)
    check(store, lost, kept, MissReason.UNAVAILABLE, lambda: store.gauges()["store_ssd_pages"])
    assert len(kit.of(BlockQuarantined)) == PAGES
    store.close()
    again = kit.open()
    again.register(lost.space)
    assert read_all(again, lost.root, lost.keys) == PAGES


def test_pages_that_a_tier_of_somebody_else_has_lost_are_misses_at_once(monkeypatch):
    kept, lost = Chain(namespace(), PAGES, seed=1), Chain(namespace(), PAGES, seed=2)
    shelf = {}
    with opened(monkeypatch, MemoryTier(shelf=shelf)) as store:
        for chain in (kept, lost):
            chain.save(store)
    with opened(monkeypatch, MemoryTier(shelf=shelf)) as store:
        store.register(kept.space)
        for name in [name for name in shelf if name.key in set(lost.keys)]:
            del shelf[name]
        check(store, lost, kept, MissReason.EVICTED, lambda: store.gauges()["store_below_pages"])
