"""Paged attention as a `transformers` attention function.

The model runs over the tokens of many requests laid end to end, [1, T]. For each layer `paged_attention`
stores the step's K and V in their pages, then attends piece by piece: long runs of queries (prefill) by
torch's flash kernel over gathered context, single queries (decode) and short runs (what a hit leaves of a
prompt) by the native kernel in place.

Every result is a merge of parts by log-sum-exp, so context may come in any number of parts and from any
tier: this is also how a context larger than the vram pool is served.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from workmem.engines.embedded.kv_pages import KVPages

if TYPE_CHECKING:
    from workmem.core.layout import KVLayout
    from workmem.engines.embedded.loading import LoadGate
    from workmem.engines.embedded.native import NativeKernel, PlaceInPage, RowPages
    from workmem.store.contract import Lease

NAME = "workmem_paged"
CONTEXT_TOKENS_PER_PART = 8192


@dataclasses.dataclass(slots=True)
class Context:
    """Where the KV of a request's leading tokens lies: spilled pages in dram, then vram blocks."""

    tokens: int
    spilled: list[tuple[Lease, int]]
    blocks: torch.Tensor
    """int64 [n], on the pages' device."""

    def parts(
        self, pages: KVPages, layer: int, dtype: torch.dtype
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V, each [kv heads, tokens, dim], in order of position, in parts of bounded size."""
        layout = pages.layout
        step = CONTEXT_TOKENS_PER_PART // layout.block_tokens
        total = -(-self.tokens // layout.block_tokens)
        result: list[tuple[torch.Tensor, torch.Tensor]] = []
        for start in range(0, total, step):
            end = min(start + step, total)
            both = self.gather(pages, layer, start, end).to(dtype)
            count = min(end * layout.block_tokens, self.tokens) - start * layout.block_tokens
            flat = (
                both.transpose(0, 1)
                .reshape(2, -1, layout.kv_heads, layout.head_dim)[:, :count]
                .transpose(1, 2)
            )
            result.append((flat[0], flat[1]))
        return result

    def gather(self, pages: KVPages, layer: int, start: int, end: int) -> torch.Tensor:
        """Pages [start, end) of the request, one layer: [blocks, 2, block tokens, kv heads, dim], a copy."""
        cut = len(self.spilled)
        found: list[torch.Tensor] = []
        if start < cut:
            found.append(_read_spilled(pages, layer, self.spilled[start : min(end, cut)]))
        if end > cut:
            found.append(pages.gather(layer, self.blocks[max(start - cut, 0) : end - cut]))
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclasses.dataclass(slots=True)
class Piece:
    """Query rows [row, row + rows) of one request, at positions from `context.tokens` on."""

    row: int
    rows: int
    context: Context
    pages: np.ndarray | None = None
    """int64 addresses of the request's pages, own ones included, where the native kernel is to read them."""


@dataclasses.dataclass(slots=True)
class DecodeRows:
    """Query rows from `row` on, one per request, with their pages by address (native kernel)."""

    row: int
    where: RowPages


@dataclasses.dataclass(slots=True)
class Step:
    """What one forward pass computes; handed through the model to `paged_attention`."""

    pages: KVPages
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    pieces: list[Piece]
    decode: DecodeRows | None = None
    kernel: NativeKernel | None = None
    gates: list[LoadGate] = dataclasses.field(default_factory=list)


def register() -> None:
    """Make `attn_implementation=NAME` known to `transformers`. Idempotent."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Causality is this module's business; no mask is ever built."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    workmem_step: Step,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [1, heads, T, dim], `key` and `value` [1, kv heads, T, dim] -> [1, T, heads, dim]."""
    del attention_mask
    step, layer = workmem_step, int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    compute = query.dtype
    for gate in step.gates:
        gate.wait_layer(layer)
    if step.decode is not None and not step.pieces and compute == torch.float32:
        new = (key[0].transpose(0, 1).contiguous(), value[0].transpose(0, 1).contiguous())
        return _decode(step, layer, query[0], scaling, new=new)[None], None
    # What is attended to is what is stored: rounding first makes a hit and a recomputation see the same bits.
    stored_key = key[0].transpose(0, 1).to(step.pages.dtype)
    stored_value = value[0].transpose(0, 1).to(step.pages.dtype)
    step.pages.write(layer, step.write_blocks, step.write_offsets, stored_key, stored_value)
    out = torch.empty(query.shape[2], query.shape[1], query.shape[3], dtype=compute, device=query.device)
    for piece in step.pieces:
        rows = slice(piece.row, piece.row + piece.rows)
        if piece.pages is not None:
            out[rows] = _run(step, piece, layer, query[0, :, rows], scaling)
            continue
        own_key = stored_key[rows].to(compute).transpose(0, 1)
        own_value = stored_value[rows].to(compute).transpose(0, 1)
        parts = [
            attend(query[0, :, rows], k, v, causal=False, scale=scaling)
            for k, v in piece.context.parts(step.pages, layer, compute)
        ]
        parts.append(attend(query[0, :, rows], own_key, own_value, causal=True, scale=scaling))
        out[rows] = merge(parts).transpose(0, 1)
    if step.decode is not None:
        out[step.decode.row :] = _decode(step, layer, query[0, :, step.decode.row :], scaling)
    return out[None], None


def _decode(
    step: Step,
    layer: int,
    query: torch.Tensor,
    scaling: float,
    *,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    assert step.decode is not None
    assert step.kernel is not None
    rows = query.transpose(0, 1).float().contiguous()
    out = step.kernel.attend(
        rows,
        step.decode.where,
        new=new,
        scale=scaling,
        **_place_in_page(step.pages.layout, layer),
    )
    return out.to(query.dtype)


def _place_in_page(layout: KVLayout, layer: int) -> PlaceInPage:
    """Where the native kernel finds a layer's K and V in a page, and how they are stored."""
    start = layer * layout.layer_bytes
    return {
        "k_offset": start,
        "v_offset": start + layout.layer_bytes // 2,
        "block_tokens": layout.block_tokens,
        "kv_heads": layout.kv_heads,
        "is_bf16": layout.dtype == "bf16",
    }


def _run(step: Step, piece: Piece, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
    assert step.kernel is not None
    assert piece.pages is not None
    out = step.kernel.attend_run(
        query.transpose(0, 1).float().contiguous(),
        piece.pages,
        context=piece.context.tokens,
        scale=scaling,
        **_place_in_page(step.pages.layout, layer),
    )
    return out.to(query.dtype)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention and its log-sum-exp: `query` [heads, T, dim], `key`/`value` [kv heads, S, dim].

    Returns ([heads, T, dim], fp32 [heads, T]). `causal` means query i sees keys up to i and S == T.
    """
    heads, rows, dim = query.shape
    kv_heads = key.shape[0]
    group = heads // kv_heads
    if query.device.type != "cpu":
        return _attend_plainly(query, key, value, causal=causal, scale=scale)
    if causal and rows > 1:
        wide_key = key[:, None].expand(kv_heads, group, rows, dim).reshape(1, heads, rows, dim)
        wide_value = value[:, None].expand(kv_heads, group, rows, dim).reshape(1, heads, rows, dim)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - the public function hides the LSE
            query[None], wide_key, wide_value, 0.0, True, scale=scale
        )
        return out[0], lse[0]
    # Queries of a group share their keys, so they are rows of one product.
    grouped = query.reshape(1, kv_heads, group * rows, dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
        grouped, key[None], value[None], 0.0, False, scale=scale
    )
    return out[0].reshape(heads, rows, dim), lse[0].reshape(heads, rows)


def _attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` in plain operators, for devices whose fused kernels do not report the log-sum-exp."""
    heads, rows, dim = query.shape
    kv_heads = key.shape[0]
    grouped = query.reshape(kv_heads, heads // kv_heads, rows, dim)
    score = torch.matmul(grouped.float(), key[:, None].transpose(2, 3).float()) * scale
    if causal:
        ahead = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        score = score.masked_fill(ahead, float("-inf"))
    lse = torch.logsumexp(score, dim=-1)
    weight = torch.exp(score - lse[..., None]).to(value.dtype)
    return torch.matmul(weight, value[:, None]).reshape(heads, rows, dim), lse.reshape(heads, rows)


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attention over the union of the parts' keys, from (output [heads, T, dim], log-sum-exp [heads, T])."""
    if len(parts) == 1:
        return parts[0][0]
    lse = torch.stack([part[1] for part in parts])
    weight = torch.softmax(lse.float(), dim=0)
    out = parts[0][0].float() * weight[0][..., None]
    for index in range(1, len(parts)):
        out = out + parts[index][0].float() * weight[index][..., None]
    return out.to(parts[0][0].dtype)


def _read_spilled(pages: KVPages, layer: int, spilled: list[tuple[Lease, int]]) -> torch.Tensor:
    """One layer of pages that stay in dram, in place where the device can read them there."""
    layout = pages.layout
    shape = (2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    start, length = layer * layout.layer_bytes, layout.layer_bytes
    found = torch.stack(
        [
            torch.from_numpy(
                np.frombuffer(lease.page(index), dtype=np.uint8, count=length, offset=start).copy()
            )
            for lease, index in spilled
        ]
    )
    return found.view(pages.dtype).view(len(spilled), *shape).to(pages.tensor.device)
