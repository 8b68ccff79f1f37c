"""A tier that somebody installed and that keeps failing is closed and made anew; what is asked of it that it has not, is said."""

from __future__ import annotations

import threading

import pytest
from tests.store.test_tier_suite import saved

from workmem.core.errors import ConfigError
from workmem.core.events import TierStateChanged
from workmem.core.layout import Namespace
from workmem.core.outcomes import MissReason, TierName
from workmem.store import ticker, writer
from workmem.store.config import BelowConfig, DramConfig, QuotaConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.store.tiers import opening
from workmem.testing.pages import SMALL, Chain, namespace, read_all, settle
from workmem.testing.tiers import FaultyTier, MemoryTier
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _in_haste(monkeypatch):
    monkeypatch.setattr(ticker, "TICK_S", 0.02)
    monkeypatch.setattr(writer, "_TICK_S", 0.02)


class Makes:
    """Makes tiers over one shelf, as a factory that is installed does."""

    def __init__(self, make) -> None:
        self.make = make
        self.made = []

    def __call__(self, name, options):
        self.made.append(self.make(len(self.made)))
        return self.made[-1]


def opened(monkeypatch, makes: Makes, events: list, dram: str = "128KiB") -> Store:
    monkeypatch.setattr(opening, "find_tier", makes)
    config = StoreConfig(
        dram=DramConfig(bytes=dram), below=BelowConfig(tier="mine"), ssd=SsdConfig(retry_s=0.05)
    )
    return Store(config, events.append)


def states(events) -> list[str]:
    return [event.state for event in events if isinstance(event, TierStateChanged)]


def test_one_that_keeps_failing_is_made_anew_and_hits_again(monkeypatch):
    shelf, events = {}, []
    makes = Makes(lambda count: FaultyTier(MemoryTier(shelf=shelf), fail_at=0, fail_until=10**9))
    with opened(monkeypatch, makes, events) as store:
        chains = saved(store, 16)
        below = [chain for chain in chains if set(chain.tiers(store)) == {TierName.SSD}]
        makes.made[0].fail_at = 1
        for trips, chain in enumerate(below[:3]):
            read_all(store, chain.root, chain.keys)
            wait_until(lambda trips=trips: states(events).count("error") > trips)
            if trips < 2:
                wait_until(lambda trips=trips: states(events).count("ok") > trips)
                wait_until(lambda: store.pool.state.reads_ssd)
        wait_until(lambda: states(events)[-3:] == ["draining", "rebuilding", "ok"])
        assert len(makes.made) == 2
        assert store.gauges()["store_below_rebuilds_total"] == 1
        assert store.gauges()["store_below_error"] == 0
        left = below[3:]
        assert left
        assert [read_all(store, chain.root, chain.keys) for chain in left] == [4] * len(left)
        more = Chain(namespace(), 4, seed=99)
        more.save(store)
        assert {(more.root, bytes(key)) for key in more.keys} <= {(name.root, name.key) for name in shelf}
        store.audit()


def test_what_was_purged_while_it_failed_is_dropped_from_the_one_that_comes_after(monkeypatch):
    mine = Chain(Namespace(model_fingerprint="model", layout=SMALL, tenant_salt="mine"), 4, seed=1)
    other = Chain(namespace(), 4, seed=2)
    shelf, events, may_open = {}, [], threading.Event()

    class Unwilling(MemoryTier):
        def open(self, arena):
            if not may_open.is_set():
                raise OSError("no route")
            return super().open(arena)

    makes = Makes(
        lambda count: (
            Unwilling(shelf=shelf)
            if count
            else FaultyTier(MemoryTier(shelf=shelf), operation="drop", fail_until=10**9)
        )
    )
    with opened(monkeypatch, makes, events, dram="1MiB") as store:
        mine.save(store)
        other.save(store)
        makes.made[0].fail_at = 1
        store.purge(lambda space: space == mine.space)
        wait_until(lambda: "no route" in store.ssd_problem)
        assert not store.flush(0.05)
        store.purge(lambda space: space == other.space)
        later = Chain(namespace("later"), 2, seed=3)
        store.register(later.space)
        store.save(later.root, later.writes())
        may_open.set()
        wait_until(lambda: store.ssd_problem == "")
        assert store.flush(20)
        assert {name.root for name in shelf} == {later.root}
        assert mine.tiers(store) == other.tiers(store) == ()
        store.audit()


def test_a_read_that_it_never_answers_costs_neither_the_lease_nor_the_frame(monkeypatch):
    shelf, events = {}, []

    class Silent(MemoryTier):
        is_silent = False

        def get(self, pages, done):
            if not self.is_silent:
                super().get(pages, done)

    makes = Makes(lambda count: FaultyTier(Silent(shelf=shelf), operation="put", fail_until=10**9))
    monkeypatch.setattr("workmem.store.rebuilding.CLOSE_S", 0.1)
    with opened(monkeypatch, makes, events) as store:
        chains = saved(store, 16)
        chain = next(chain for chain in chains if set(chain.tiers(store)) == {TierName.SSD})
        makes.made[0]._inner.is_silent = True
        lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=30)
        makes.made[0].fail_at = 1
        Chain(namespace(), 2, seed=50).save(store)
        settle(lease)
        assert (lease.ready, lease.failed) == (0, MissReason.UNAVAILABLE)
        lease.release()
        wait_until(lambda: store.gauges()["store_below_error"] == 0)
        assert store.gauges()["store_dram_quarantined_bytes"] == 0
        assert read_all(store, chain.root, chain.keys) == 4
        store.audit()


def test_one_failed_batch_is_put_again(monkeypatch):
    shelf, events = {}, []
    makes = Makes(lambda count: FaultyTier(MemoryTier(shelf=shelf), operation="put", fail_at=3))
    with opened(monkeypatch, makes, events, dram="1MiB") as store:
        chains = saved(store, 3)
        assert store.gauges()["store_writes_given_up_total"] == 0
        assert store.gauges()["store_ssd_writes_failed_total"] > 0
        assert store.gauges()["store_below_pages"] == len(shelf) == 12
    assert states(events) == []
    assert {(name.root, name.key) for name in shelf} == {
        (chain.root, bytes(key)) for chain in chains for key in chain.keys
    }


@pytest.mark.parametrize(
    ("below", "enabled", "why"),
    [("mine", True, "store.below.tier is 'mine'"), ("ssd", False, "store.ssd.enabled is false")],
)
@pytest.mark.parametrize("quota", [{"ssd_floor": "1MiB"}, {"ssd_ceiling": 0}])
def test_quotas_of_an_ssd_tier_that_is_not_there_are_refused(monkeypatch, below, enabled, why, quota):
    monkeypatch.setattr(opening, "find_tier", lambda name, options: MemoryTier())
    config = StoreConfig(
        dram=DramConfig(bytes="1MiB"),
        below=BelowConfig(tier=below),
        ssd=SsdConfig(enabled=enabled),
        quotas={"acme": QuotaConfig(dram_floor="64KiB", **quota)},
    )
    with pytest.raises(ConfigError) as caught:
        Store(config).close()
    (field,) = quota
    assert f'$.store.quotas."acme".{field}: {quota[field]!r}' in str(caught.value)
    assert why in str(caught.value)
