"""What callers say about blocks: pins, announced uses, groups that live and die together."""

from __future__ import annotations

from typing import get_args

import pytest

from workmem.core.errors import ClientError
from workmem.core.events import BoundReached
from workmem.core.layout import Namespace
from workmem.core.outcomes import TierName
from workmem.policy.choose import EvictionName
from workmem.policy.order import Prospect
from workmem.store.config import PinsConfig
from workmem.testing.pages import SMALL, Chain, namespace, read_all

ORDERS = get_args(EvictionName)
IN_DRAM, ON_SSD = TierName.DRAM, TierName.SSD


def press(store, first: int, count: int = 12, length: int = 8) -> None:
    for seed in range(first, first + count):
        Chain(namespace("others"), length, seed=seed).save(store)


@pytest.mark.parametrize("eviction", ORDERS)
def test_pinned_blocks_outlast_pressure_until_their_time_is_over(kit, hand_clock, eviction):
    store = kit.open(ssd=0, dram="256KiB", eviction=eviction, clock=hand_clock)
    chain = Chain(namespace(), 6, seed=1)
    chain.save(store)
    assert store.pin(chain.root, chain.keys, owner="agent", name="tools", ttl_s=60).blocks == 6
    press(store, 100)
    assert chain.tiers(store) == (IN_DRAM,) * 6
    assert store.gauges()["store_pins"] == 1
    hand_clock.now += 61
    store._tick()
    assert store.gauges()["store_pins"] == 0
    assert store.gauges()["store_pins_expired_total"] == 1
    press(store, 200, 40)
    assert chain.tiers(store) == ()


def test_pin_acts_on_ssd_as_well_and_on_blocks_that_come_later(kit):
    store = kit.open(ssd="768KiB", dram="128KiB")
    chain = Chain(namespace(), 4, seed=1)
    store.register(chain.space)
    assert store.pin(chain.root, chain.keys, owner="a", name="p", ttl_s=600).blocks == 0
    chain.save(store)
    press(store, 100, 30)
    assert len(chain.tiers(store)) == 4
    assert read_all(store, chain.root, chain.keys) == 4
    assert store.unpin("a", "p")
    assert not store.unpin("a", "p")


def test_pins_past_the_budget_end_the_oldest_and_no_save_fails(kit):
    store = kit.open(ssd=0, dram="256KiB", pins=PinsConfig(budget="25%"))
    chains = [Chain(namespace(), 3, seed=seed) for seed in range(4)]
    for chain in chains:
        chain.save(store)
    results = [
        store.pin(chain.root, chain.keys, owner="a", name=str(number), ttl_s=600)
        for number, chain in enumerate(chains)
    ]
    assert [result.demoted for result in results] == [(), (), ("0",), ("1",)]
    assert "store.pins.budget" in kit.names()
    too_large = Chain(namespace(), 9, seed=50)
    assert store.pin(too_large.root, too_large.keys, owner="a", name="big", ttl_s=600).demoted == ("big",)
    press(store, 100)
    assert store.gauges()["store_saves_dropped_total"] == 0
    assert [len(chain.tiers(store)) for chain in chains] == [0, 0, 3, 3]


def test_pins_of_a_purged_namespace_end(kit):
    store = kit.open(ssd=0)
    chain = Chain(namespace(), 2)
    chain.save(store)
    store.pin(chain.root, chain.keys, owner="a", name="p", ttl_s=600)
    store.purge(lambda space: space == chain.space)
    assert store.gauges()["store_pins"] == 0
    assert not store.unpin("a", "p")


def test_pin_without_time_is_refused(kit):
    store = kit.open(ssd=0)
    root = store.register(namespace())
    with pytest.raises(ClientError, match="ttl_s"):
        store.pin(root, [], owner="a", name="p", ttl_s=0)


@pytest.mark.parametrize("eviction", ["value", "segmented_lru", "lru"])
def test_what_is_done_with_goes_next(kit, eviction):
    store = kit.open(ssd=0, dram="256KiB", eviction=eviction)
    done, others = Chain(namespace(), 4, seed=1), [Chain(namespace(), 4, seed=seed) for seed in range(2, 9)]
    for chain in [*others, done]:
        chain.save(store)
    read_all(store, done.root, done.keys)
    assert store.announce(done.root, done.keys, Prospect.DONE) == 4
    press(store, 100, 1, 4)
    assert done.tiers(store) == ()
    assert all(len(chain.tiers(store)) == 4 for chain in others)
    with pytest.raises(ClientError, match="EXPECTED or DONE"):
        store.announce(done.root, done.keys, Prospect.PINNED)


def test_announcing_leaves_a_pin_alone(kit):
    store = kit.open(ssd=0, dram="256KiB")
    chain = Chain(namespace(), 4, seed=1)
    chain.save(store)
    store.pin(chain.root, chain.keys, owner="a", name="p", ttl_s=600)
    store.announce(chain.root, chain.keys, Prospect.DONE)
    press(store, 100)
    assert len(chain.tiers(store)) == 4


def test_expected_blocks_outlast_others_of_their_age(kit):
    store = kit.open(ssd=0, dram="256KiB", eviction="value")
    chains = [Chain(namespace(), 4, seed=seed) for seed in range(8)]
    for chain in chains:
        chain.save(store)
    assert store.announce(chains[0].root, chains[0].keys, Prospect.EXPECTED) == 4
    press(store, 100, 4)
    assert [len(chain.tiers(store)) for chain in chains] == [4, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("eviction", ORDERS)
def test_blocks_of_a_group_live_and_die_together(kit, eviction):
    store = kit.open(ssd=0, dram="256KiB", eviction=eviction)
    ranks = [
        Chain(Namespace(model_fingerprint="m", layout=SMALL, adapter=str(n)), 1, seed=1) for n in range(3)
    ]
    for chain in ranks:
        chain.save(store)
    assert sum(store.bind(chain.root, chain.keys, "step 7") for chain in ranks) == 3
    assert store.gauges()["store_life_groups"] == 1
    for seed in range(104, 300):
        Chain(namespace("others"), 1, seed=seed).save(store)
        if seed % 8 == 0 and seed < 200:
            # A use of one is a use of all.
            read_all(store, ranks[0].root, ranks[0].keys)
        here = {len(chain.tiers(store)) for chain in ranks}
        assert len(here) == 1, "some of a group are gone and some are not"
        assert seed >= 200 or here == {1} or eviction != "lru"
    store.announce(ranks[1].root, ranks[1].keys, Prospect.DONE)
    press(store, 400)
    assert [len(chain.tiers(store)) for chain in ranks] == [0, 0, 0]
    assert store.gauges()["store_life_groups"] == 0


def test_group_dies_on_ssd_too(kit):
    store = kit.open(ssd="768KiB", dram="64KiB")
    pair = [
        Chain(Namespace(model_fingerprint="m", layout=SMALL, adapter=str(n)), 1, seed=1) for n in range(2)
    ]
    for chain in pair:
        chain.save(store)
    for chain in pair:
        store.bind(chain.root, chain.keys, "g")
    for seed in range(100, 260, 4):
        Chain(namespace("others"), 4, seed=seed).save(store)
        assert len({chain.tiers(store) == () for chain in pair}) == 1
    assert pair[0].tiers(store) == ()


def test_groups_of_tenants_are_told_apart(kit):
    store = kit.open(ssd=0)
    chains = [
        Chain(Namespace(model_fingerprint="m", layout=SMALL, tenant_salt=tenant), 1) for tenant in ("a", "b")
    ]
    for chain in chains:
        chain.save(store)
        store.bind(chain.root, chain.keys, "same name")
    assert store.gauges()["store_life_groups"] == 2


def test_dram_is_told_when_a_copy_on_ssd_comes_and_goes(kit):
    store = kit.open(ssd="768KiB", dram="128KiB", eviction="value")
    chain = Chain(namespace(), 4, seed=1)
    chain.save(store)
    state, rows = store.pool.state, store.pool.space(chain.root).rows
    assert {state.order._advice[rows[key]] & 4 for key in chain.keys} == {4}
    store._below.tier.index.evict(1 << 30)
    assert {state.order._advice[rows[key]] & 4 for key in chain.keys if key in rows} == {0}


def test_ghosts_say_what_a_bigger_tier_would_have_hit(kit):
    store = kit.open(ssd=0, dram="64KiB", eviction="lru")
    for _ in range(6):
        for seed in range(10):
            Chain(namespace(), 1, seed=seed).save(store)
    gauges = store.gauges()
    assert gauges["store_dram_missed_blocks_total"] == 60
    # Ten blocks in turns through eight places: a quarter more hits all but the first ten.
    assert gauges["store_dram_would_hit_at_125_percent_total"] == 50
    assert gauges["store_dram_would_hit_at_400_percent_total"] == 50


def test_bounds_are_told_by_events(kit):
    store = kit.open(ssd=0, pins=PinsConfig(budget="8KiB"))
    chain = Chain(namespace(), 2)
    chain.save(store)
    store.pin(chain.root, chain.keys, owner="a", name="p", ttl_s=1)
    told = [event for event in kit.of(BoundReached) if event.name == "store.pins.budget"]
    assert told[0].limit == 8192
    assert "'p' of 'a'" in told[0].detail


def test_a_group_cannot_be_made_too_large_in_several_calls(kit, monkeypatch):
    monkeypatch.setattr("workmem.store.steering.GROUP_MAX", 4)
    store = kit.open(ssd=0)
    chain = Chain(namespace(), 6)
    chain.save(store)
    assert store.bind(chain.root, chain.keys[:3], "g") == 3
    with pytest.raises(ClientError, match="would have 6 blocks"):
        store.bind(chain.root, chain.keys[3:], "g")
    assert store.bind(chain.root, chain.keys[:4], "g") == 4
