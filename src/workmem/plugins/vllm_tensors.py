# pyright: reportMissingImports=false
"""vLLM's KV tensors as the blocks that the worker's side moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workmem.engines.vllm.kv_blocks import KVBlocks
from workmem.plugins.vllm_device import DeviceBlocks
from workmem.plugins.vllm_views import views_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from workmem.core.layout import KVLayout
    from workmem.engines.vllm.kv_blocks import Rows
    from workmem.engines.vllm.moving import EngineBlocks


def blocks_of(kv_caches: Mapping[str, torch.Tensor], layout: KVLayout, count: int) -> EngineBlocks:
    """Blocks of `count`, layers in vLLM's order. Raises InvariantError on an order of bytes that is not understood.

    A layer that uses the KV of another one is named too, with that one's tensor: it is there once.
    """
    kv_caches = {name: tensor for name, tensor in kv_caches.items() if name in _owners(kv_caches)}
    if next(iter(kv_caches.values())).device.type != "cpu":
        return DeviceBlocks(layout, views_of(kv_caches, count))
    return KVBlocks(layout, [_rows(name, tensor, count) for name, tensor in kv_caches.items()])


def _owners(kv_caches: Mapping[str, torch.Tensor]) -> set[str]:
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in kv_caches.items():
        first.setdefault((tensor.data_ptr(), tuple(tensor.stride())), name)
    return set(first.values())


def _rows(name: str, tensor: torch.Tensor, count: int) -> list[Rows]:
    (view,) = views_of({name: tensor}, count)
    if view[0].is_contiguous():
        return [view.flatten(1).numpy()]
    return [part.flatten(1).numpy() for part in view.unbind(1)]
