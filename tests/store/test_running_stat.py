"""What a running store says of its tiers, and how `store stat` reads it."""

from __future__ import annotations

import pytest

from workmem.core.outcomes import TierName
from workmem.store.selector import shown_digest
from workmem.store.steering import OWNERS_TOLD_MAX, label_of
from workmem.store.tools.running_stat import OwnerStat, QuotaStat, running_stat
from workmem.testing.pages import Chain, namespace

pytestmark = pytest.mark.timeout(60)
FRAME = 8192


def test_says_order_ghosts_quotas_and_pins_of_each_tier(kit):
    store = kit.open(dram="64KiB", ssd="768KiB", eviction="s3fifo")
    store.set_quota("acme/nightly", TierName.SSD, floor_bytes=8192, ceiling_bytes=64 * 1024)
    store.set_quota("acme", TierName.DRAM, floor_bytes=16384)
    chains = [Chain(namespace(), 4, seed=seed) for seed in range(3)]
    for chain in chains:
        chain.save(store)
    store.pin(chains[2].root, chains[2].keys[:2], owner="agent", name="a", ttl_s=60)
    store.pin(chains[2].root, chains[2].keys[:1], owner="agent", name="b", ttl_s=60)
    found = running_stat(store.gauges())
    dram, ssd = found.tiers
    assert (dram.tier, ssd.tier) == ("dram", "ssd")
    assert (dram.eviction, ssd.eviction) == ("s3fifo", "s3fifo")
    assert (dram.capacity_bytes, dram.pages) == (64 * 1024, 8)
    assert dram.pinned_pages == 2
    assert (ssd.pages, ssd.pinned_pages) == (12, 2)
    assert (dram.missed_blocks, ssd.missed_blocks) == (12, 12)
    assert dram.would_hit == dict.fromkeys((125, 150, 200, 400), 0)
    assert dram.quotas == [
        QuotaStat(group=label_of("acme"), used_bytes=0, floor_bytes=16384, ceiling_bytes=None)
    ]
    nightly = label_of("acme/nightly").replace("_", "/")
    assert ssd.quotas == [QuotaStat(group=nightly, used_bytes=0, floor_bytes=8192, ceiling_bytes=64 * 1024)]
    assert (found.pins, found.owners, found.pinned_bytes) == (2, 1, 2 * FRAME)
    assert found.largest_owners == [OwnerStat(owner=shown_digest("agent"), pins=2, bytes=2 * FRAME)]


def test_what_twice_the_dram_would_have_hit_is_there(kit):
    store = kit.open(ssd=0, dram="64KiB", eviction="lru")
    for seed in (1, 2, 3, 1):
        Chain(namespace(), 4, seed=seed).save(store)
    (dram,) = running_stat(store.gauges()).tiers
    assert list(dram.would_hit) == [125, 150, 200, 400]
    assert dram.would_hit[125] < dram.would_hit[200] == 4


def test_owners_are_named_up_to_a_bound_and_all_counted(kit):
    store = kit.open(ssd=0)
    chain = Chain(namespace(), OWNERS_TOLD_MAX + 3)
    chain.save(store)
    for number in range(OWNERS_TOLD_MAX + 3):
        store.pin(chain.root, chain.keys[: number + 1], owner=f"owner {number}", name="p", ttl_s=60)
    found = running_stat(store.gauges())
    assert found.owners == found.pins == OWNERS_TOLD_MAX + 3
    assert len(found.largest_owners) == OWNERS_TOLD_MAX
    assert found.largest_owners[0].bytes == (OWNERS_TOLD_MAX + 3) * FRAME
    assert found.pinned_bytes == sum(range(1, OWNERS_TOLD_MAX + 4)) * FRAME
    assert "owner 1" not in str(store.gauges())
