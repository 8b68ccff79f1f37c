"""The engine's KV blocks as pages: layers that lie apart in its tensors, one behind the other in a page."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from workmem.core.errors import InvariantError
from workmem.core.layout import KVLayout
from workmem.engines.vllm.moving import Fence, Mark
from workmem.store.copying import native_copy

_NATIVE_BYTES_MIN = 256
"""XXH3 takes shorter slices another way, which the C code leaves out."""
Rows = NDArray[np.uint8]
"""One part of every block of a layer: [blocks, bytes], each row contiguous."""


class KVBlocks:
    """Blocks in memory that the processor reads and writes. Any number of threads may use one, on different blocks.

    `parts`: for each layer, in the order of the model, the parts of its blocks (one, or K and V).
    """

    def __init__(self, layout: KVLayout, parts: Sequence[Sequence[Rows]]) -> None:
        sizes = {sum(rows.shape[1] for rows in layer) for layer in parts}
        if len(parts) != layout.layers or sizes != {layout.layer_bytes}:
            raise InvariantError(
                f"{len(parts)} layers of {sorted(sizes)} bytes a block, where the layout has {layout.layers} "
                f"of {layout.layer_bytes}"
            )
        self.layout = layout
        self.count = min(len(rows) for layer in parts for rows in layer)
        self._slices = [
            [rows for layer in parts[first : first + layout.layers_per_slice] for rows in layer]
            for first in range(0, layout.layers, layout.layers_per_slice)
        ]
        is_plain = layout.layer_bytes >= _NATIVE_BYTES_MIN and all(len(rows) == 1 for rows in self._slices)
        native = native_copy() if is_plain else None
        self._native = native.slices if native else None
        self._sums = ctypes.c_uint64 * len(self._slices)
        # Where the first block of each slice lies, how far the next one is from it, and where a page has it.
        self._first = np.array(
            [rows[0].__array_interface__["data"][0] for rows in self._slices], dtype=np.uint64
        )
        self._stride = np.array([rows[0].strides[0] for rows in self._slices], dtype=np.uint64)
        self._in_page = np.arange(len(self._slices), dtype=np.uint64) * np.uint64(layout.layer_bytes)

    def copy_out(self, block: int, into: memoryview) -> tuple[int, ...]:
        """Copy a block into a page; the checksum of each slice of the copy (R2)."""
        page = np.frombuffer(into, dtype=np.uint8)
        if self._native is not None:
            return self._copy_slices(block, page, is_out=True)
        found: list[int] = []
        at = 0
        for rows in self._slices:
            start = at
            for part in rows:
                end = at + part.shape[1]
                np.copyto(page[at:end], part[block])
                at = end
            found.append(xxhash.xxh3_64_intdigest(page[start:at].data))
        return tuple(found)

    def copy_in(self, block: int, source: memoryview) -> tuple[int, ...]:
        """Copy a page into a block; the checksum of each slice of what came (R3)."""
        page = np.frombuffer(source, dtype=np.uint8)
        if self._native is not None:
            return self._copy_slices(block, page, is_out=False)
        found: list[int] = []
        at = 0
        for rows in self._slices:
            digest = xxhash.xxh3_64()
            for part in rows:
                end = at + part.shape[1]
                np.copyto(part[block], page[at:end])
                digest.update(part[block].data)
                at = end
            found.append(digest.intdigest())
        return tuple(found)

    def clear(self, block: int) -> None:
        """Zero a block: half a page of somebody's bytes may read as NaN."""
        for rows in self._slices:
            for part in rows:
                part[block] = 0

    # -- as `EngineBlocks`: the engine's thread has done its work when it comes here, and nothing is left to a queue

    def mark(self) -> Mark:
        """See `EngineBlocks`."""
        return None

    def begin_out(self, block: int, after: Mark) -> _Block:
        """See `EngineBlocks`: it is read by `copy_into`."""
        del after
        return _Block(self, block)

    def begin_in(self, after: Mark, fences: Iterable[Fence], *, is_aside: bool) -> KVBlocks:
        """See `EngineBlocks`."""
        del after, fences, is_aside
        return self

    def hold(self, fences: Iterable[Fence]) -> None:
        """There are none."""

    def end(self) -> None:
        """All is in place."""

    def _copy_slices(self, block: int, page: NDArray[np.uint8], *, is_out: bool) -> tuple[int, ...]:
        """In one call: between two, the engine's thread would take the interpreter from this one for milliseconds."""
        assert self._native is not None
        page_at = page.__array_interface__["data"][0]
        in_page, in_block = self._in_page + np.uint64(page_at), self._first + np.uint64(block) * self._stride
        to, source = (in_page, in_block) if is_out else (in_block, in_page)
        sums = self._sums()
        self._native(to.ctypes.data, source.ctypes.data, self.layout.layer_bytes, sums, len(self._slices))
        return tuple(sums)


class _Block:
    """See `Reading`."""

    fence: Fence | None = None

    def __init__(self, blocks: KVBlocks, block: int) -> None:
        self._blocks = blocks
        self._block = block

    def issue(self) -> None:
        """Nobody reads for us."""

    def copy_into(self, into: memoryview) -> tuple[int, ...]:
        """See `Reading`."""
        return self._blocks.copy_out(self._block, into)

    def end(self) -> None:
        """It took no room."""
