"""Blocks that name each other as the one before: a bug of whoever saves, which must not stop a store for good."""

from __future__ import annotations

import msgspec
import pytest
from tests.store.test_tier_suite import opened, saved

from workmem.core.outcomes import TierName
from workmem.store.contract import BlockId, SaveState
from workmem.testing.pages import Chain, namespace, page_bytes, read_all
from workmem.testing.tiers import MemoryTier

SPACE = namespace()
CHAIN = Chain(SPACE, 3)
pytestmark = pytest.mark.timeout(20)


def put_a_ring(store) -> None:
    """Each of three blocks names another as its parent, the first one the last."""
    store.register(SPACE)
    first, second, third = (CHAIN.block(index) for index in range(3))
    ring = [BlockId(first.key, third.key, first.tokens, 0), second, third]
    pages = [(block, page_bytes(block.key, SPACE.layout)) for block in ring]
    assert store.put(CHAIN.root, pages) == [SaveState.STORED] * 3
    assert store.flush(10)


@pytest.mark.parametrize("eviction", ["value", "lru"])
def test_a_ring_of_parents_is_restored_and_can_leave(kit, eviction):
    put_a_ring(kit.open(eviction=eviction))
    kit.close()
    store = kit.open(eviction=eviction)
    assert read_all(store, CHAIN.root, CHAIN.keys) == 3
    index = store._below.tier.index
    index.evict(1 << 30)
    assert index.page_count == 0


def test_a_quota_is_set_over_a_ring_of_parents(kit):
    store = kit.open()
    put_a_ring(store)
    store.set_quota("a", TierName.DRAM, floor_bytes=4096)
    store.set_quota("a", TierName.SSD, floor_bytes=4096)
    assert read_all(store, CHAIN.root, CHAIN.keys) == 3


def test_a_ring_that_comes_from_ssd_can_leave_dram(kit):
    put_a_ring(kit.open())
    kit.close()
    store = kit.open()
    # All three are under way at once, and each would wait for the next.
    assert read_all(store, CHAIN.root, CHAIN.keys) == 3
    state = store.pool.state
    assert not state._is_late
    assert len(state.order) == 3


def test_a_tier_that_calls_a_block_its_own_parent_is_opened(monkeypatch):
    shelf = {}
    with opened(monkeypatch, MemoryTier(shelf=shelf)) as store:
        saved(store, 2)
    for name, (about, page) in shelf.items():
        shelf[name] = msgspec.structs.replace(about, parent=name.key), page
    with opened(monkeypatch, MemoryTier(shelf=shelf)) as store:
        store._below.tier.index.evict(1 << 30)
        assert store._below.tier.index.page_count == 0
