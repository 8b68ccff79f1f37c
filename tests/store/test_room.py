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


@pytest.mark.parametrize("eviction", ["value", "segmented_lru", "s3fifo"])
def test_reused_contexts_outlive_a_scan_in_both_tiers(kit, eviction):
    sizes = {"ssd": "768KiB", "dram": "128KiB"}
    store = kit.open(**sizes, eviction=eviction)
    hot = Chain(namespace(), 8, seed=1)
    hot.save(store)
    for turn in range(2):  # S3-FIFO wants to see two uses.
        assert read_all(store, hot.root, hot.keys) == 8
        Chain(namespace(), 1, seed=80 + turn).save(store)
    for seed in range(2, 42):
        Chain(namespace(), 4, seed=seed).save(store)
    assert hot.tiers(store) == (TierName.DRAM,) * 8
    store.close()
    again = kit.open(**sizes, eviction=eviction)
    again.register(hot.space)
    assert read_all(again, hot.root, hot.keys) == 8


@pytest.mark.parametrize("eviction", ["value", "segmented_lru"])
def test_scans_do_not_flush_what_is_used_between_them(kit, eviction):
    store = kit.open(ssd=0, dram="512KiB", eviction=eviction)
    assert _hits_beside_scans(store) == 16 * 8


def test_plain_lru_claims_no_such_thing(kit):
    store = kit.open(ssd=0, dram="512KiB", eviction="lru")
    assert _hits_beside_scans(store) == 0


def _hits_beside_scans(store) -> int:
    """Hits of two contexts in the last 8 of 40 rounds; in each they are used once, and a scan half as large again
    as what is left beside them goes by."""
    hot = [Chain(namespace(), 8, seed=seed) for seed in (1, 2)]
    for chain in hot:
        chain.save(store)
    hits = 0
    for number in range(40):
        for seed in range(9):
            Chain(namespace(), 8, seed=100 + number * 9 + seed).save(store)
        found = [store.lookup(chain.root, chain.keys).blocks for chain in hot]
        hits += sum(found) if number >= 32 else 0
        for chain in hot:
            chain.save(store)
            assert read_all(store, chain.root, chain.keys) == 8
    return hits


def test_moved_pages_are_intact_and_moves_stay_in_proportion(kit):
    store = kit.open(ssd="512KiB", dram="64KiB", eviction="segmented_lru")
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


def test_any_number_of_lookups_keeps_nothing_from_leaving(kit):
    """Asking a million times whether a block is there is no use of it: a full store takes new pages all the same."""
    store = kit.open(dram="64KiB", ssd=0)
    asked = Chain(namespace(), 1)
    asked.save(store)
    for seed in range(1, 41):
        for _ in range(25_000):
            store.lookup(asked.root, asked.keys)
        assert Chain(namespace(), 2, seed=seed).save(store) == [SaveState.STORED] * 2
    assert store.lookup(asked.root, asked.keys).blocks == 0


def test_any_number_of_lookups_renews_no_lease(kit, hand_clock):
    """A store whose every page is leased: the leases end when they were to, whoever asks for their blocks."""
    store = kit.open(dram="64KiB", ssd=0, clock=hand_clock)
    asked = Chain(namespace(), 8)
    assert asked.save(store) == [SaveState.STORED] * 8
    leases = [store.lease(asked.root, [key], owner="vanished", ttl_s=10.0) for key in asked.keys]
    for second in range(11):
        if second == 9:
            assert Chain(namespace(), 1, seed=1).save(store) == [SaveState.DROPPED]
        for _ in range(500):
            store.lookup(asked.root, asked.keys)
        hand_clock.now += 1.0
    # None of them was given back by its owner.
    assert Chain(namespace(), 4, seed=2).save(store) == [SaveState.STORED] * 4
    assert {lease.ended for lease in leases} == {"expired"}
