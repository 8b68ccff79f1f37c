"""Save, look up, lease, read, release: the promise of `KVStore`, with and without an ssd tier."""

from __future__ import annotations

import ctypes
import threading

import pytest
import xxhash

from workmem.core.errors import CapacityError, InvariantError, LeaseError
from workmem.core.events import BlockAdmitted, BlockEvicted, BoundReached
from workmem.core.keys import BlockKey
from workmem.core.outcomes import MissReason, TierName
from workmem.store import catalog
from workmem.store.contract import PageWrite, SaveState
from workmem.testing.pages import SLICED, SMALL, Chain, namespace, page_bytes, read_all, settle

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["dram", "dram+ssd"])
def store(request, kit):
    return kit.open(ssd="16MiB" if request.param == "dram+ssd" else 0)


def test_saved_pages_are_hits_and_read_back(store):
    chain = Chain(namespace(), 8)
    assert chain.save(store) == [SaveState.STORED] * 8
    found = store.lookup(chain.root, chain.keys)
    assert found.tiers == (TierName.DRAM,) * 8
    assert found.reason is None
    assert read_all(store, chain.root, chain.keys) == 8


def test_lookup_stops_at_the_first_hole_and_says_cold(store):
    chain = Chain(namespace(), 6)
    store.register(chain.space)
    store.save(chain.root, chain.writes(indices=[0, 1, 3]))
    store.flush(10)
    found = store.lookup(chain.root, chain.keys)
    assert found.blocks == 2
    assert found.reason is MissReason.COLD


def test_lease_of_a_longer_chain_settles_with_the_reason(store):
    chain = Chain(namespace(), 6)
    store.register(chain.space)
    store.save(chain.root, chain.writes(indices=[0, 1]))
    store.flush(10)
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    settle(lease)
    assert (lease.ready, lease.failed) == (2, MissReason.COLD)
    with pytest.raises(LeaseError, match="not ready"):
        lease.page(2)
    lease.release()


def test_saving_twice_says_already_there(store):
    chain = Chain(namespace(), 3)
    chain.save(store)
    assert chain.save(store) == [SaveState.ALREADY_THERE] * 3


def test_page_is_in_place_read_only_and_carries_its_checksums(store):
    chain = Chain(namespace("sliced", SLICED), 2)
    chain.save(store)
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    page = lease.page(1)
    assert page.readonly
    assert ctypes.string_at(lease.page_address(1), SLICED.page_bytes) == bytes(page)
    assert lease.source(1) == (page, lease.page_address(1), lease.checksums(1))
    spans = [SLICED.slice_span(index) for index in range(SLICED.slice_count)]
    assert len(spans) == 3
    assert lease.checksums(1) == tuple(xxhash.xxh3_64_intdigest(page[a:b]) for a, b in spans)
    assert lease.tokens(1) == chain.block(1).tokens
    page.release()
    lease.release()


def test_release_is_once_and_pages_are_out_of_reach_after(store):
    chain = Chain(namespace(), 1)
    chain.save(store)
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    lease.release()
    with pytest.raises(LeaseError, match="released twice"):
        lease.release()
    for use in (lease.page, lease.checksums, lease.page_address, lease.source, lease.quarantine):
        with pytest.raises(LeaseError, match="released"):
            use(0)


def test_settled_lease_calls_back_at_once_and_once(store):
    chain = Chain(namespace(), 2)
    chain.save(store)
    calls = []
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    lease.on_settled(lambda: calls.append(1))
    lease.release()
    assert calls == [1]


def test_blocks_of_another_namespace_are_never_hits(store):
    chain = Chain(namespace("a"), 3)
    chain.save(store)
    other = store.register(namespace("b"))
    assert store.lookup(other, chain.keys).blocks == 0


def test_unregistered_root_is_a_bug_of_the_caller(store):
    with pytest.raises(InvariantError, match="not registered"):
        store.lookup(b"\1" * 32, [])


def test_block_of_the_wrong_width_is_refused_before_anything_is_queued(store):
    chain = Chain(namespace("other", SLICED), 1)
    root = store.register(namespace())
    with pytest.raises(InvariantError, match="4 tokens"):
        store.save(root, chain.writes())


def test_exception_in_copy_drops_the_page_and_frees_its_frame(store, kit):
    chain = Chain(namespace(), 2)
    store.register(chain.space)
    states = []

    def explode(view: memoryview) -> None:
        view[:4] = b"half"
        raise RuntimeError("device lost")

    store.save(chain.root, [PageWrite(chain.block(0), explode, states.append)])
    store.flush(10)
    assert states == [SaveState.DROPPED]
    assert store.gauges()["store_dram_used_bytes"] == 0
    assert store.lookup(chain.root, chain.keys).blocks == 0
    assert "store.save_copy" in kit.names()
    assert chain.save(store) == [SaveState.STORED] * 2


def test_exception_in_done_harms_no_other_page(store, caplog):
    chain = Chain(namespace(), 2)
    store.register(chain.space)
    states = []

    def explode(_: SaveState) -> None:
        raise RuntimeError("caller's bug")

    store.save(chain.root, [*chain.writes(explode, [0]), *chain.writes(states.append, [1])])
    assert store.flush(10)
    assert states == [SaveState.STORED]
    assert "raised" in caplog.text


def test_full_queue_drops_and_every_done_is_called_once(kit):
    store = kit.open(save_queue_pages=4)
    chain = Chain(namespace(), 40)
    store.register(chain.space)
    gate, is_held = threading.Event(), threading.Event()
    counts = [0] * 40
    states = []

    def hold(view: memoryview) -> None:
        is_held.set()
        gate.wait(10)
        view[:] = page_bytes(chain.keys[0], SMALL)

    def counter(index: int):
        def done(state: SaveState) -> None:
            counts[index] += 1
            states.append(state)

        return done

    store.save(chain.root, [PageWrite(chain.block(0), hold, counter(0))])
    # Alone: a thread that wakes late would take what is queued behind it as well.
    assert is_held.wait(10)
    for index in range(1, 40):
        store.save(chain.root, chain.writes(counter(index), [index]))
    gate.set()
    assert store.flush(10)
    assert counts == [1] * 40
    assert states.count(SaveState.DROPPED) == 35
    assert "store.save_queue" in kit.names()


def test_done_is_called_once_for_pages_still_queued_at_close(kit):
    store = kit.open()
    chain = Chain(namespace(), 30)
    store.register(chain.space)
    counts = [0] * 30

    def counter(index: int):
        def done(_: SaveState) -> None:
            counts[index] += 1

        return done

    for index in range(30):
        store.save(chain.root, chain.writes(counter(index), [index]))
    store.close()
    store.save(chain.root, chain.writes(counter(0), [0]))
    assert counts == [2] + [1] * 29


def test_leased_pages_survive_pressure_and_held_frames_are_counted(kit):
    store = kit.open(ssd=0, dram="128KiB")
    held = Chain(namespace(), 8, seed=1)
    held.save(store)
    lease = store.lease(held.root, held.keys, owner="t", ttl_s=60)
    for seed in range(2, 12):
        Chain(namespace(), 8, seed=seed).save(store)
    for index in range(8):
        assert bytes(lease.page(index)) == page_bytes(held.keys[index], SMALL)
    lease.release()
    assert kit.of(BlockEvicted)
    store.audit()


def test_evicted_block_is_told_from_one_never_seen(kit):
    store = kit.open(ssd=0, dram="64KiB")
    first = Chain(namespace(), 8, seed=1)
    first.save(store)
    for seed in range(2, 6):
        Chain(namespace(), 8, seed=seed).save(store)
    assert store.lookup(first.root, first.keys[:1]).reason is MissReason.EVICTED
    assert store.lookup(first.root, Chain(namespace(), 1, seed=99).keys).reason is MissReason.COLD


def test_why_blocks_left_is_remembered_of_the_last_to_leave(monkeypatch):
    monkeypatch.setattr(catalog, "GHOSTS_MAX", 3)
    space = catalog.Space(namespace(), 1)
    for name in (b"a", b"b", b"c", b"a", b"d"):
        space.remember(BlockKey(name), MissReason.EVICTED)
    assert list(space.ghosts) == [b"c", b"a", b"d"]


def test_save_without_room_is_dropped_with_an_event(kit):
    store = kit.open(ssd=0, dram="128KiB")
    held = Chain(namespace(), 16, seed=1)
    held.save(store)
    lease = store.lease(held.root, held.keys, owner="t", ttl_s=60)
    assert lease.ready == 16
    states = Chain(namespace(), 1, seed=2).save(store)
    assert states == [SaveState.DROPPED]
    assert "store.dram.frames" in kit.names()
    lease.release()
    assert Chain(namespace(), 1, seed=2).save(store) == [SaveState.STORED]


def test_lease_larger_than_dram_raises_and_leaks_nothing(kit):
    store = kit.open(dram="128KiB")
    chain = Chain(namespace(), 40)
    for start in range(0, 40, 4):
        store.register(chain.space)
        store.save(chain.root, chain.writes(indices=range(start, start + 4)))
        assert store.flush(10)
    assert store.lookup(chain.root, chain.keys).blocks == 40
    with pytest.raises(CapacityError, match=r"store\.dram\.bytes"):
        store.lease(chain.root, chain.keys, owner="t", ttl_s=60)
    store.audit()
    assert read_all(store, chain.root, chain.keys[:16]) == 16
    assert store.dram_capacity_bytes() == 64 * 1024


def test_expired_lease_gives_its_pages_back_by_itself(kit, hand_clock):
    store = kit.open(ssd=0, dram="128KiB", clock=hand_clock)
    held = Chain(namespace(), 16, seed=1)
    held.save(store)
    lease = store.lease(held.root, held.keys, owner="gone", ttl_s=5)
    lease.renew(10)
    hand_clock.now += 9
    assert Chain(namespace(), 1, seed=2).save(store) == [SaveState.DROPPED]
    hand_clock.now += 2
    assert Chain(namespace(), 1, seed=2).save(store) == [SaveState.STORED]
    with pytest.raises(LeaseError, match="expired"):
        lease.page(0)
    with pytest.raises(LeaseError, match="expired"):
        lease.renew(5)
    lease.release()
    assert [event.name for event in kit.of(BoundReached) if "gone" in event.detail] == ["store.lease.ttl"]


def test_quarantined_page_is_corrupt_until_saved_again(store):
    chain = Chain(namespace(), 3)
    chain.save(store)
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    lease.quarantine(1)
    found = store.lookup(chain.root, chain.keys)
    assert (found.blocks, found.reason) == (1, MissReason.CORRUPT)
    assert store.gauges()["store_dram_quarantined_bytes"] == 2 * 4096
    lease.release()
    assert store.gauges()["store_dram_quarantined_bytes"] == 0
    states = chain.save(store)
    assert states == [SaveState.ALREADY_THERE, SaveState.STORED, SaveState.ALREADY_THERE]
    assert read_all(store, chain.root, chain.keys) == 3


def test_two_contexts_under_one_key_serve_neither(store):
    chain = Chain(namespace(), 1)
    chain.save(store)
    other = Chain(namespace(), 1, seed=5)
    forged = PageWrite(
        type(chain.block(0))(chain.keys[0], chain.root, other.block(0).tokens, 0),
        lambda view: None,
        lambda state: None,
    )
    store.save(chain.root, [forged])
    store.flush(10)
    assert store.lookup(chain.root, chain.keys).blocks == 0


def test_two_layouts_share_one_arena(store):
    small = Chain(namespace("small"), 8)
    large = Chain(namespace("large", SLICED), 2)
    small.save(store)
    large.save(store)
    assert read_all(store, large.root, large.keys) == 2
    assert read_all(store, small.root, small.keys) == 8
    store.audit()


def test_view_kept_past_close_is_no_crash(kit):
    store = kit.open(ssd=0)
    chain = Chain(namespace(), 1)
    chain.save(store)
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    page = lease.page(0)
    store.close()
    store.close()
    assert bytes(page) == page_bytes(chain.keys[0], SMALL)
    page.release()
    with pytest.raises(LeaseError, match="closed"):
        lease.page(0)
    lease.release()
    assert store.lookup(chain.root, chain.keys).reason is MissReason.DISABLED


def test_admission_is_an_event_per_tier(kit):
    store = kit.open()
    Chain(namespace(), 2).save(store)
    assert [event.tier for event in kit.of(BlockAdmitted)] == [TierName.DRAM] * 2 + [TierName.SSD] * 2
