"""Several threads on one store under pressure, and what happens without anybody calling."""

from __future__ import annotations

import math
import os
import random
import threading
import time

import pytest

from workmem.core.errors import CapacityError, ConfigError
from workmem.core.events import BlockPromoted
from workmem.core.outcomes import MissReason
from workmem.store.arena import Arena
from workmem.testing.faulty_device import FaultPlan, FaultyDevice
from workmem.testing.pages import SLICED, Chain, namespace, page_bytes, read_all, settle

pytestmark = pytest.mark.timeout(60)

CHAINS = [Chain(namespace("small"), 6, seed=seed) for seed in range(12)]
CHAINS += [Chain(namespace("sliced", SLICED), 2, seed=seed) for seed in range(4)]

READS_MIN = 35


class Worker(threading.Thread):
    """Saves, leases, reads and now and then quarantines, until a time, and until it has read enough to show anything."""

    def __init__(self, store, seed: int, until: float) -> None:
        super().__init__()
        self.store = store
        self.rng = random.Random(seed)
        self.until = until
        self.read = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while time.monotonic() < self.until or self.read <= READS_MIN:
                chain = self.rng.choice(CHAINS)
                if self.rng.random() < 0.4:
                    self.store.save(chain.root, chain.writes())
                else:
                    self.look(chain)
        except Exception as error:  # noqa: BLE001  # told to the test, which fails with it
            self.error = error

    def look(self, chain: Chain) -> None:
        try:
            lease = self.store.lease(chain.root, chain.keys, owner=self.name, ttl_s=30)
        except CapacityError:
            return
        settle(lease)
        for index in range(lease.ready):
            assert lease.page(index) == page_bytes(chain.keys[index], lease.layout)
            self.read += 1
        if lease.ready and self.rng.random() < 0.05:
            lease.quarantine(self.rng.randrange(lease.ready))
        lease.release()


def test_savers_readers_and_quarantines_at_once(kit):
    store = kit.open(dram="1MiB", ssd="3MiB", readers=2)
    for chain in CHAINS:
        store.register(chain.space)
    workers = [Worker(store, seed, time.monotonic() + 2.5) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.error for worker in workers] == [None] * 3
    assert store.flush(20)
    store.audit()
    gauges = store.gauges()
    assert gauges["store_dram_quarantined_bytes"] == 0
    assert gauges["store_quarantines_total"] > 0
    assert gauges["store_dram_evictions_total"] > 0


def test_lease_of_a_holder_that_vanished_ends_without_anybody_calling(kit):
    store = kit.open(ssd=0)
    chain = Chain(namespace(), 3)
    chain.save(store)
    store.lease(chain.root, chain.keys, owner="vanished", ttl_s=0.2)
    until = time.monotonic() + 5
    while store.gauges()["store_leases_expired_total"] == 0:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert "store.lease.ttl" in kit.names()


def test_one_endless_lease_keeps_no_ended_ones_alive(kit):
    store = kit.open(ssd=0)
    chain = Chain(namespace(), 3)
    chain.save(store)
    endless = store.lease(chain.root, chain.keys, owner="endless", ttl_s=math.inf)
    for _ in range(500):
        store.lease(chain.root, chain.keys, owner="brief", ttl_s=math.inf).release()
    assert len(store._pool.leases._deadlines) < 100
    assert endless.ready == 3
    endless.release()


def test_lease_that_expires_before_it_settles_calls_back(kit, hand_clock):
    chain = Chain(namespace(), 3)
    store = kit.open()
    chain.save(store)
    store.close()
    plan = FaultPlan()
    again = kit.open(clock=hand_clock, device=FaultyDevice(plan), readers=1)
    again.register(chain.space)
    gate = threading.Event()
    plan.before_read = lambda _path, _offset: gate.wait(20) and None
    lease = again.lease(chain.root, chain.keys, owner="t", ttl_s=5)
    told = threading.Event()
    lease.on_settled(told.set)
    assert not told.is_set()
    hand_clock.now += 6
    assert told.wait(5)
    assert (lease.ready, lease.failed) == (0, MissReason.EXPIRED)
    lease.release()
    gate.set()
    assert read_all(again, chain.root, chain.keys) == 3


def test_promotions_are_events_with_their_time(kit):
    store = kit.open()
    chain = Chain(namespace(), 9)
    chain.save(store)
    store.close()
    again = kit.open()
    again.register(chain.space)
    lease = again.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    settle(lease)
    lease.release()
    again.close()
    assert sum(event.blocks for event in kit.of(BlockPromoted)) == 9
    assert all(event.seconds >= 0 for event in kit.of(BlockPromoted))


def test_arena_on_a_file_is_shared_memory_with_one_owner(tmp_path):
    arena = Arena(64 * 1024, str(tmp_path / "arena"))
    arena.warm(64 * 1024, 64 * 1024)
    arena.writable(4096, 5)[:] = b"bytes"
    assert (tmp_path / "arena").read_bytes()[4096:4101] == b"bytes"
    with pytest.raises(ConfigError, match="in use"):
        Arena(64 * 1024, str(tmp_path / "arena"))
    arena.close()
    with pytest.raises(ConfigError, match=r"\$\.store\.dram\.bytes"):
        Arena(100)


def test_arena_on_a_file_is_its_users_own(tmp_path, monkeypatch):
    place = tmp_path / "arena"
    place.touch(0o666)
    place.chmod(0o666)
    Arena(64 * 1024, str(place)).close()
    assert place.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="another user"):
        Arena(64 * 1024, str(place))


def test_warming_leaves_bytes_alone():
    arena = Arena(8 * 2**20)
    arena.writable(5 * 2**20, 3)[:] = b"abc"
    for _ in range(10):
        arena.warm(8 * 2**20, 2**20)
    assert bytes(arena.readable(5 * 2**20, 3)) == b"abc"
    arena.close()


@pytest.mark.parametrize("size", [0, 4096, 1 << 20])
def test_nobody_changes_the_size_of_an_arena(size):
    """Whoever has its descriptor could, by mistake, and every process with a mapping would end at its next read."""
    arena = Arena(64 * 1024)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, size)
    arena.warm(64 * 1024, 64 * 1024)
    arena.close()
