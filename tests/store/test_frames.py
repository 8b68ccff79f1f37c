"""The frame machine and its ledger."""

from __future__ import annotations

import pytest

from workmem.core.errors import InvariantError
from workmem.store.frames import NO_OWNER, FrameState, FrameTable

LEGAL = {
    ("free", "reserved"),
    ("reserved", "filling"),
    ("reserved", "free"),
    ("filling", "resident"),
    ("filling", "quarantined"),
    ("filling", "free"),
    ("resident", "evicting"),
    ("resident", "quarantined"),
    ("evicting", "free"),
    ("quarantined", "free"),
}


@pytest.mark.parametrize("source", list(FrameState))
@pytest.mark.parametrize("target", list(FrameState))
def test_only_the_drawn_steps_exist(source, target):
    table: FrameTable = FrameTable(2**20)
    frame = table.reserve(4096)
    assert frame is not None
    table.ledger[frame.state] -= 4096
    table.ledger[source] += 4096
    frame.state = source
    if (source.value, target.value) in LEGAL:
        table.move(frame, target)
        assert frame.state is target
    else:
        with pytest.raises(InvariantError, match="no legal step"):
            table.move(frame, target)


@pytest.mark.parametrize("target", [FrameState.EVICTING, FrameState.FREE])
def test_pinned_frame_is_not_taken(target):
    table: FrameTable = FrameTable(2**20)
    frame = table.reserve(4096)
    assert frame is not None
    if target is FrameState.EVICTING:
        table.move(frame, FrameState.FILLING)
        table.move(frame, FrameState.RESIDENT)
    frame.pins = 1
    with pytest.raises(InvariantError, match="R3"):
        table.move(frame, target)


def test_a_victims_frame_goes_to_the_next_page_in_one_go_unless_it_may_not():
    table: FrameTable = FrameTable(2**20)
    frame = table.reserve(4096)
    with pytest.raises(InvariantError, match="no legal step"):
        table.reuse(frame)
    table.move(frame, FrameState.FILLING)
    table.move(frame, FrameState.RESIDENT)
    frame.pins, frame.owner, generation = 1, 7, frame.generation
    with pytest.raises(InvariantError, match="R3"):
        table.reuse(frame)
    assert frame.state is FrameState.RESIDENT
    frame.pins = 0
    assert table.reuse(frame) is frame
    assert (frame.state, frame.owner) == (FrameState.FILLING, NO_OWNER)
    assert frame.generation > generation
    table.audit()


def test_ledger_is_exact_and_empty_slabs_serve_other_sizes():
    table: FrameTable = FrameTable(2**20)
    held = []
    while (frame := table.reserve(4096)) is not None:
        held.append(frame)
    assert len(held) == 256
    assert table.reserve(65536) is None
    table.audit()
    assert table.used_bytes == 2**20
    assert len({frame.offset for frame in held}) == 256
    for frame in held:
        table.free(frame)
    assert table.used_bytes == 0
    table.audit()
    big = [table.reserve(65536) for _ in range(16)]
    assert all(frame is not None for frame in big)
    assert table.reserve(65536) is None
    table.audit()


def test_generation_grows_with_every_use():
    table: FrameTable = FrameTable(2**20)
    keep = table.reserve(4096)
    assert keep is not None
    frame = table.reserve(4096)
    assert frame is not None
    generation = frame.generation
    table.free(frame)
    assert table.reserve(4096) is frame
    assert frame.generation == generation + 1


def test_wrong_ledger_is_noticed():
    table: FrameTable = FrameTable(2**20)
    table.reserve(4096)
    table.ledger[FrameState.RESIDENT] += 1
    with pytest.raises(InvariantError, match="ledger"):
        table.audit()
