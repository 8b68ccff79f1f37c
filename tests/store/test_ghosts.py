"""What the store's ghosts count: each page that comes in once, whatever it took to find room for it."""

from __future__ import annotations

import pytest

from workmem.testing.pages import Chain, namespace

pytestmark = pytest.mark.timeout(60)

MISSED = "store_dram_missed_blocks_total"
AT_FOUR = "store_dram_would_hit_at_400_percent_total"


def hold_all(store):
    """A lease on all of dram's blocks, and their chain."""
    chain = Chain(namespace("holder"), 8, seed=900)
    chain.save(store)
    lease = store.lease(chain.root, chain.keys, owner="test", ttl_s=600)
    assert lease.ready == 8
    return lease


@pytest.fixture
def full(kit):
    """A store of eight places, all held, that evicted a chain of four before."""
    store = kit.open(ssd=0, dram="64KiB", eviction="lru")
    gone = Chain(namespace(), 4, seed=1)
    gone.save(store)
    lease = hold_all(store)
    return store, gone, lease


def test_a_save_that_finds_no_room_is_not_counted(full):
    store, gone, lease = full
    before = store.gauges()
    for _ in range(3):
        gone.save(store)
    assert store.gauges()["store_saves_dropped_total"] > before["store_saves_dropped_total"]
    assert store.gauges()[MISSED] == before[MISSED]
    assert store.gauges()[AT_FOUR] == before[AT_FOUR]
    lease.release()


def test_a_save_that_waits_for_room_is_counted_once_when_it_has_it(full):
    store, gone, lease = full
    gone.save(store)
    before = store.gauges()
    lease.release()
    gone.save(store)
    after = store.gauges()
    assert after[MISSED] - before[MISSED] == 4
    assert after[AT_FOUR] - before[AT_FOUR] == 4, "what waited is still known when it comes"


def test_tries_of_one_waiting_save_count_once(full):
    store, gone, lease = full
    pool = store.pool
    space, block = pool.space(gone.root), gone.block(0)
    before = store.gauges()
    for _ in range(5):
        assert pool.begin_saves(space, [block]) == []
    lease.release()
    (frame,) = pool.begin_saves(space, [block])
    after = store.gauges()
    pool.abort_save(space, block, frame)
    assert after[MISSED] - before[MISSED] == 1
    assert after[AT_FOUR] - before[AT_FOUR] == 1
