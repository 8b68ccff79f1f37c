"""Pages of many sizes share an arena: little of it is lost behind frames, between sizes, or to a new size."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.core.layout import KVLayout
from workmem.store.frames import Frame, FrameState, FrameTable
from workmem.store.windows import WindowSearch
from workmem.testing.pages import SLICED, SMALL, Chain, namespace

KIB, MIB, GIB = 2**10, 2**20, 2**30
HEADER = 4 * KIB
PAGES = [4 * KIB, 64 * KIB, 96 * KIB, 360 * KIB, MIB, 2 * MIB, 5 * MIB, 8 * MIB]
SOAK_S = float(os.environ.get("SOAK_SECONDS", "0"))
SIZES = [2 * 4096, 5 * 4096, 17 * 4096, 49 * 4096]


@pytest.mark.parametrize("capacity", [GIB, 2 * GIB, 16 * GIB, 100 * GIB])
@pytest.mark.parametrize("page", PAGES)
def test_frames_of_any_size_fill_an_arena(capacity, page):
    table = FrameTable(capacity)
    assert table.holdable_bytes(page + HEADER) >= 0.95 * capacity


def take(table: FrameTable, size: int) -> Frame | None:
    frame = table.reserve(size)
    if frame is not None:
        table.move(frame, FrameState.FILLING)
        table.move(frame, FrameState.RESIDENT)
    return frame


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.sampled_from((512 * KIB, 4 * MIB, 40 * MIB)))
def test_the_ledger_is_exact_whatever_comes_and_goes(seed, capacity):
    chance = random.Random(seed)
    table = FrameTable(capacity)
    held: list[Frame] = []
    for _ in range(300):
        if held and chance.random() < 0.45:
            frame = held.pop(chance.randrange(len(held)))
            table.move(frame, FrameState.EVICTING)
            table.free(frame)
        else:
            frame = take(table, chance.choice(SIZES))
            if frame is not None:
                held.append(frame)
        if chance.random() < 0.1:
            WindowSearch(table).cheapest(chance.choice(SIZES))
            table.audit()
    spans = sorted((frame.offset, frame.offset + frame.size) for frame in held)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for frame in held:
        table.move(frame, FrameState.EVICTING)
        table.free(frame)
    table.audit()
    assert table.used_bytes == 0


@pytest.mark.timeout(SOAK_S + 180)
def test_layouts_that_take_turns_leave_little_of_the_arena_unused(kit):
    """One arena for all of it: `SOAK_SECONDS` sets for how long at least."""
    layouts = [
        SMALL,
        SLICED,
        KVLayout(dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=16),
        KVLayout(dtype="bf16", layers=16, kv_heads=8, head_dim=128, block_tokens=16),
    ]
    store = kit.open(ssd=0, dram="128MiB")
    chance = random.Random(5)
    unused: list[float] = []
    fragmented: list[float] = []
    until = time.monotonic() + SOAK_S
    for seed in itertools.count():
        if seed >= 220 and time.monotonic() >= until:
            break
        layout = chance.choice(layouts)
        # As many bytes of each layout: small pages come in longer chains.
        Chain(
            namespace(str(layout.page_bytes), layout), max(1, 2 * MIB // layout.page_bytes), seed=seed
        ).save(store)
        gauges = store.gauges()
        if gauges["store_dram_evictions_total"]:
            unused.append(1 - gauges["store_dram_used_bytes"] / gauges["store_dram_capacity_bytes"])
            fragmented.append(gauges["store_dram_fragmented_bytes"] / gauges["store_dram_capacity_bytes"])
            assert fragmented[-1] <= unused[-1]
    assert len(unused) > 100
    assert statistics.median(unused) <= 0.05
    print(
        f"fragmented: {statistics.median(fragmented):.2%} of the arena in the median, {max(fragmented):.2%} at most"
    )
    assert max(fragmented) <= 0.05
    store.audit()
