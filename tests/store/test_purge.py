"""A purged tenant or epoch: no hit from the first moment, and nothing left of it afterwards."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from workmem.core.events import TierStateChanged
from workmem.core.layout import Namespace
from workmem.core.outcomes import MissReason
from workmem.store import store as store_module
from workmem.store.contract import PageWrite, SaveState
from workmem.store.tiers.journal_records import PutEntry
from workmem.testing.faulty_device import FaultPlan, FaultyDevice
from workmem.testing.pages import SMALL, Chain, namespace, page_bytes, read_all
from workmem.testing.waiting import wait_until


def tenant(name: str) -> Namespace:
    return Namespace(model_fingerprint="model", layout=SMALL, tenant_salt=name)


def of(name: str):
    return lambda space: space.tenant_salt == name


def on_disk(kit) -> bytes:
    return b"".join(file.read_bytes() for file in (kit.folder / "segments").iterdir())


def test_purge_is_complete_on_disk_and_in_memory(kit):
    store = kit.open(io="buffered")
    mine, other = Chain(tenant("mine"), 12, seed=1), Chain(tenant("other"), 12, seed=1)
    # In turns, so that they share their segments.
    for index in range(12):
        for chain in (mine, other):
            store.register(chain.space)
            store.save(chain.root, chain.writes(indices=[index]))
    assert store.flush(20)
    secret = page_bytes(mine.keys[3], SMALL)[:64]
    assert secret in on_disk(kit)
    assert store.purge(of("mine")).blocks == 12
    assert store.lookup(mine.root, mine.keys).blocks == 0
    assert store.lookup(mine.root, mine.keys).reason is MissReason.COLD
    arena = store.arena
    assert secret not in bytes(arena.readable(0, arena.capacity_bytes))
    assert store.flush(20)
    assert secret not in on_disk(kit)
    assert read_all(store, other.root, other.keys) == 12
    store.close()
    again = kit.open(io="buffered")
    for chain in (mine, other):
        again.register(chain.space)
    assert again.lookup(mine.root, mine.keys).blocks == 0
    assert read_all(again, other.root, other.keys) == 12


def test_a_purged_namespace_may_be_used_again_at_once(kit):
    store = kit.open()
    chain = Chain(tenant("mine"), 4)
    chain.save(store)
    store.purge(of("mine"))
    assert chain.save(store) == [SaveState.STORED] * 4
    assert read_all(store, chain.root, chain.keys) == 4
    store.close()
    again = kit.open()
    again.register(chain.space)
    assert read_all(again, chain.root, chain.keys) == 4


def test_purge_by_epoch_leaves_newer_weights_alone(kit):
    store = kit.open()
    chains = [
        Chain(Namespace(model_fingerprint="m", layout=SMALL, weights_epoch=epoch), 3, seed=epoch)
        for epoch in range(3)
    ]
    for chain in chains:
        chain.save(store)
    assert store.purge(lambda space: space.weights_epoch < 2).blocks == 6
    assert [store.lookup(chain.root, chain.keys).blocks for chain in chains] == [0, 0, 3]


def test_saves_and_loads_under_way_do_not_survive_a_purge(kit):
    store = kit.open(dram="256KiB")
    chain = Chain(tenant("mine"), 8)
    chain.save(store)
    for seed in range(10, 20):
        Chain(namespace(), 8, seed=seed).save(store)
    # Pages that only ssd has are on their way to dram while the purge comes.
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=60)
    late = Chain(tenant("mine"), 1, seed=77)
    states: list[SaveState] = []

    def copy_into(view: memoryview) -> None:
        store.purge(of("mine"))
        view[:] = page_bytes(late.keys[0], SMALL)

    store.save(late.root, [PageWrite(late.block(0), copy_into, states.append)])
    assert store.flush(20)
    assert states == [SaveState.DROPPED]
    lease.release()
    assert store.lookup(late.root, late.keys).blocks == 0
    assert store.lookup(chain.root, chain.keys).blocks == 0
    assert store.flush(20)
    store.audit()
    assert store.gauges()["store_dram_quarantined_bytes"] == 0


def test_a_page_on_its_way_to_disk_does_not_outlive_a_purge(kit, monkeypatch):
    store = kit.open(io="buffered")
    write = store._below.tier.write

    def purged_meanwhile(jobs):
        extents = write(jobs)
        store.purge(of("mine"))
        return extents

    monkeypatch.setattr(store._below.tier, "write", purged_meanwhile)
    chain = Chain(tenant("mine"), 4)
    chain.save(store)
    assert store.flush(20)
    secret = page_bytes(chain.keys[2], SMALL)[:64]
    assert store.lookup(chain.root, chain.keys).blocks == 0
    assert secret not in on_disk(kit)
    assert secret not in bytes(store.arena.readable(0, store.arena.capacity_bytes))


def test_a_page_that_is_being_moved_does_not_outlive_a_purge(kit, monkeypatch):
    store = kit.open(io="buffered")
    mine, other = Chain(tenant("mine"), 6, seed=1), Chain(tenant("other"), 6, seed=1)
    for chain in (mine, other):
        chain.save(store)
    index, waiting = store._below.tier.index, [True]
    move = index.move

    def purged_meanwhile(page, new):
        if waiting and waiting.pop():
            store.purge(of("mine"))
        move(page, new)

    monkeypatch.setattr(index, "move", purged_meanwhile)
    # The other tenant's purge moves what lies beside it.
    store.purge(of("other"))
    assert store.flush(20)
    assert not waiting
    for chain in (mine, other):
        assert page_bytes(chain.keys[3], SMALL)[:64] not in on_disk(kit)
    assert store.gauges()["store_ssd_pages"] == 0


@pytest.mark.parametrize("other_blocks", [0, 6], ids=["alone in its segments", "beside another"])
def test_what_is_being_purged_is_not_written_again(kit, monkeypatch, other_blocks):
    store = kit.open(io="buffered")
    mine, other = Chain(tenant("mine"), 40, seed=1), Chain(tenant("other"), other_blocks, seed=1)
    for chain in (mine, other):
        chain.save(store)
    withdraw, left, seen = store.pool.state.withdraw, iter(range(100)), []

    def slowly(row, reason):
        withdraw(row, reason)
        if next(left) == 33:
            # A part of the pages has left. The disk's thread may take its turn now, and sees the others.
            store.pool.state.outbox.lock.release()
            time.sleep(0.1)
            seen.append(len(list((kit.folder / "segments").iterdir())))
            store.pool.state.outbox.lock.acquire()

    monkeypatch.setattr(store.pool.state, "withdraw", slowly)
    assert store.purge(of("mine")).blocks == 40
    assert store.flush(20)
    assert seen == [1], "erased before all that is to be erased was known"
    moved = store.gauges()["store_ssd_moved_bytes_total"]
    assert moved == other_blocks * (4096 + SMALL.page_bytes)
    assert page_bytes(mine.keys[39], SMALL)[:64] not in on_disk(kit)
    assert read_all(store, other.root, other.keys) == other_blocks


def test_compaction_leaves_out_what_is_being_purged(kit, monkeypatch):
    store = kit.open(io="buffered")
    mine, other = Chain(tenant("mine"), 8, seed=1), Chain(tenant("other"), 8, seed=1)
    for chain in (mine, other):
        chain.save(store)
    tier = store._below.tier
    (segment,) = tier.index.segments.values()
    sweep = store.pool.sweep

    def compacted_first(space):
        # As where room is made on the disk while a purge has only begun.
        tier._files.seal(segment)
        tier._room.compact(segment)
        sweep(space)

    monkeypatch.setattr(store.pool, "sweep", compacted_first)
    store.purge(of("mine"))
    assert store.flush(20)
    assert store.gauges()["store_ssd_moved_bytes_total"] == 8 * (4096 + SMALL.page_bytes)
    assert page_bytes(mine.keys[3], SMALL)[:64] not in on_disk(kit)
    arena = store.arena
    assert page_bytes(mine.keys[3], SMALL)[:64] not in bytes(arena.readable(0, arena.capacity_bytes))
    assert read_all(store, other.root, other.keys) == 8


def test_purge_holds_after_a_kill(kit):
    script = f"""
    import os, signal
    from workmem.store.config import DramConfig, SsdConfig, StoreConfig
    from workmem.store.store import Store
    from workmem.testing.pages import SMALL, Chain
    from workmem.core.layout import Namespace
    ssd = SsdConfig(path={str(kit.folder)!r}, bytes="16MiB")
    store = Store(StoreConfig(dram=DramConfig(bytes="1MiB"), ssd=ssd))
    chains = [Chain(Namespace(model_fingerprint="model", layout=SMALL, tenant_salt=n), 6) for n in ("mine", "other")]
    for chain in chains:
        chain.save(store)
    store.purge(lambda space: space.tenant_salt == "mine")
    assert store.flush(20)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=os.environ.copy(), timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    store = kit.open()
    mine, other = Chain(tenant("mine"), 6), Chain(tenant("other"), 6)
    for chain in (mine, other):
        store.register(chain.space)
    assert store.lookup(mine.root, mine.keys).blocks == 0
    assert read_all(store, other.root, other.keys) == 6


@pytest.mark.parametrize("is_rewritten", [False, True], ids=["journal as it is", "journal written anew"])
def test_a_close_that_cuts_a_purge_short_frees_the_folder_and_the_next_start_goes_on(
    kit, monkeypatch, is_rewritten
):
    monkeypatch.setattr(store_module, "CLOSE_S", 0.2)
    plan = FaultPlan()
    store = kit.open(device=FaultyDevice(plan), ssd="512KiB", io="buffered")
    mine, other = Chain(tenant("mine"), 6, seed=1), Chain(tenant("other"), 18, seed=1)
    # In turns, so that little of what is purged has much beside it to move.
    for index in range(18):
        for chain in (mine, other):
            store.register(chain.space)
            if index < len(chain.keys):
                store.save(chain.root, chain.writes(indices=[index]))
    assert store.flush(20)
    secrets = [page_bytes(key, SMALL)[:64] for key in mine.keys]
    journal = store._below.tier._journal
    if is_rewritten:
        # Of a namespace that is not there: the next start drops it, and writes what is left anew.
        journal.append([PutEntry(77, bytes(32), bytes(32), 0, 1, 4096, 4096, 0)])
    plan.delay_s = 0.03
    store.purge(of("mine"))
    store.close()
    records = journal.record_count
    cut = on_disk(kit)
    assert any(secret in cut for secret in secrets), "the close waited for all of it"
    # At once, in the same process: the lock went with the close.
    again = kit.open(device=FaultyDevice(plan), ssd="512KiB", io="buffered")
    if is_rewritten:
        assert again._below.tier._journal.record_count < records
        again.close()
        again = kit.open(device=FaultyDevice(plan), ssd="512KiB", io="buffered")
    plan.delay_s = 0.0
    assert again.flush(20)
    left = on_disk(kit)
    assert not any(secret in left for secret in secrets)
    for chain in (mine, other):
        again.register(chain.space)
    assert again.lookup(mine.root, mine.keys).blocks == 0
    assert read_all(again, other.root, other.keys) == 18


def test_a_segment_that_was_erased_gives_its_number_to_no_other(kit):
    chain = Chain(tenant("mine"), 4)
    for _ in range(3):
        store = kit.open()
        chain.save(store)
        store.purge(of("mine"))
        assert store.flush(20)
        assert list((kit.folder / "segments").iterdir()) == []
        store.close()
    store = kit.open()
    chain.save(store)
    (segment,) = (kit.folder / "segments").iterdir()
    assert int(segment.stem) == 4


def test_a_purge_that_comes_while_the_disk_refuses_is_not_said_to_be_done(kit):
    plan = FaultPlan()
    store = kit.open(device=FaultyDevice(plan), retry_s=0.3, io="buffered")
    mine, other = Chain(tenant("mine"), 4, seed=1), Chain(namespace(), 4, seed=2)
    mine.save(store)
    plan.writes_fail = errno.ENOSPC
    other.save(store)
    wait_until(lambda: kit.of(TierStateChanged))
    store.purge(of("mine"))
    assert not store.flush(0.1)
    plan.writes_fail = 0
    assert store.flush(20)
    assert page_bytes(mine.keys[3], SMALL)[:64] not in on_disk(kit)


def test_a_purge_is_tried_once_more_when_a_store_with_a_tripped_disk_ends(kit):
    plan = FaultPlan()
    store = kit.open(device=FaultyDevice(plan), retry_s=60.0)
    mine, other = Chain(tenant("mine"), 4, seed=1), Chain(namespace(), 4, seed=2)
    mine.save(store)
    plan.writes_fail = errno.ENOSPC
    other.save(store)
    wait_until(lambda: kit.of(TierStateChanged))
    store.purge(of("mine"))
    plan.writes_fail = 0
    store.close()
    again = kit.open()
    again.register(mine.space)
    assert again.lookup(mine.root, mine.keys).blocks == 0
