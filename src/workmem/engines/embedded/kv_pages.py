"""The vram tier's bytes: one tensor of pages, [block, layer, K|V, token, kv head, dim].

A page is contiguous and has the same bytes as in every other tier, so a block moves in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workmem.core.layout import KVLayout
from workmem.engines.embedded.native import advise_huge_pages

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

    def copy_out(self, block: int, target: memoryview) -> None:
        """Copy a page's bytes into `target` (`page_bytes` long)."""
        if self._rows is not None:
            np.copyto(np.frombuffer(target, dtype=np.uint8), self._rows[block])
            return
        host = self.tensor[block].to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
        np.copyto(np.frombuffer(target, dtype=np.uint8), host)

    def copy_in(self, block: int, span: tuple[int, int], source: np.ndarray) -> np.ndarray:
        """Copy bytes [start, end) of a page in and return the copy to be checked (rule R3: check your own copy).

        On an accelerator the checked copy is the staging buffer the device copy was made from.
        """
        start, end = span
        if self._rows is not None:
            row = self._rows[block][start:end]
            np.copyto(row, source)
            return row
        staged = np.array(source, copy=True)
        flat = self.tensor[block].view(-1).view(torch.uint8)
        flat[start:end].copy_(torch.from_numpy(staged))
        return staged
