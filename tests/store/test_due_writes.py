"""Which pages go to the tier below first."""

from __future__ import annotations

import pytest

from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.due_writes import DueWrites
from workmem.store.store import Store
from workmem.testing.pages import Chain, namespace


def test_what_was_just_saved_goes_before_what_is_queued_again():
    due = DueWrites()
    for row in (1, 2):
        due.add_again((row, 0))
    for row in (3, 4):
        due.add((row, 0))
    assert (len(due), list(due), due.first) == (4, [(3, 0), (4, 0), (1, 0), (2, 0)], (3, 0))
    assert due.take_last() == (2, 0), "whoever needs the room takes it from the end"
    due.put_back(due.take_first())
    assert [due.take_first() for _ in range(3)] == [(3, 0), (4, 0), (1, 0)]
    assert not due
    with pytest.raises(IndexError):
        _ = due.first
    due.add((5, 0))
    due.add_again((6, 0))
    due.clear()
    assert not list(due)


def test_after_an_outage_a_fresh_context_does_not_wait_behind_all_that_dram_holds():
    config = StoreConfig(dram=DramConfig(bytes="4MiB"), ssd=SsdConfig(enabled=False))
    with Store(config) as store:
        old, fresh = Chain(namespace(), 12, seed=1), Chain(namespace(), 3, seed=2)
        old.save(store)
        state = store.pool.state
        state.wants_writes = True
        store.pool.requeue_writes()
        assert len(state.unwritten) == 12
        store.save(fresh.root, fresh.writes())
        for _ in range(2000):
            if len(state.unwritten) == 15:
                break
            store._saver.drain(0.01)
        taken = [state.catalog.key[row] for row, _ in list(state.unwritten)[:3]]
        assert taken == fresh.keys, "in their own order: a parent before its children"
        with state.outbox:
            for row, stamp in state.unwritten:
                state.write_ended(row, stamp)
            state.unwritten.clear()
        state.wants_writes = False
        store.audit()


def test_what_is_queued_again_is_not_passed_over_for_ever():
    """As long as engines save as fast as the tier takes there is always something fresh."""
    due = DueWrites()
    due.add_again((0, 0))
    taken = []
    for row in range(1, 20):
        due.add((row, 0))
        is_next = due.first
        taken.append(due.take_first())
        assert taken[-1] == is_next
    assert (0, 0) in taken
