"""Faster products for few rows on a CPU without bf16 arithmetic.

A decoded token reads every weight once, so its speed is that of memory. Weights that are bf16 values are
kept twice: as fp32 for many rows (prefill), where fp32 arithmetic is fastest, and as bf16 for few rows,
where half the bytes are read. Memory: 6 bytes per weight instead of 4.

In between, the product is transposed: W x^T runs faster than x W^T in the libraries torch calls on a CPU without
AVX-512, since the long side is then the one that is cut into tiles. 16 rows: 124 ms and 76 ms transposed; 64 rows:
254 and 185; from 192 on they are equal, at 256 it is the other way round.

Measured on 2 AVX2 cores over the layers of SmolLM2-135M, fp32 against bf16: 1 row 47 and 20 ms, 2 rows
89 and 30 ms, 4 rows 99 and 56 ms; from 8 rows on (74 and 110 ms) fp32 wins. The bound is fixed: timing it
at every start gave another answer on every busy machine, and so another rounding on every start.

Results differ from fp32 by the rounding of activations to bf16, as in any bf16 engine; the output layer
corrects its best candidates in fp32, so that the greedy choice does not hang on the rounding of logits.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

ROWS_MAX = 4
"""Most rows that read the twin."""
TRANSPOSED_ROWS_MAX = 96
"""Most rows whose product is transposed."""
RESCORED = 64
"""Candidates of the output layer that are computed again in fp32."""


class SmallRowsLinear(nn.Module):
    """`nn.Linear` over fp32 [..., in] -> fp32 [..., out] that reads a bf16 twin for few rows."""

    twin: torch.Tensor

    def __init__(self, linear: nn.Linear, rows_max: int) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias: nn.Parameter | None = linear.bias
        self.rows_max = rows_max
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("twin", linear.weight.detach().bfloat16(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if x.numel() > TRANSPOSED_ROWS_MAX * self.in_features:
            return nn.functional.linear(x, self.weight, self.bias)
        if x.numel() > self.rows_max * self.in_features:
            y = torch.mm(self.weight, x.reshape(-1, self.in_features).t()).t()
            y = y.contiguous().view(*x.shape[:-1], self.out_features)
            return y if self.bias is None else y.add_(self.bias)
        y = nn.functional.linear(x.bfloat16(), self.twin).float()
        return y if self.bias is None else y.add_(self.bias)


class SmallRowsHead(SmallRowsLinear):
    """The output layer: as `SmallRowsLinear`, with the best `RESCORED` logits of a row exact in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        y = super().forward(x)
        if x.numel() > self.rows_max * self.in_features or self.out_features <= RESCORED:
            return y
        rows, hidden = y.view(-1, self.out_features), x.reshape(-1, self.in_features)
        best = rows.topk(RESCORED, sorted=False).indices
        exact = torch.einsum("rki,ri->rk", self.weight[best], hidden)
        if self.bias is not None:
            exact += self.bias[best]
        rows.scatter_(1, best, exact)
        return y


def attach(model: PreTrainedModel) -> list[str]:
    """Give the linear layers of `model` a bf16 twin; returns sentences for the log.

    Only layers whose weights are fp32 and exactly bf16 values are touched.
    """
    head = model.get_output_embeddings()
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and _holds_bf16_values(child.weight):
                kind = SmallRowsHead if child is head else SmallRowsLinear
                setattr(parent, name, kind(child, ROWS_MAX))
                count += 1
    return [f"{count} linear layers read bf16 weights for up to {ROWS_MAX} rows."] if count else []


def _holds_bf16_values(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32 and torch.equal(weight.bfloat16().float(), weight)
