"""The vram tier's bytes: one tensor of pages, [block, layer, K|V, token, kv head, dim].

A page is contiguous and has the same bytes as in every other tier, so a block moves in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workmem.core.layout import KVLayout
from workmem.engines.embedded.native import advise_huge_pages
from workmem.store.copying import CopySlices, PageCopy

TORCH_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


class KVPages:
    """Pages of `block_count` blocks on `device`. Zeroed: stale bytes must never be NaN."""

    def __init__(self, layout: KVLayout, block_count: int, device: str) -> None:
        self.layout = layout
        self.dtype = TORCH_DTYPE[layout.dtype]
        shape = (block_count, layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        self.tensor = torch.empty(shape, dtype=self.dtype, device=device)
        self.on_cpu = self.tensor.device.type == "cpu"
        if self.on_cpu:
            # A step reads a few KiB of each of many pages: with small pages of memory it waits for address translation.
            advise_huge_pages(self.tensor.data_ptr(), self.tensor.nbytes)
        self.tensor.zero_()
        self._bytes = self.tensor.view(block_count, -1).view(torch.uint8) if self.on_cpu else None
        self._rows = self._bytes.numpy() if self._bytes is not None else None
        self._copy = PageCopy(layout)
        self._staged = None if self.on_cpu else np.empty(layout.page_bytes, dtype=np.uint8)
        """Where a page is checked on its way to an accelerator; the loader's."""

    def row(self, block: int) -> np.ndarray:
        """Writable bytes of a block's page, in place. CPU only."""
        if self._rows is None:
            raise RuntimeError("pages on an accelerator have no addressable rows")
        return self._rows[block]

    def address(self, blocks: Sequence[int]) -> np.ndarray:
        """int64 addresses of the blocks' pages. CPU only."""
        base = self.tensor.data_ptr()
        return base + np.asarray(blocks, dtype=np.int64) * self.layout.page_bytes

    def write(
        self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store the KV of tokens: `blocks` and `offsets` int64 [T], `key` and `value` [T, kv heads, dim]."""
        self.tensor[blocks, layer, 0, offsets] = key
        self.tensor[blocks, layer, 1, offsets] = value

    def gather(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """K and V of whole blocks, a copy: [blocks, 2, block tokens, kv heads, dim]."""
        return self.tensor[:, layer].index_select(0, blocks)

    def clear(self, block: int) -> None:
        """Zero a page."""
        self.tensor[block] = 0

    def copy_out(self, block: int, target: memoryview) -> tuple[int, ...]:
        """Copy a page's bytes into `target` (`page_bytes` long); the checksum of each slice of the copy (R2)."""
        if self._rows is not None:
            return self._copy.writing(self._rows[block])(target)
        host = self.tensor[block].to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
        return self._copy.writing(host)(target)

    def copier_in(self, block: int, source: memoryview) -> CopySlices:
        """What copies slices of the page `source` into `block`. It says what came (R3); the caller compares.

        On an accelerator the checksums are those of the staging buffer the device copy was made from. There is one
        such buffer: one thread at a time.
        """
        if self._rows is not None:
            return self._copy.between(source, self._rows[block])
        staged = self._staged
        assert staged is not None
        stage = self._copy.between(source, staged)
        page = self.tensor[block].view(-1).view(torch.uint8)

        def copy(parts: range) -> tuple[int, ...]:
            sums = stage(parts)
            start, end = self.layout.slice_span(parts[0])[0], self.layout.slice_span(parts[-1])[1]
            page[start:end].copy_(torch.from_numpy(staged[start:end]))
            return sums

        return copy
