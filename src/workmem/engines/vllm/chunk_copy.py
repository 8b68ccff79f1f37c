"""Copies between the blocks of an engine that computes on the processor and rows of its host memory.

vLLM's tiered offload moves chunks between the two with a GPU's copy engine, and refuses to start without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from workmem.engines.vllm.kv_blocks import Rows

Numbers = Sequence[int] | NDArray[np.int32]


class ChunkCopy:
    """Blocks to rows and back, `per_chunk` neighbours in each row.

    `blocks[t]`, [blocks, page], is tensor `t` of the engine, and `chunks[t]`, [chunks, page x `per_chunk`], its part of
    each row. `groups[g]` names the tensors of KV group `g`, each with the bytes of a page that are in use.
    """

    def __init__(
        self,
        blocks: Sequence[Rows],
        chunks: Sequence[Rows],
        groups: Sequence[Sequence[tuple[int, int]]],
        *,
        per_chunk: int,
    ) -> None:
        self._blocks = blocks
        self._chunks = chunks
        self._groups = groups
        self._per_chunk = per_chunk

    def store(
        self, blocks: Numbers, group_sizes: Sequence[int], firsts: Sequence[int], chunks: Numbers
    ) -> int:
        """Blocks into rows; bytes copied.

        `blocks` lie group by group, `group_sizes` of each, and so do `chunks`. `firsts[g]` is the place of a group's
        first block in its context, which may be inside a chunk.
        """
        return self._copy(blocks, group_sizes, firsts, chunks, is_store=True)

    def load(
        self, blocks: Numbers, group_sizes: Sequence[int], firsts: Sequence[int], chunks: Numbers
    ) -> int:
        """Rows into blocks; as `store`."""
        return self._copy(blocks, group_sizes, firsts, chunks, is_store=False)

    def _copy(
        self,
        blocks: Numbers,
        group_sizes: Sequence[int],
        firsts: Sequence[int],
        chunks: Numbers,
        *,
        is_store: bool,
    ) -> int:
        copied = 0
        for group, block, chunk, slot in self._places(blocks, group_sizes, firsts, chunks):
            for tensor, size in self._groups[group]:
                source = self._blocks[tensor]
                at = slot * source.shape[1]
                in_block, in_chunk = source[block, :size], self._chunks[tensor][chunk, at : at + size]
                if is_store:
                    np.copyto(in_chunk, in_block)
                else:
                    np.copyto(in_block, in_chunk)
                copied += size
        return copied

    def _places(
        self, blocks: Numbers, group_sizes: Sequence[int], firsts: Sequence[int], chunks: Numbers
    ) -> Iterator[tuple[int, int, int, int]]:
        """Group, block, and the chunk and the place in it that belong to that block."""
        block_at = chunk_at = 0
        for group, (size, first) in enumerate(zip(group_sizes, firsts, strict=True)):
            if not size:
                continue
            skipped = first % self._per_chunk
            for index in range(size):
                chunk, slot = divmod(skipped + index, self._per_chunk)
                yield group, int(blocks[block_at + index]), int(chunks[chunk_at + chunk]), slot
            block_at += size
            chunk_at += -(-(skipped + size) // self._per_chunk)
