"""Runs `decode_step.c`: a step in which every request computes one token, as one call.

It takes the place of the model's own modules where a step is nothing but decoding. Activations stay fp32, so
its sums are closer to exact than those of the modules in bf16, and no logit needs to be summed again. A row's
logits depend on neither the rows beside it nor the number of threads, down to the bit.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workmem.engines.embedded import decode_weights
from workmem.engines.embedded.decode_weights import CModel, DecodeWeights

if TYPE_CHECKING:
    from workmem.core.layout import KVLayout
    from workmem.engines.embedded.loading import LoadGate
    from workmem.engines.embedded.native import NativeKernel, RowPages

ROWS_MAX = 64
"""Most requests in a step, as compiled in. Measured up to here, the modules are never faster."""
ROTATIONS_PER_TABLE = 1024
_POINTER, _I64 = ctypes.c_void_p, ctypes.c_int64


class CStep(ctypes.Structure):
    """`step` of the source."""

    _fields_ = (
        *((name, _I64) for name in ("rows", "threads", "splits_total")),
        *(
            (name, _POINTER)
            for name in ("tokens", "rotations", "pages", "first_page", "lengths", "first_split")
        ),
        *((name, _POINTER) for name in ("x", "normed", "q", "k", "v", "out", "act", "parts", "logits")),
    )


class Rotations:
    """Cosines and sines of positions, asked of the model's own rotary module, which knows its variant.

    Kept in tables of `ROTATIONS_PER_TABLE` positions: 8 bytes per position and dim, for positions that were used.
    """

    def __init__(self, rotary: Any, dim: int) -> None:
        self._rotary = rotary
        self._dim = dim
        self._tables: dict[int, torch.Tensor] = {}

    def addresses(self, positions: list[int]) -> list[int]:
        """Where each position's cosines and sines, fp32 [2, dim], lie."""
        row_bytes = 2 * self._dim * 4
        return [
            self._table(at // ROTATIONS_PER_TABLE).data_ptr() + at % ROTATIONS_PER_TABLE * row_bytes
            for at in positions
        ]

    def fits(self) -> bool:
        """Whether the module rotates whole heads."""
        return tuple(self._table(0).shape) == (ROTATIONS_PER_TABLE, 2, self._dim)

    def _table(self, index: int) -> torch.Tensor:
        table = self._tables.get(index)
        if table is None:
            first = index * ROTATIONS_PER_TABLE
            positions = torch.arange(first, first + ROTATIONS_PER_TABLE)[None]
            both = self._rotary(torch.zeros(1, dtype=torch.float32), position_ids=positions)
            table = self._tables[index] = torch.stack([part[0] for part in both], dim=1).contiguous()
        return table


class DecodeStep:
    """Owns the buffers of a step: one at a time, on the engine thread."""

    def __init__(self, weights: DecodeWeights, kernel: NativeKernel) -> None:
        self._weights = weights
        self._kernel = kernel
        heads, kv_heads, dim, hidden, inner, vocabulary = weights.sizes
        self._part_floats = heads * (dim + 2)
        self._rotations = Rotations(weights.rotary, dim)
        floats = {
            "x": hidden, "q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim, "out": heads * dim, "act": inner,
        }  # fmt: skip
        self._buffers = {name: torch.empty(ROWS_MAX, width) for name, width in floats.items()}
        self._logits = torch.empty(ROWS_MAX, vocabulary)
        self._normed = self._parts = torch.empty(0)

    def run(
        self, tokens: list[int], positions: list[int], where: RowPages, gates: list[LoadGate]
    ) -> torch.Tensor:
        """Logits, fp32 [rows, vocabulary], of one token per request; good until the next call.

        Stores each row's K and V as the last of its `where.lengths` tokens. A layer waits for `gates`.
        """
        rows, threads = len(tokens), torch.get_num_threads()
        hidden = self._weights.sizes[3]
        self._normed = _at_least(self._normed, threads * rows * hidden)
        self._parts = _at_least(self._parts, where.splits_total * self._part_floats)
        token_ids = np.array(tokens, dtype=np.int64)
        rotations = np.array(self._rotations.addresses(positions), dtype=np.int64)
        pages, first_page, lengths, first_split = where.addresses
        step = CStep(
            rows=rows, threads=threads, splits_total=where.splits_total, tokens=token_ids.ctypes.data,
            rotations=rotations.ctypes.data, pages=pages, first_page=first_page, lengths=lengths, first_split=first_split,
            normed=self._normed.data_ptr(), parts=self._parts.data_ptr(), logits=self._logits.data_ptr(),
            **{name: buffer.data_ptr() for name, buffer in self._buffers.items()},
        )  # fmt: skip
        model: CModel = self._weights.c
        if not gates:
            self._kernel.decode(model, step, 0, model.layers)
        else:
            for layer in range(model.layers):
                for gate in gates:
                    gate.wait_layer(layer)
                self._kernel.decode(model, step, layer, layer + 1)
        return self._logits[:rows]


def build(
    model: Any, layout: KVLayout, kernel: NativeKernel | None
) -> tuple[DecodeStep | None, tuple[str, ...]]:
    """The native decode step of `model`, or None; and a sentence for the start-up log."""
    if kernel is None:
        return None, ()
    weights, reason = decode_weights.collect(model, layout)
    if weights is None:
        return None, (f"Decoding runs on torch operators, slower: {reason}.",)
    if not Rotations(weights.rotary, layout.head_dim).fits():
        return None, ("Decoding runs on torch operators, slower: positions rotate parts of heads.",)
    return DecodeStep(weights, kernel), (
        f"Up to {ROWS_MAX} decoding requests run as one native call a step.",
    )


def _at_least(buffer: torch.Tensor, floats: int) -> torch.Tensor:
    return buffer if buffer.numel() >= floats else torch.empty(floats)
