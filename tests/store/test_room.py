"""Caps, eviction order, compaction: who goes when a tier is full."""

from __future__ import annotations

import pytest

from workmem.core.outcomes import TierName
from workmem.store.contract import SaveState
from workmem.testing.pages import SLICED, SMALL, Chain, namespace, read_all

pytestmark = pytest.mark.timeout(60)


def test_ssd_stays_under_its_cap_and_keeps_the_newest(kit):
    store = kit.open(ssd="512KiB", dram="64KiB")
    for seed in range(60):
        Chain(namespace(), 4, seed=seed).save(store)
        on_disk = sum(file.stat().st_size for file in (kit.folder / "segments").iterdir())
        assert on_disk <= 512 * 1024
    newest = Chain(namespace(), 4, seed=59)
    assert read_all(store, newest.root, newest.keys) == 4
    assert store.gauges()["store_ssd_evictions_total"] > 0
    store.audit()


def test_reused_contexts_outlive_a_scan_in_both_tiers(kit):
    store = kit.open(ssd="512KiB", dram="96KiB")
    hot = Chain(namespace(), 8, seed=1)
    hot.save(store)
    assert read_all(store, hot.root, hot.keys) == 8
    for seed in range(2, 80):
        Chain(namespace(), 4, seed=seed).save(store)
    assert hot.tiers(store) == (TierName.DRAM,) * 8
    store.close()
    again = kit.open(ssd="512KiB", dram="96KiB")
    again.register(hot.space)
    assert read_all(again, hot.root, hot.keys) == 8


def test_moved_pages_are_intact_and_moves_stay_in_proportion(kit):
    store = kit.open(ssd="512KiB", dram="64KiB")
    hot = [Chain(namespace(), 2, seed=1000 + number) for number in range(8)]
    for number, chain in enumerate(hot):
        chain.save(store)
        read_all(store, chain.root, chain.keys)
        for seed in range(number * 8, number * 8 + 8):
            Chain(namespace(), 2, seed=seed).save(store)
    for seed in range(100, 200):
        Chain(namespace(), 2, seed=seed).save(store)
    gauges = store.gauges()
    assert gauges["store_ssd_moved_bytes_total"] > 0
    assert gauges["store_ssd_moved_bytes_total"] <= gauges["store_ssd_written_bytes_total"]
    for chain in hot:
        assert read_all(store, chain.root, chain.keys) == 2
    store.close()
    again = kit.open(ssd="512KiB", dram="64KiB")
    again.register(namespace())
    for chain in hot:
        assert read_all(again, chain.root, chain.keys) == 2
    again.audit()


@pytest.mark.parametrize("ssd", [0, "256KiB"])
def test_what_is_left_of_a_chain_is_a_prefix_of_it(kit, ssd):
    store = kit.open(ssd=ssd, dram="64KiB")
    chains = [Chain(namespace(), 7, seed=seed) for seed in range(12)]
    for chain in chains:
        chain.save(store)
    for chain in chains:
        held = [store.lookup(chain.root, [key]).blocks for key in chain.keys]
        assert held == sorted(held, reverse=True)


def test_page_larger_than_the_ssd_cap_lives_in_dram(kit):
    store = kit.open(ssd="128KiB", dram="2MiB")
    chain = Chain(namespace("sliced", SLICED), 2)
    assert chain.save(store) == [SaveState.STORED] * 2
    assert read_all(store, chain.root, chain.keys) == 2
    assert store.gauges()["store_ssd_pages"] == 0
    assert store.gauges()["store_writes_given_up_total"] == 2


def test_new_layout_gets_room_without_flushing_the_old_one(kit):
    store = kit.open(ssd=0, dram="4MiB")
    small = [Chain(namespace("small"), 8, seed=seed) for seed in range(64)]
    for chain in small:
        chain.save(store)
    assert store.gauges()["store_dram_pages"] == 512
    # Every other context is reused, so no slab would be empty before half of all pages had gone:
    # room has to be made by moving pages together.
    for chain in small[::2]:
        read_all(store, chain.root, chain.keys)
    large = Chain(namespace("large", SLICED), 1)
    assert large.save(store) == [SaveState.STORED]
    assert read_all(store, large.root, large.keys) == 1
    kept = sum(store.lookup(chain.root, chain.keys).blocks for chain in small)
    assert kept * 2 * SMALL.page_bytes >= 4 * 2**20 - 2 * (SLICED.page_bytes + 4096)
    assert store.gauges()["store_dram_moved_bytes_total"] > 0
    for chain in small:
        read_all(store, chain.root, chain.keys)
    store.audit()


def test_layouts_take_turns_in_a_full_arena(kit):
    store = kit.open(ssd="8MiB", dram="1MiB")
    for turn in range(6):
        small, large = (
            Chain(namespace("small"), 40, seed=turn),
            Chain(namespace("large", SLICED), 2, seed=turn),
        )
        small.save(store)
        assert large.save(store) == [SaveState.STORED] * 2
        assert read_all(store, large.root, large.keys) == 2
        assert read_all(store, small.root, small.keys) == 40
        store.audit()
