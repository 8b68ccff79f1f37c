"""What the ssd tier does behind everything else: it looks for rot, and gives way when the disk fills."""

from __future__ import annotations

import time

from workmem.core.events import BlockQuarantined, BoundReached, TierStateChanged
from workmem.core.outcomes import MissReason, TierName
from workmem.store import scrubber
from workmem.store.tiers import room as tier_room
from workmem.store.tiers.free_space import FreeSpace
from workmem.testing.pages import Chain, namespace, read_all


def wait_for(condition, timeout_s=10.0):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.01)


def test_rot_is_found_before_anybody_asks(kit, monkeypatch):
    monkeypatch.setattr(scrubber, "_IDLE_TICK_S", 0.01)
    store = kit.open(scrub_bytes_per_s=0)
    chain = Chain(namespace(), 6)
    chain.save(store)
    assert "store_scrubbed_pages_total" not in store.gauges()
    store.close()
    (file,) = (kit.folder / "segments").iterdir()
    raw = bytearray(file.read_bytes())
    raw[4096 + 3 * 8192 + 5000] ^= 1
    file.write_bytes(raw)
    again = kit.open(scrub_bytes_per_s="64MiB")
    again.register(chain.space)
    wait_for(lambda: kit.of(BlockQuarantined))
    assert [event.tier for event in kit.of(BlockQuarantined)] == [TierName.SSD]
    assert again.lookup(chain.root, chain.keys).blocks == 3
    assert again.lookup(chain.root, chain.keys).reason is MissReason.CORRUPT
    wait_for(lambda: again.gauges()["store_scrubbed_passes_total"] == 1)
    gauges = again.gauges()
    assert (gauges["store_scrubbed_damaged_total"], gauges["store_scrubbed_pages_total"]) == (1, 5)
    assert read_all(again, chain.root, chain.keys) == 3


def test_the_tier_gives_way_when_others_fill_the_disk(kit, monkeypatch):
    room = [1 << 40]

    def free_space(folder):
        return FreeSpace(1 << 40, room[0] - sum(file.stat().st_size for file in folder.iterdir()))

    monkeypatch.setattr(tier_room, "read_free_space", free_space)
    store = kit.open(ssd="16MiB", keep_free="1MiB")
    for seed in range(1, 9):
        Chain(namespace(), 64, seed=seed).save(store)
    held = store.gauges()["store_ssd_used_bytes"]
    assert held > 8 * 64 * 8192
    assert not kit.of(BoundReached)
    # Others leave a little less than what is to stay free: each new page finds its room among the old ones.
    room[0] = held + (900 << 10)
    for seed in range(10, 20):
        Chain(namespace(), 64, seed=seed).save(store)
        assert store.gauges()["store_ssd_used_bytes"] <= held
    assert "store.ssd.keep_free" in kit.names()
    assert not kit.of(TierStateChanged)
    last = Chain(namespace(), 32, seed=99)
    last.save(store)
    store.close()
    again = kit.open(ssd="16MiB", keep_free="1MiB")
    again.register(last.space)
    assert read_all(again, last.root, last.keys) == 32


def test_a_disk_that_others_have_filled_trips_the_tier_and_dram_serves(kit, monkeypatch):
    monkeypatch.setattr(tier_room, "read_free_space", lambda _: FreeSpace(1 << 40, 0))
    store = kit.open(keep_free="1MiB", retry_s=60)
    chain = Chain(namespace(), 8)
    for seed in range(4):
        Chain(namespace(), 8, seed=seed).save(store)
    chain.save(store)
    wait_for(lambda: kit.of(TierStateChanged))
    assert kit.of(TierStateChanged)[0].state == "error"
    assert "keep_free" in kit.of(TierStateChanged)[0].reason
    assert read_all(store, chain.root, chain.keys) == 8
