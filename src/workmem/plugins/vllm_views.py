# pyright: reportMissingImports=false
"""The bytes of a block in vLLM's KV tensors, whatever their order in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import torch

from workmem.core.errors import InvariantError

Views = list[torch.Tensor]
"""One for each layer, or one for all: bytes, [blocks, ...], in the order in which they lie in memory."""


def views_of(kv_caches: Mapping[str, torch.Tensor], count: int) -> Views:
    """Views of all tensors, layers in vLLM's order. `view[block]`, all of them one behind the other, is a page.

    One view for all layers where these lie at equal distances in one allocation: a page is then one copy for a device.
    Raises InvariantError where a tensor's blocks are not understood.
    """
    views = [_view(name, tensor, count) for name, tensor in kv_caches.items()]
    joined = _join(views)
    return views if joined is None else [joined]


def _view(name: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    shape = tuple(tensor.shape)
    # [blocks, ...], or K and V apart before that.
    at = next((index for index in range(min(2, len(shape))) if shape[index] == count), None)
    if at is None:
        raise InvariantError(
            f"{name}: neither of the first two dimensions of {shape} counts the {count} blocks"
        )
    inner = sorted((dim for dim in range(len(shape)) if dim != at), key=lambda dim: -tensor.stride(dim))
    view = tensor.permute(at, *inner)
    if view.stride(-1) != 1 and view.shape[-1] != 1:
        raise InvariantError(
            f"{name}: the numbers of a block do not follow each other, strides {tensor.stride()}"
        )
    view = view.unsqueeze(-1) if view.stride(-1) != 1 else view
    extent = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride < extent:
            raise InvariantError(f"{name}: parts of blocks overlap, shape {shape}, strides {tensor.stride()}")
        extent = stride * size if size > 1 else extent
    return view.view(torch.uint8)


def _join(views: Views) -> torch.Tensor | None:
    first = views[0]
    steps = {second.data_ptr() - one.data_ptr() for one, second in pairwise(views)}
    alike = {(view.shape, view.stride(), view.dtype, view.untyped_storage().data_ptr()) for view in views}
    if len(views) < 2 or len(alike) > 1 or len(steps) > 1 or min(steps) <= 0:
        return None
    return first.as_strided(
        (first.shape[0], len(views), *first.shape[1:]),
        (first.stride(0), steps.pop(), *first.stride()[1:]),
        first.storage_offset(),
    )


def layer_bytes(view: torch.Tensor) -> int:
    """Of one block in one layer, or in all where these are joined."""
    return math.prod(view.shape[1:])
