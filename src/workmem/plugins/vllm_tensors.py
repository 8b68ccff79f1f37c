# pyright: reportMissingImports=false
"""vLLM's KV tensors as the rows that `KVBlocks` copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workmem.core.errors import InvariantError
from workmem.core.layout import KVLayout
from workmem.engines.vllm.kv_blocks import KVBlocks, Rows

if TYPE_CHECKING:
    from collections.abc import Mapping


def blocks_of(kv_caches: Mapping[str, torch.Tensor], layout: KVLayout, count: int) -> KVBlocks:
    """Blocks of tensors in the processor's memory, layers in vLLM's order. Raises InvariantError on a layout not known."""
    return KVBlocks(layout, [_parts(name, tensor, count) for name, tensor in kv_caches.items()])


def _parts(name: str, tensor: torch.Tensor, count: int) -> list[Rows]:
    if tensor.device.type != "cpu":
        raise InvariantError(f"{name} is on {tensor.device}")
    shape = tuple(tensor.shape)
    if shape[0] == count and tensor[0].is_contiguous():
        return [_rows(tensor)]
    if shape[1] == count and tensor[0, 0].is_contiguous():
        return [_rows(part) for part in tensor]
    raise InvariantError(f"{name}: no dimension of {shape} counts the {count} blocks")


def _rows(tensor: torch.Tensor) -> Rows:
    return tensor.view(torch.uint8).reshape(len(tensor), -1).numpy()
