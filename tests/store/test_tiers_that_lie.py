"""What code of other people's tiers may do to a store: hold on to buffers, keep what it said it lost, break at the start."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from tests.store.test_tier_suite import opened, saved

from workmem.core.outcomes import TierName
from workmem.store.tiers.contract import Outcome
from workmem.testing.pages import Chain, namespace, read_all
from workmem.testing.tiers import MemoryTier

pytestmark = pytest.mark.timeout(60)


def test_a_tier_that_still_holds_a_view_of_the_buffer_when_it_answers_costs_nothing(monkeypatch):
    class Holds(MemoryTier):
        def __init__(self):
            super().__init__()
            self.views = []

        def get(self, pages, done):
            for index, page in enumerate(pages):
                self.views.append(pickle.PickleBuffer(page.into))
                page.into[:] = self.shelf[page.name][1]
                done(index, Outcome.DONE)

    tier = Holds()
    with opened(monkeypatch, tier) as store:
        chains = saved(store, 24)
        below = [chain for chain in chains if set(chain.tiers(store)) == {TierName.SSD}]
        assert [read_all(store, chain.root, chain.keys) for chain in below] == [4] * len(below)
        assert store.gauges()["store_below_read_errors_total"] == 0
        assert store._below.reader.close(0.0), "reads are counted as under way for ever"
        assert store._below.tier.place.readers == 0
        for view in tier.views:
            view.release()


def test_what_a_failed_batch_left_behind_goes_with_a_purge(monkeypatch):
    """A tier may keep pages of a batch that it failed: a purge that does not know of them brings them back."""

    class LosesReplies(MemoryTier):
        def put(self, pages, done):
            super().put(pages, lambda index, outcome: done(index, Outcome.FAILED))

    shelf = {}
    with opened(monkeypatch, LosesReplies(shelf=shelf), retry_s=0.1) as store:
        chain = Chain(namespace(), 4, seed=0)
        chain.save(store)
        store.flush(5)
        store.purge(lambda _: True)
        store.flush(5)
    with opened(monkeypatch, MemoryTier(shelf=shelf)) as store:
        store.register(chain.space)
        assert store.lookup(chain.root, chain.keys).blocks == 0


@pytest.mark.parametrize("broken", ["raises", "fails half-way"])
def test_a_tier_that_does_not_open_leaves_dram_to_serve_alone(monkeypatch, broken):
    shelf = {}
    chain = Chain(namespace(), 4)
    with opened(monkeypatch, MemoryTier(shelf=shelf)) as store:
        chain.save(store)
        assert store.flush(5)

    class Breaks(MemoryTier):
        is_closed = False

        def open(self, arena):
            if broken == "raises":
                raise KeyError("not today")
            return self.halves(super().open(arena))

        def halves(self, pages):
            yield next(iter(pages))
            raise KeyError("not all of it")

        def close(self, timeout_s):
            self.is_closed = True
            return super().close(timeout_s)

    tier = Breaks(shelf=shelf)
    with opened(monkeypatch, tier) as store:
        assert "not " in store.ssd_problem
        assert tier.is_closed
        store.register(chain.space)
        assert chain.tiers(store) == ()
        chain.save(store)
        assert read_all(store, chain.root, chain.keys) == 4
        store.audit()


def test_a_tier_that_learns_its_size_when_it_opens_is_held_to_it(monkeypatch):
    class Late(MemoryTier):
        size = None

        def open(self, arena):
            self.size = 64 * 1024
            return super().open(arena)

        def usage(self):
            return msgspec.structs.replace(super().usage(), capacity_bytes=self.size)

    with opened(monkeypatch, Late()) as store:
        saved(store, 24)
        gauges = store.gauges()
        assert gauges["store_below_capacity_bytes"] == 64 * 1024
        assert store._below.tier.index.live_bytes <= 64 * 1024


def test_pages_with_numbers_that_no_page_has_are_not_taken_over(monkeypatch):
    shelf = {}
    chain = Chain(namespace(), 1)
    with opened(monkeypatch, MemoryTier(shelf=shelf)) as store:
        chain.save(store)
        assert store.flush(5)

    class Boasts(MemoryTier):
        def open(self, arena):
            return [msgspec.structs.replace(page, depth=-1) for page in super().open(arena)]

    with opened(monkeypatch, Boasts(shelf=shelf)) as store:
        store.register(chain.space)
        assert chain.tiers(store) == ()
        store.audit()
