"""Pages that move so that what is free comes together: never one that is held, never to the wrong place."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from workmem.core.errors import CapacityError, InvariantError
from workmem.core.layout import KVLayout
from workmem.core.outcomes import MissReason, TierName
from workmem.store import compaction
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.contract import SaveState
from workmem.store.frames import FrameState, FrameTable
from workmem.store.store import Store
from workmem.store.tiers.page_header import generation_of
from workmem.testing.pages import SLICED, SMALL, Chain, namespace, page_bytes, read_all

pytestmark = pytest.mark.timeout(120)

MIB = 2**20
MIDDLE = KVLayout(dtype="bf16", layers=3, kv_heads=5, head_dim=128, block_tokens=8)
"""60 KiB pages."""
SPACES = (namespace("small", SMALL), namespace("middle", MIDDLE), namespace("sliced", SLICED))
CHAINS = tuple(Chain(space, 6, seed=seed) for space in SPACES for seed in range(8))


class Moves(RuleBasedStateMachine):
    """A small arena with three sizes of pages, where whatever is fragmented moves at once."""

    @initialize(eviction=st.sampled_from(["value", "lru"]))
    def start(self, eviction: str) -> None:
        self.before = compaction.PACKED_SHARE
        compaction.PACKED_SHARE = 0.0
        dram = DramConfig(bytes=2 * MIB, eviction=eviction)
        self.store = Store(StoreConfig(dram=dram, ssd=SsdConfig(enabled=False)))
        for space in SPACES:
            self.store.register(space)
        self.held: list = []

    @rule(chain=st.sampled_from(CHAINS), upto=st.integers(1, 6))
    def save(self, chain: Chain, upto: int) -> None:
        self.store.save(chain.root, chain.writes(indices=range(upto)))
        assert self.store.flush(20)

    @rule(chain=st.sampled_from(CHAINS), upto=st.integers(1, 3))
    def hold(self, chain: Chain, upto: int) -> None:
        if len(self.held) < 4:
            try:
                lease = self.store.lease(chain.root, chain.keys[:upto], owner="machine", ttl_s=600)
            except CapacityError:
                return
            self.held.append((lease, [(frame.offset, frame.generation) for frame in lease.frames]))

    @rule(pick=st.integers(0, 3))
    def let_go(self, pick: int) -> None:
        if pick < len(self.held):
            self.held.pop(pick)[0].release()

    @rule(space=st.sampled_from(SPACES))
    def purge(self, space) -> None:
        self.store.purge(lambda named: named == space)

    @rule(chain=st.sampled_from(CHAINS), keep=st.integers(1, 4))
    def bound(self, chain: Chain, keep: int) -> None:
        """Frames are charged to who keeps them, wherever they move."""
        self.store.set_quota(chain.space.tenant_salt, TierName.DRAM, ceiling_bytes=keep * MIB // 2)

    @rule()
    def tend(self) -> None:
        self.store.pool.pack()

    @invariant()
    def what_is_held_stays_where_it_was(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.audit()
        for lease, places in self.held:
            assert [(frame.offset, frame.generation) for frame in lease.frames] == places
            for index in range(lease.ready):
                assert lease.page(index) == page_bytes(lease.keys[index], lease.layout)

    @invariant()
    def headers_name_their_frames(self) -> None:
        if not hasattr(self, "store"):
            return
        state = self.store.pool.state
        for row, frame in enumerate(state.catalog.frame):
            if frame is not None:
                header = self.store.arena.readable(frame.offset, state.catalog.space[row].header_bytes)
                assert generation_of(header) == frame.generation

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for lease, _ in self.held:
            lease.release()
        for chain in CHAINS:
            read_all(self.store, chain.root, chain.keys)
        self.store.audit()
        self.store.close()
        compaction.PACKED_SHARE = self.before


Moves.TestCase.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMoves = Moves.TestCase


def resident(table: FrameTable, size: int):
    frame = table.reserve(size)
    assert frame is not None
    table.move(frame, FrameState.FILLING)
    table.move(frame, FrameState.RESIDENT)
    return frame


def leave(table: FrameTable, frame) -> None:
    table.move(frame, FrameState.EVICTING)
    table.free(frame)


LARGE = KVLayout(dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=16)
"""360 KiB pages."""
LARGER = KVLayout(dtype="bf16", layers=16, kv_heads=8, head_dim=128, block_tokens=16)
"""1 MiB pages."""


def test_gaps_too_short_for_any_page_are_closed(kit):
    store = kit.open(ssd=0, dram="32MiB")
    large = [Chain(namespace("large", LARGE), 1, seed=seed) for seed in range(62)]
    for seed, chain in enumerate(large):
        chain.save(store)
        Chain(namespace("small"), 20, seed=seed).save(store)
    assert store.gauges()["store_dram_evictions_total"] == 0
    store.purge(lambda space: space.layout == SMALL)
    # Between any two pages there is now a gap, in which none would fit; in all they are a third of the arena.
    larger = Chain(namespace("larger", LARGER), 6)
    assert larger.save(store) == [SaveState.STORED] * 6
    gauges = store.gauges()
    assert gauges["store_dram_evictions_total"] <= 6
    assert 0 < gauges["store_dram_moved_bytes_total"] <= 6 * 4 * (LARGER.page_bytes + 16 * 1024)
    assert read_all(store, larger.root, larger.keys) == 6
    kept = sum(read_all(store, chain.root, chain.keys) for chain in large)
    assert kept >= 62 - 6
    store.audit()


def test_a_run_moves_onto_a_part_of_itself_and_its_frames_are_told_from_before():
    table = FrameTable(32 * MIB)
    first, second = resident(table, 364 * 1024), resident(table, 364 * 1024)
    small = [resident(table, 8 * 1024) for _ in range(8)]
    leave(table, first)
    before = second.offset, second.generation
    table.shift(second.slab, 3)
    assert second.offset == 3 * table.slab_bytes < before[0] < second.offset + second.size
    assert second.generation > before[1]
    table.audit()
    second.pins = 1
    with pytest.raises(InvariantError, match="cannot move"):
        table.shift(second.slab, 0)
    assert small


def test_one_layout_alone_never_moves(kit):
    store = kit.open(ssd=0, dram="1MiB")
    chains = [Chain(namespace(), 8, seed=seed) for seed in range(40)]
    for chain in chains:
        chain.save(store)
    state = store.pool.state
    with state.outbox:
        # Every other page leaves: half of the arena is free, and nearly no slab.
        for frame in sorted(filter(None, state.catalog.frame), key=lambda frame: frame.offset)[::2]:
            state.quarantine(frame.owner, TierName.DRAM, MissReason.CORRUPT)
    assert store.gauges()["store_dram_fragmented_bytes"] > MIB // 4
    store.pool.pack()
    for chain in chains:
        chain.save(store)
    assert store.gauges()["store_dram_moved_bytes_total"] == 0


def test_what_a_purge_leaves_in_many_slabs_is_given_back_by_itself(kit):
    store = kit.open(ssd=0, dram="16MiB")
    stays, goes = namespace("stays"), namespace("goes")
    Chain(namespace("other", SLICED), 8).save(store)
    for seed in range(300):
        Chain(stays, 1, seed=seed).save(store)
        Chain(goes, 1, seed=seed).save(store)
    assert store.purge(lambda space: space == goes).blocks == 300
    until = time.monotonic() + 10
    while store.gauges()["store_dram_fragmented_bytes"] > 0.05 * 16 * MIB:
        assert time.monotonic() < until, "nobody packed what was left"
        time.sleep(0.02)
    store.audit()
    for seed in range(300):
        chain = Chain(stays, 1, seed=seed)
        assert read_all(store, chain.root, chain.keys) == 1
    assert store.gauges()["store_dram_evictions_total"] == 0
    store.purge(lambda space: space == stays)
    memory = store.arena.readable(0, 16 * MIB)
    others = store.pool.state.catalog.frame
    assert memory.nbytes - bytes(memory).count(0) <= sum(frame.size for frame in others if frame is not None)


def test_what_is_held_stays_and_others_are_packed_around_it(kit):
    store = kit.open(ssd=0, dram="8MiB")
    small = [Chain(namespace("small"), 8, seed=seed) for seed in range(110)]
    for chain in small:
        chain.save(store)
    leases = [store.lease(chain.root, chain.keys[:1], owner="reader", ttl_s=60) for chain in small[::3]]
    places = [lease.frames[0].offset for lease in leases]
    for seed in range(20):
        Chain(namespace("large", SLICED), 4, seed=seed).save(store)
    assert store.gauges()["store_dram_moved_bytes_total"] > 0
    assert [lease.frames[0].offset for lease in leases] == places
    for lease in leases:
        assert lease.page(0) == page_bytes(lease.keys[0], lease.layout)
        lease.release()
