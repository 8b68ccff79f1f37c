"""A disk that fails, fills, tears and rots: it may cost hits, never an answer, a frame or the process."""

from __future__ import annotations

import errno
import os
import resource
import time

import pytest

from workmem.core.events import BlockPromoted, BlockQuarantined, TierStateChanged
from workmem.core.outcomes import MissReason, TierName
from workmem.store.contract import SaveState
from workmem.testing.faulty_device import FaultPlan, FaultyDevice
from workmem.testing.pages import SLICED, Chain, namespace, read_all, settle

pytestmark = pytest.mark.timeout(60)


def wait_for(condition, timeout_s: float = 10.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "condition not met in time"
        time.sleep(0.01)


@pytest.fixture
def plan() -> FaultPlan:
    return FaultPlan()


def test_failing_the_nth_io_loses_no_frame_and_serves_no_wrong_byte(kit):
    number = 0
    clean_runs = 0
    while clean_runs < 2:
        number += 1
        plan = FaultPlan()
        path = kit.folder / str(number)
        store = kit.open(path=path, device=FaultyDevice(plan))
        chain = Chain(namespace(), 6)
        # Counting starts after the start: a folder that cannot be opened is a matter of its own.
        plan.calls, plan.fail_at = 0, number
        chain.save(store)
        more = Chain(namespace(), 3, seed=2)
        more.save(store)
        store.audit()
        store.close()
        again = kit.open(path=path, device=FaultyDevice(plan))
        again.register(chain.space)
        for held in (chain, more):
            read_all(again, held.root, held.keys)
            held.save(again)
            assert read_all(again, held.root, held.keys) == len(held.keys)
        again.audit()
        again.close()
        clean_runs += plan.calls < number
        assert number < 200
    assert number > 10


def test_full_disk_trips_the_tier_and_dram_serves_on(kit, plan):
    store = kit.open(device=FaultyDevice(plan), retry_s=0.5)
    before = Chain(namespace(), 4, seed=1)
    before.save(store)
    plan.writes_fail = errno.ENOSPC
    during = Chain(namespace(), 4, seed=2)
    assert during.save(store) == [SaveState.STORED] * 4
    wait_for(lambda: kit.of(TierStateChanged))
    (event,) = kit.of(TierStateChanged)
    assert (event.tier, event.state) == (TierName.SSD, "error")
    assert "No space left" in event.reason
    assert store.gauges()["store_ssd_error"] == 1.0
    assert read_all(store, before.root, before.keys) == 4
    assert read_all(store, during.root, during.keys) == 4
    plan.writes_fail = 0
    wait_for(lambda: len(kit.of(TierStateChanged)) == 2)
    assert kit.of(TierStateChanged)[-1].state == "ok"
    wait_for(lambda: store.gauges()["store_ssd_pages"] == 8)
    store.close()
    again = kit.open()
    again.register(before.space)
    assert read_all(again, during.root, during.keys) == 4


def test_file_size_limit_of_the_host_is_a_full_disk(kit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = kit.open(retry_s=60.0)
    store.register(namespace())
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    try:
        chain = Chain(namespace(), 40)
        assert chain.save(store) == [SaveState.STORED] * 40
        wait_for(lambda: kit.of(TierStateChanged))
        assert read_all(store, chain.root, chain.keys) == 40
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_torn_write_is_never_seen(kit, plan):
    store = kit.open(device=FaultyDevice(plan))
    first = Chain(namespace(), 3, seed=1)
    first.save(store)
    plan.tear_next_write = True
    second = Chain(namespace("sliced", SLICED), 2, seed=2)
    second.save(store)
    store.close()
    again = kit.open()
    for chain in (first, second):
        again.register(chain.space)
        assert read_all(again, chain.root, chain.keys) == len(chain.keys)
    assert again.gauges()["store_quarantines_total"] == 0


@pytest.mark.parametrize("at", [0, 8, 20, 100, 200, 4087, 4096, 4096 + 70_000, 4096 + 196_607])
def test_flipped_bit_on_disk_is_a_miss_and_quarantined(kit, at):
    chain = Chain(namespace("sliced", SLICED), 3)
    store = kit.open()
    chain.save(store)
    store.close()
    (file,) = (kit.folder / "segments").iterdir()
    raw = bytearray(file.read_bytes())
    page = 4096 + 4096 + SLICED.page_bytes
    raw[4096 + (page - 4096) + at] ^= 0x10
    file.write_bytes(raw)
    again = kit.open()
    again.register(chain.space)
    lease = again.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    settle(lease)
    assert (lease.ready, lease.failed) == (1, MissReason.CORRUPT)
    lease.release()
    wait_for(lambda: again.lookup(chain.root, chain.keys).blocks == 1)
    assert again.lookup(chain.root, chain.keys).reason is MissReason.CORRUPT
    assert [event.reason for event in kit.of(BlockQuarantined)] == [MissReason.CORRUPT]
    assert chain.save(again)[1] is SaveState.STORED
    assert read_all(again, chain.root, chain.keys) == 3
    again.close()
    third = kit.open()
    third.register(chain.space)
    assert read_all(third, chain.root, chain.keys) == 3


def test_one_bad_sector_costs_one_page(kit, plan):
    chain = Chain(namespace(), 8)
    store = kit.open()
    chain.save(store)
    store.close()

    def bad_sector(_, offset: int) -> None:
        run_covers_page_3 = offset <= 4096 + 3 * 8192
        plan.reads_fail = (
            errno.EIO if (run_covers_page_3 and offset == 4096 + 3 * 8192) or offset == 4096 else 0
        )

    again = kit.open(device=FaultyDevice(plan), readers=1)
    again.register(chain.space)
    plan.before_read = bad_sector
    lease = again.lease(chain.root, chain.keys[1:], owner="t", ttl_s=10)
    settle(lease)
    assert (lease.ready, lease.failed) == (7, None)
    lease.release()
    lease = again.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    settle(lease)
    assert (lease.ready, lease.failed) == (0, MissReason.UNAVAILABLE)
    lease.release()
    again.close()
    promoted = sum(event.blocks for event in kit.of(BlockPromoted))
    assert promoted == again.gauges()["store_promoted_total"] == 7, "the page that failed never arrived"


def test_disk_that_stops_reading_is_left_alone_then_tried_again(kit, plan):
    store = kit.open()
    chains = [Chain(namespace(), 2, seed=seed) for seed in range(6)]
    for chain in chains:
        chain.save(store)
    store.close()
    again = kit.open(device=FaultyDevice(plan), retry_s=0.6)
    again.register(namespace())
    plan.reads_fail = errno.EIO
    for chain in chains[:3]:
        assert read_all(again, chain.root, chain.keys) == 0
    wait_for(lambda: again.lookup(chains[5].root, chains[5].keys).blocks == 0)
    assert again.lookup(chains[5].root, chains[5].keys).reason is MissReason.UNAVAILABLE
    plan.reads_fail = 0
    wait_for(lambda: again.lookup(chains[5].root, chains[5].keys).blocks == 2)
    assert read_all(again, chains[5].root, chains[5].keys) == 2
    assert [event.state for event in kit.of(TierStateChanged)] == ["error", "ok"]


def test_slow_disk_delays_no_save(kit, plan):
    plan.delay_s = 0.05
    store = kit.open(device=FaultyDevice(plan))
    chain = Chain(namespace(), 12)
    store.register(chain.space)
    states = []
    started = time.monotonic()
    store.save(chain.root, chain.writes(states.append))
    wait_for(lambda: len(states) == 12)
    assert time.monotonic() - started < 2.0
    assert chain.tiers(store) == (TierName.DRAM,) * 12
    assert not store.flush(0.0)
    assert store.flush(20.0)


def test_dram_smaller_than_a_burst_waits_for_the_disk_rather_than_drop(kit, plan):
    plan.delay_s = 0.005
    store = kit.open(dram="64KiB", device=FaultyDevice(plan))
    chain = Chain(namespace(), 60)
    assert chain.save(store) == [SaveState.STORED] * 60
    assert store.lookup(chain.root, chain.keys).blocks == 60


def test_frame_padding_carries_nothing_of_a_former_page(kit):
    odd = namespace("odd", type(SLICED)(dtype="bf16", layers=3, kv_heads=1, head_dim=48, block_tokens=4))
    assert odd.layout.page_bytes % 4096
    secret = Chain(namespace(), 16, seed=1)
    store = kit.open(dram="64KiB", io="buffered")
    secret.save(store)
    chain = Chain(odd, 8, seed=2)
    chain.save(store)
    store.close()
    size = odd.layout.page_bytes
    (file,) = (kit.folder / "segments").iterdir()
    raw = file.read_bytes()[-8192:]
    assert raw[:8] == b"WMPAGE\x00\x02"
    assert raw[4096 + size :] == bytes(4096 - size)


def test_tripped_tier_with_nothing_to_write_stays_tripped_until_the_disk_is_well(kit, plan):
    store = kit.open(ssd="16MiB", dram="64KiB", device=FaultyDevice(plan), retry_s=0.2)
    plan.writes_fail = errno.EIO
    chain = Chain(namespace(), 2)
    chain.save(store)
    wait_for(lambda: kit.of(TierStateChanged))
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    lease.quarantine(0)
    lease.quarantine(1)
    lease.release()
    time.sleep(0.8)
    assert [event.state for event in kit.of(TierStateChanged)] == ["error"]
    plan.writes_fail = 0
    wait_for(lambda: len(kit.of(TierStateChanged)) == 2)
    chain.save(store)
    assert store.gauges()["store_ssd_pages"] == 2


def test_disk_that_cannot_be_opened_leaves_dram_to_serve(kit, plan):
    store = kit.open()
    Chain(namespace(), 2).save(store)
    store.close()
    plan.fail_at = 1
    again = kit.open(device=FaultyDevice(plan))
    assert [event.state for event in kit.of(TierStateChanged)] == ["error"]
    chain = Chain(namespace(), 2)
    assert chain.save(again) == [SaveState.STORED] * 2
    assert read_all(again, chain.root, chain.keys) == 2
    again.close()
    third = kit.open()
    third.register(chain.space)
    assert third.lookup(chain.root, chain.keys).blocks == 2


def test_filesystem_that_refuses_direct_io_is_used_through_the_page_cache(kit, monkeypatch):
    really_open = os.open

    def refuse(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    store = kit.open()
    chain = Chain(namespace(), 5)
    assert chain.save(store) == [SaveState.STORED] * 5
    store.close()
    again = kit.open()
    again.register(chain.space)
    assert read_all(again, chain.root, chain.keys) == 5
    assert "store.ssd.direct" in kit.names()


def test_journal_names_only_pages_that_are_synced(kit, plan):
    store = kit.open(ssd="256KiB", dram="64KiB", device=FaultyDevice(plan))
    for seed in range(30):
        Chain(namespace(), 4, seed=seed).save(store)
    store.close()
    unsynced: set[str] = set()
    journal_writes = 0
    for operation, name in plan.log:
        if operation == "sync":
            unsynced.discard(name)
        elif name.startswith("journal"):
            assert unsynced == set(), f"the journal was written while {unsynced} were not durable"
            journal_writes += 1
            unsynced.add(name)
        else:
            unsynced.add(name)
    assert journal_writes >= 30
    assert unsynced == set()


@pytest.mark.parametrize("how", ["registered", "purged"])
def test_a_namespace_opened_while_the_journal_is_rewritten_outlives_a_restart(kit, monkeypatch, how):
    """A rewrite says what was there when it looked; the journal must hear of what came after."""
    store = kit.open()
    before, after = Chain(namespace("before"), 3), Chain(namespace("after"), 3)
    (before if how == "registered" else after).save(store)
    index, wanted = store._below.tier.index, [True]
    snapshot = index.snapshot

    def meanwhile():
        records = snapshot()
        if wanted and wanted.pop():
            if how == "registered":
                store.register(after.space)
            else:
                store.purge(lambda space: space == after.space)
        return records

    monkeypatch.setattr(index, "snapshot", meanwhile)
    store._below.tier._journal.is_broken = True
    before.save(store)
    Chain(before.space, 1, seed=9).save(store)
    assert not wanted, "no rewrite took place"
    assert after.save(store) == [SaveState.STORED] * 3
    store.close()
    again = kit.open()
    again.register(after.space)
    assert read_all(again, after.root, after.keys) == 3
