"""What code of other people's tiers may do to a store: hold on to buffers, keep what it said it lost, break at the start."""

from __future__ import annotations

import pickle

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
        assert store._reader.close(0.0), "reads are counted as under way for ever"
        assert store._tier.place.readers == 0
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
