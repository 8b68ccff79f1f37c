"""Deterministic mode: logits that are bit-identical for any batch, split or tier.

Floating-point sums depend on the shape of the operation that makes them, so every operation gets one
shape. A request's tokens are cut into tiles of one block at fixed positions; each tile runs alone, [1, 16]
tokens, whatever part of it is new; and a query attends over key tiles of fixed length at fixed
positions. Row r of a tile is then the same arithmetic in a prefill, in a decode step and after a reload.
Sound for fp32 with a fixed thread count on one machine. Cost: a decode step computes 16 rows for one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from workmem.engines.embedded.attention import Context
from workmem.engines.embedded.scheduler import Work

if TYPE_CHECKING:
    from workmem.engines.embedded.kv_pages import KVPages
    from workmem.engines.embedded.loading import LoadGate

NAME = "workmem_tiles"
KEY_TILE_TOKENS = 256


def arithmetic() -> str:
    """What the bits depend on besides weights and tokens; KV made otherwise is never a hit in this mode."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"tiles {torch.__version__} {capability} {torch.get_num_threads()} threads"


@dataclasses.dataclass(slots=True)
class Tile:
    """Positions [start, start + block) of one request, of which rows [first, last) are new."""

    pages: KVPages
    start: int
    first: int
    last: int
    block: int
    """Vram block the new rows are written to."""
    context: Context
    """The request's blocks, this tile's included."""
    gate: LoadGate | None


def register() -> None:
    """Make `attn_implementation=NAME` known to `transformers`. Idempotent."""
    AttentionInterface.register(NAME, tile_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Causality is this module's business; no mask is ever built."""


def tile_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    workmem_tile: Tile,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [1, heads, 16, dim], `key` and `value` [1, kv heads, 16, dim] -> [1, 16, heads, dim]."""
    del attention_mask
    tile, layer = workmem_tile, int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    layout = tile.pages.layout
    if tile.gate is not None:
        tile.gate.wait_layer(layer)
    new = slice(tile.first, tile.last)
    tile.pages.tensor[tile.block, layer, 0, new] = key[0].transpose(0, 1)[new]
    tile.pages.tensor[tile.block, layer, 1, new] = value[0].transpose(0, 1)[new]
    heads, rows, dim = query.shape[1:]
    kv_heads = layout.kv_heads
    grouped = query[0].reshape(kv_heads, (heads // kv_heads) * rows, dim).contiguous()
    position = torch.arange(tile.start, tile.start + rows).repeat(heads // kv_heads)[:, None]
    peak = torch.full((kv_heads, grouped.shape[1], 1), float("-inf"))
    total = torch.zeros_like(peak)
    out = torch.zeros_like(grouped)
    for at in range(0, tile.start + rows, KEY_TILE_TOKENS):
        tile_key, tile_value = _key_tile(tile, layer, at)
        score = torch.bmm(grouped, tile_key.transpose(1, 2)) * scaling
        score = score.masked_fill(torch.arange(at, at + KEY_TILE_TOKENS)[None, :] > position, float("-inf"))
        top = torch.maximum(peak, score.amax(-1, keepdim=True))
        weight = torch.exp(score - top)
        shrink = torch.exp(peak - top)
        total = total * shrink + weight.sum(-1, keepdim=True)
        out = out * shrink + torch.bmm(weight, tile_value)
        peak = top
    return (out / total).reshape(heads, rows, dim).transpose(0, 1)[None].contiguous(), None


def _key_tile(tile: Tile, layer: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V at positions [at, at + KEY_TILE_TOKENS), [kv heads, tokens, dim]; zeros where there are none yet."""
    layout = tile.pages.layout
    first = at // layout.block_tokens
    last = min(first + KEY_TILE_TOKENS // layout.block_tokens, -(-tile.context.tokens // layout.block_tokens))
    both = torch.zeros(2, KEY_TILE_TOKENS, layout.kv_heads, layout.head_dim)
    found = tile.context.gather(tile.pages, layer, first, last).transpose(0, 1)
    both[:, : (last - first) * layout.block_tokens] = found.reshape(2, -1, layout.kv_heads, layout.head_dim)
    # Rows of a reused block that nobody has computed yet may hold anything finite; the mask hides them.
    flat = both.transpose(1, 2).contiguous()
    return flat[0], flat[1]


class TileRunner:
    """Implements `runner.Runner` tile by tile. CPU, fp32."""

    notes: tuple[str, ...] = ()

    def __init__(self, model: Any, pages: KVPages) -> None:
        self._model = model
        self._pages = pages

    def run(self, work: list[Work]) -> torch.Tensor:
        """See `runner.Runner.run`."""
        logits: list[torch.Tensor] = []
        for item in work:
            size = self._pages.layout.block_tokens
            end = item.start + item.count
            hidden = torch.empty(0)
            for start in range(item.start // size * size, end, size):
                hidden = self._tile(item, start, max(item.start - start, 0), min(end - start, size))
            if item.samples:
                # The whole tile goes through the head, so that the row's arithmetic never depends on which rows ask.
                logits.append(self._model.lm_head(hidden)[(end - 1) % size].float())
        return torch.stack(logits) if logits else torch.empty(0, 0)

    def _tile(self, item: Work, start: int, first: int, last: int) -> torch.Tensor:
        seq, size = item.seq, self._pages.layout.block_tokens
        tokens = seq.tokens[start : start + size]
        index = start // size - len(seq.spilled)
        blocks = torch.tensor(seq.table[: index + 1], dtype=torch.int64)
        tile = Tile(
            pages=self._pages,
            start=start,
            first=first,
            last=last,
            block=seq.table[index],
            context=Context(start + size, seq.spilled, blocks),
            gate=seq.gate,
        )
        return self._model.model(
            input_ids=torch.tensor([tokens + [0] * (size - len(tokens))]),
            position_ids=torch.arange(start, start + size)[None],
            use_cache=False,
            workmem_tile=tile,
        ).last_hidden_state[0]
