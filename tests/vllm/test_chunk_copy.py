"""Blocks to rows of chunks and back, also from the middle of a chunk and for several KV groups."""

from __future__ import annotations

import numpy as np

from workmem.engines.vllm.chunk_copy import ChunkCopy

PAGE = 16


def made(per_chunk: int, tensors: int = 2, groups: list[list[tuple[int, int]]] | None = None) -> ChunkCopy:
    rng = np.random.default_rng(1)
    blocks = [rng.integers(0, 255, (10, PAGE), dtype=np.uint8) for _ in range(tensors)]
    host = np.zeros((6, tensors * per_chunk * PAGE + 8), dtype=np.uint8)
    step = per_chunk * PAGE
    chunks = [host[:, t * step : (t + 1) * step] for t in range(tensors)]
    copy = ChunkCopy(blocks, chunks, groups or [[(t, PAGE) for t in range(tensors)]], per_chunk=per_chunk)
    copy.blocks, copy.host = blocks, host  # type: ignore[attr-defined]
    return copy


def test_blocks_lie_one_behind_the_other_in_a_chunk():
    copy = made(per_chunk=2)
    assert copy.store([7, 3, 5, 1], [4], [0], [4, 2]) == 4 * 2 * PAGE
    for tensor, blocks in enumerate(copy.blocks):
        at = tensor * 2 * PAGE
        assert copy.host[4, at : at + 2 * PAGE].tobytes() == blocks[7].tobytes() + blocks[3].tobytes()
        assert copy.host[2, at : at + 2 * PAGE].tobytes() == blocks[5].tobytes() + blocks[1].tobytes()
    assert not copy.host[[0, 1, 3, 5]].any()


def test_a_load_may_begin_and_end_inside_a_chunk():
    copy = made(per_chunk=4)
    before = [blocks.copy() for blocks in copy.blocks]
    copy.store([0, 1, 2, 3, 4, 5, 6, 7], [8], [0], [1, 0])
    for blocks in copy.blocks:
        blocks[:] = 0
    # The fourth block of the context up to the sixth, into blocks 8, 9 and 2.
    assert copy.load([8, 9, 2], [3], [3], [1, 0]) == 3 * 2 * PAGE
    for blocks, was in zip(copy.blocks, before, strict=True):
        assert blocks[[8, 9, 2]].tobytes() == was[[3, 4, 5]].tobytes()
        assert not blocks[[0, 1, 3, 4, 5, 6, 7]].any()


def test_groups_take_their_own_tensors_and_only_what_is_in_use():
    copy = made(per_chunk=2, groups=[[(0, PAGE)], [(1, 10)]])
    assert copy.store([3, 4, 6], [2, 1], [0, 1], [5, 1]) == 2 * PAGE + 10
    first, second = copy.blocks
    assert copy.host[5, : 2 * PAGE].tobytes() == first[3].tobytes() + first[4].tobytes()
    row = copy.host[1, 2 * PAGE : 4 * PAGE]
    assert row[PAGE : PAGE + 10].tobytes() == second[6, :10].tobytes()
    assert not row[:PAGE].any()
    assert not row[PAGE + 10 :].any()
    assert copy.store([1], [0, 1], [0, 0], [0]) == 10


def test_the_chunks_of_a_group_come_behind_those_that_the_one_before_takes_in_part():
    copy = made(per_chunk=2, groups=[[(0, PAGE)], [(1, PAGE)]])
    # Two blocks from the second place of a chunk on are in two chunks; the other group's is the third.
    assert copy.store([3, 4, 6], [2, 1], [1, 0], [5, 1, 2]) == 3 * PAGE
    first, second = copy.blocks
    assert copy.host[5, PAGE : 2 * PAGE].tobytes() == first[3].tobytes()
    assert copy.host[1, :PAGE].tobytes() == first[4].tobytes()
    assert copy.host[2, 2 * PAGE : 3 * PAGE].tobytes() == second[6].tobytes()
    assert not copy.host[1, 2 * PAGE :].any()
