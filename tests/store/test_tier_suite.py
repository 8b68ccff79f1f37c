"""The suites of tiers, passed by every tier there is; and a tier that is installed from outside serves hits."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from workmem.core.errors import ConfigError
from workmem.core.events import BlockPromoted, BlockQuarantined, TierStateChanged
from workmem.core.outcomes import MissReason, TierName
from workmem.store.config import BelowConfig, DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.store.tiers import opening
from workmem.store.tiers.contract import Outcome, Tier
from workmem.store.tools.running_stat import running_stat
from workmem.testing.below_suite import BelowSuite, below_config
from workmem.testing.pages import Chain, namespace, read_all, settle
from workmem.testing.tier_suite import TierSuite
from workmem.testing.tiers import FaultyTier, MemoryTier, SimulatedTier

pytestmark = pytest.mark.timeout(120)


class TestMemoryTier(TierSuite):
    def make(self) -> Tier:
        return MemoryTier(4 * 2**20)

    def again(self, tier: Tier) -> Tier | None:
        return MemoryTier(4 * 2**20, tier.shelf)


class TestTierThatMakesRoomItself(TierSuite):
    """Capacity 0: the store does not bound it."""

    def make(self) -> Tier:
        return MemoryTier()


class TestSimulatedTier(TierSuite):
    def make(self) -> Tier:
        return SimulatedTier(MemoryTier(4 * 2**20), latency_s=0.0002, bytes_per_s=2e9)


class TestFaultyTierWithoutFaults(TierSuite):
    def make(self) -> Tier:
        return FaultyTier(MemoryTier(4 * 2**20))

    def again(self, tier: Tier) -> Tier | None:
        return FaultyTier(MemoryTier(4 * 2**20, tier._inner.shelf))


def opened(monkeypatch, tier: Tier, dram: str = "256KiB", sink=lambda event: None, retry_s=30.0) -> Store:
    """A store over `tier`, as if it were installed."""
    monkeypatch.setattr(opening, "find_tier", lambda name, options: tier)
    config = StoreConfig(
        dram=DramConfig(bytes=dram),
        below=BelowConfig(tier="mine"),
        ssd=SsdConfig(enabled=False, retry_s=retry_s),
    )
    return Store(config, sink)


class BelowAttached(BelowSuite):
    @pytest.fixture(autouse=True)
    def _patch(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.shelf = {}

    def make(self) -> Tier:
        return MemoryTier(8 * 2**20, self.shelf)

    def open(self, dram: str) -> Store:
        return opened(self.monkeypatch, self.make(), dram)


class TestStoreOverMemory(BelowAttached):
    pass


class TestStoreOverALink(BelowAttached):
    kind = TierName.REMOTE

    def make(self) -> Tier:
        return SimulatedTier(super().make(), latency_s=0.0005, bytes_per_s=1e9)


class TestStoreOverATierWithoutFaults(BelowAttached):
    def make(self) -> Tier:
        return FaultyTier(super().make())


class TestStoreOverSsd(BelowSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path / "store"

    def open(self, dram: str) -> Store:
        ssd = SsdConfig(path=str(self.folder), bytes="16MiB")
        return Store(StoreConfig(dram=DramConfig(bytes=dram), ssd=ssd))


class TestStoreOverSsdWithAnArenaOnAFile(TestStoreOverSsd):
    """As persistent or CXL memory is used: dram on one path, ssd on another."""

    def open(self, dram: str) -> Store:
        ssd = SsdConfig(path=str(self.folder), bytes="16MiB")
        arena = str(self.folder.parent / "arena")
        store = Store(StoreConfig(dram=DramConfig(bytes=dram, path=arena), ssd=ssd))
        assert Path(arena).stat().st_size >= store.arena.capacity_bytes
        return store


# A tier that misbehaves


def saved(store: Store, count: int = 12) -> list[Chain]:
    chains = [Chain(namespace(), 4, seed=seed) for seed in range(count)]
    for chain in chains:
        chain.save(store)
    return chains


def test_a_read_that_fails_is_a_miss_and_three_in_a_row_trip_the_tier(monkeypatch):
    events = []
    tier = FaultyTier(MemoryTier(), fail_at=1, fail_until=10**9)
    with opened(monkeypatch, tier, sink=events.append, retry_s=0.2) as store:
        chains = saved(store, 24)
        below = [chain for chain in chains if TierName.SSD in chain.tiers(store)]
        for chain in below[:4]:
            lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=20)
            settle(lease)
            assert lease.failed is MissReason.UNAVAILABLE
            lease.release()
        until = time.monotonic() + 10
        while not any(isinstance(event, TierStateChanged) for event in events):
            assert time.monotonic() < until
            time.sleep(0.01)
        tier.fail_at = 0
        while store.gauges()["store_below_error"]:
            assert time.monotonic() < until
            time.sleep(0.01)
        left = [chain for chain in below[4:] if chain.tiers(store)]
        assert left
        assert all(read_all(store, chain.root, chain.keys) > 0 for chain in left)
        store.audit()


def test_writes_that_fail_once_are_tried_again(monkeypatch):
    tier = FaultyTier(MemoryTier(), operation="put", fail_at=2)
    with opened(monkeypatch, tier) as store:
        saved(store)
        assert store.gauges()["store_below_pages"] == 48
        assert store.gauges()["store_below_write_errors_total"] == 1


@pytest.mark.parametrize("raises", [False, True])
def test_a_purge_that_the_tier_fails_once_is_not_forgotten(monkeypatch, raises):
    class Raises(MemoryTier):
        left = 1

        def drop(self, names, done):
            if self.left:
                self.left -= 1
                raise RuntimeError("rude")
            super().drop(names, done)

    shelf = {}
    tier = Raises(shelf=shelf) if raises else FaultyTier(MemoryTier(shelf=shelf), operation="drop", fail_at=2)
    with opened(monkeypatch, tier) as store:
        saved(store, 4)
        assert len(shelf) == 16
        store.purge(lambda _: True)
        assert store.flush(20)
        assert shelf == {}


def test_a_page_that_comes_back_changed_is_a_miss_and_told(monkeypatch):
    events, shelf = [], {}
    with opened(monkeypatch, MemoryTier(shelf=shelf), sink=events.append) as store:
        chains = saved(store, 24)
        chain = next(chain for chain in chains if set(chain.tiers(store)) == {TierName.SSD})
        name = next(name for name in shelf if name.key == bytes(chain.keys[1]))
        about, page = shelf[name]
        shelf[name] = (about, page[:5000] + bytes([page[5000] ^ 1]) + page[5001:])
        assert read_all(store, chain.root, chain.keys) == 1
        assert [event.reason for event in events if isinstance(event, BlockQuarantined)] == [
            MissReason.CORRUPT
        ]


def test_another_page_under_the_name_is_never_served(monkeypatch):
    shelf = {}
    with opened(monkeypatch, MemoryTier(shelf=shelf)) as store:
        chains = saved(store, 24)
        chain = next(chain for chain in chains if set(chain.tiers(store)) == {TierName.SSD})
        names = {name.key: name for name in shelf}
        first, second = names[bytes(chain.keys[0])], names[bytes(chain.keys[1])]
        shelf[first], shelf[second] = shelf[second], shelf[first]
        assert read_all(store, chain.root, chain.keys) == 0


def test_what_a_tier_forgot_by_itself_is_a_miss_and_no_failure(monkeypatch):
    shelf = {}
    with opened(monkeypatch, MemoryTier(shelf=shelf)) as store:
        chains = saved(store, 24)
        chain = next(chain for chain in chains if set(chain.tiers(store)) == {TierName.SSD})
        shelf.clear()
        lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=20)
        settle(lease)
        assert (lease.ready, lease.failed) == (0, MissReason.EVICTED)
        lease.release()
        gauges = store.gauges()
        assert gauges["store_below_read_errors_total"] == gauges["store_quarantines_total"] == 0
        assert store.lookup(chain.root, chain.keys[:1]).blocks == 0


def test_a_small_tier_makes_room_by_the_stores_order(monkeypatch):
    with opened(monkeypatch, MemoryTier(128 * 1024), dram="64KiB") as store:
        saved(store, 24)
        gauges = store.gauges()
        assert gauges["store_below_used_bytes"] <= 128 * 1024
        assert gauges["store_ssd_evictions_total"] > 0
        assert gauges["store_below_pages"] == gauges["store_below_used_bytes"] / 8192
        store.audit()


def test_a_tier_that_raises_or_answers_twice_harms_nobody(monkeypatch):
    class Rude(MemoryTier):
        raises = False

        def get(self, pages, done):
            if self.raises:
                raise RuntimeError("rude")
            super().get(pages, done)
            super().get([], done)
            done(0, Outcome.DONE)
            done(99, Outcome.FAILED)

    tier = Rude()
    with opened(monkeypatch, tier) as store:
        chains = saved(store, 24)
        below = [chain for chain in chains if set(chain.tiers(store)) == {TierName.SSD}]
        assert read_all(store, below[0].root, below[0].keys) == 4
        tier.raises = True
        assert read_all(store, below[1].root, below[1].keys) == 0
        store.audit()


def test_reads_do_not_wait_for_each_other(monkeypatch):
    """A lease returns at once while the tier is slow, and pages arrive as they come."""
    gate = threading.Event()

    class Slow(MemoryTier):
        def get(self, pages, done):
            threading.Thread(target=lambda: (gate.wait(20), MemoryTier.get(self, pages, done))).start()

    with opened(monkeypatch, Slow()) as store:
        chains = saved(store, 24)
        below = [chain for chain in chains if set(chain.tiers(store)) == {TierName.SSD}][:3]
        leases = [store.lease(chain.root, chain.keys, owner="t", ttl_s=20) for chain in below]
        assert [lease.ready for lease in leases] == [0, 0, 0]
        gate.set()
        for lease in leases:
            settle(lease)
            assert lease.ready == 4
            lease.release()


# A tier of somebody else


def install(folder: Path, monkeypatch) -> None:
    """Put a package with a tier on the path, as pip would."""
    (folder / "shelf_tier.py").write_text(
        textwrap.dedent(
            """
            from workmem.core.errors import ConfigError
            from workmem.testing.tiers import MemoryTier

            SHELVES = {}

            def make(options):
                if "shelf" not in options:
                    raise ConfigError("$.store.below.options: needs shelf")
                return MemoryTier(0, SHELVES.setdefault(options["shelf"], {}))
            """
        )
    )
    info = folder / "shelf_tier-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf-tier\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[workmem.tiers]\nshelf = shelf_tier:make\nbroken = shelf_tier:nothing\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "shelf_tier", raising=False)


def test_a_tier_from_an_installed_package_serves_hits_after_a_restart(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    config = StoreConfig(
        dram=DramConfig(bytes="256KiB"), below=BelowConfig(tier="shelf", options={"shelf": "one"})
    )
    with Store(config) as store:
        chains = saved(store, 6)
    events = []
    with Store(config, events.append) as store:
        for chain in chains:
            store.register(chain.space)
            assert read_all(store, chain.root, chain.keys) == 4
    assert sum(event.blocks for event in events if isinstance(event, BlockPromoted)) == 24


def test_a_tier_that_is_not_there_or_does_not_load_is_an_error_that_says_so(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"\$\.store\.below\.tier: 'cloud' is not installed; .*shelf, ssd"):
        Store(below_config("cloud", "1MiB"))
    with pytest.raises(ConfigError, match=r"\$\.store\.below\.options: needs shelf"):
        Store(below_config("shelf", "1MiB"))
    with pytest.raises(ConfigError, match=r"\$\.store\.below\.tier: 'broken' does not load"):
        Store(below_config("broken", "1MiB"))


def test_options_are_for_installed_tiers(tmp_path):
    config = StoreConfig(below=BelowConfig(options={"a": 1}), ssd=SsdConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"\$\.store\.below\.options"):
        Store(config)


class Remote(MemoryTier):
    kind = TierName.REMOTE


class Unplugged(Remote):
    def open(self, arena):
        del arena
        raise OSError("no route")


def test_events_and_readings_are_of_the_tier_that_is_installed(monkeypatch):
    events = []
    tier = FaultyTier(Remote(8 * 2**20), operation="put", fail_at=5, fail_until=10**9)
    with opened(monkeypatch, tier, sink=events.append) as store:
        Chain(namespace(), 4).save(store)
        dram, below = running_stat(store.gauges()).tiers
        assert (dram.tier, below.tier) == ("dram", "below")
        assert (below.eviction, below.pages, below.missed_blocks) == ("value", 4, 4)
        Chain(namespace(), 4, seed=1).save(store)
        (tripped,) = [event for event in events if isinstance(event, TierStateChanged)]
    assert (tripped.tier, tripped.state) == (TierName.REMOTE, "error")


def test_a_tier_that_cannot_be_opened_is_told_by_its_own_kind(monkeypatch):
    events = []
    with opened(monkeypatch, Unplugged(), sink=events.append) as store:
        assert "no route" in store.ssd_problem
    (told,) = [event for event in events if isinstance(event, TierStateChanged)]
    assert (told.tier, told.state) == (TierName.REMOTE, "error")
