"""Pages that other stores put into a tier, and that they dropped, as the store takes that in."""

from __future__ import annotations

import pytest

from workmem.store.config import BelowConfig, DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.store.tiers import opening
from workmem.store.tiers.contract import HeldPage, PageName
from workmem.testing.pages import Chain, namespace, read_all
from workmem.testing.tiers import MemoryTier


class Told(MemoryTier):
    """A tier that says what it is told to say."""

    def __init__(self):
        super().__init__(0)
        self.dropped: list[PageName] = []

    def watch(self, seen):
        self.seen = seen

    def watch_losses(self, lost):
        self.lost = lost

    def drop(self, names, done):
        self.dropped += names
        super().drop(names, done)


@pytest.fixture
def told(monkeypatch):
    tier = Told()
    monkeypatch.setattr(opening, "find_tier", lambda name, options: tier)
    config = StoreConfig(
        dram=DramConfig(bytes="1MiB"), below=BelowConfig(tier="told"), ssd=SsdConfig(enabled=False)
    )
    with Store(config, lambda event: None) as store:
        yield store, tier


def pages_of(chain: Chain) -> list[HeldPage]:
    return [
        HeldPage(PageName(chain.root, bytes(key)), chain.space, bytes(chain.block(at).parent), at, 8192, at)
        for at, key in enumerate(chain.keys)
    ]


def test_pages_of_others_survive_that_their_namespace_was_empty_and_forgotten_a_moment_ago(told, monkeypatch):
    """To take them for purged would drop them from the tier, for all who share it."""
    store, tier = told
    chain = Chain(namespace(), 3)
    store.register(chain.space)
    take_in = store._below.tier.index.take_in
    forgotten: list[int] = []

    def forgetful(space, pages):
        if not forgotten:
            forgotten.append(store.forget_empty())
        return take_in(space, pages)

    monkeypatch.setattr(store._below.tier.index, "take_in", forgetful)
    tier.seen(pages_of(chain))
    assert forgotten == [1]
    assert store.lookup(chain.root, chain.keys).blocks == 3
    assert store.flush(20)
    assert not tier.dropped
    store.audit()


def test_pages_that_others_dropped_are_no_hits_and_what_dram_has_stays(told):
    store, tier = told
    chain = Chain(namespace(), 6)
    store.register(chain.space)
    chain.save(store)
    strangers = Chain(namespace("other"), 2)
    tier.seen(pages_of(strangers))
    assert store.lookup(strangers.root, strangers.keys).tiers == (tier.kind,) * 2
    tier.lost([PageName(strangers.root, bytes(strangers.keys[1])), PageName(bytes(32), bytes(32))])
    assert store.lookup(strangers.root, strangers.keys).blocks == 1
    tier.lost([PageName(chain.root, bytes(key)) for key in chain.keys])
    tier.lost([PageName(chain.root, bytes(key)) for key in chain.keys])
    assert read_all(store, chain.root, chain.keys) == 6
    assert store.gauges()["store_below_pages"] == 1
    assert store.flush(20)
    assert not tier.dropped
    store.audit()


def test_a_page_that_another_store_puts_while_this_one_does_is_one_page_and_nothing_waits_for_ever(
    told, monkeypatch
):
    """Two agents begin with the same prompt on two hosts: the log of one is heard before the put of the other ends."""
    store, tier = told
    put = MemoryTier.put

    def heard_first(self, pages, done):
        tier.seen([page.about for page in pages])
        put(self, pages, done)

    monkeypatch.setattr(Told, "put", heard_first)
    chain = Chain(namespace(), 6)
    chain.save(store)
    assert store.gauges()["store_below_pages"] == 6
    assert store.gauges()["store_below_used_bytes"] == 6 * 8192
    assert store.gauges()["store_below_write_errors_total"] == 0
    assert not store.pool.state.writes_in_flight
    assert read_all(store, chain.root, chain.keys) == 6
    store.audit()
