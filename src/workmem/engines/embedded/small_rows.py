"""Faster products for few rows on a CPU without bf16 arithmetic.

A decoded token reads every weight once, so its speed is that of memory. Weights that are bf16 values are
kept twice: as fp32 for many rows (prefill), where fp32 arithmetic is fastest, and as bf16 for few rows,
where half the bytes are read. Memory: 6 bytes per weight instead of 4.

Up to how many rows the twin is faster depends on the shape and the machine, so it is measured at start.
Measured on 2 AVX2 cores over the layers of SmolLM2-135M, fp32 against bf16: 1 row 47 and 20 ms, 2 rows
89 and 30 ms, 4 rows 99 and 56 ms; from 8 rows on fp32 wins.

Results differ from fp32 by the rounding of activations to bf16, as in any bf16 engine; the output layer
corrects its best candidates in fp32, so that the greedy choice does not hang on the rounding of logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

ROWS_TRIED = (1, 2, 4, 8)
RESCORED = 64
"""Candidates of the output layer that are computed again in fp32."""
_ROUNDS = 3
_GAIN_MIN = 1.1
_WEIGHTS_TIMED = 3
_ROWS_TIMED = 8192


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
        if x.numel() > self.rows_max * self.in_features:
            return nn.functional.linear(x, self.weight, self.bias)
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
    """Give the linear layers of `model` a bf16 twin where that is faster; returns sentences for the log.

    Only layers whose weights are fp32 and exactly bf16 values are touched. Takes under 0.3 s.
    """
    by_shape: dict[tuple[int, int], list[tuple[nn.Module, str, nn.Linear]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and _holds_bf16_values(child.weight):
                by_shape.setdefault((child.out_features, child.in_features), []).append((parent, name, child))
    head = model.get_output_embeddings()
    limits: list[int] = []
    with torch.inference_mode():
        for places in by_shape.values():
            rows_max = calibrate([linear for _, _, linear in places[:_WEIGHTS_TIMED]])
            if rows_max == 0:
                continue
            for parent, name, linear in places:
                kind = SmallRowsHead if linear is head else SmallRowsLinear
                setattr(parent, name, kind(linear, rows_max))
                limits.append(rows_max)
    if not limits:
        return []
    return [
        f"{len(limits)} linear layers read bf16 weights for up to {min(limits)}-{max(limits)} rows (measured)."
    ]


def calibrate(linears: list[nn.Linear]) -> int:
    """Most rows for which the bf16 twin is at least a tenth faster than fp32; 0 where it never is."""
    rows_max = 0
    weights = [linear.weight[:_ROWS_TIMED] for linear in linears]
    twins = [weight.bfloat16() for weight in weights]
    threads = torch.get_num_threads()
    # One thread and its own clock: neighbours on the machine then cost both sides the same.
    torch.set_num_threads(1)
    try:
        for rows in ROWS_TRIED:
            x = torch.ones(rows, linears[0].in_features)
            wide = _seconds(lambda x=x: [nn.functional.linear(x, weight) for weight in weights])
            narrow = _seconds(
                lambda x=x: [nn.functional.linear(x.bfloat16(), twin).float() for twin in twins]
            )
            if narrow * _GAIN_MIN > wide:
                break
            rows_max = rows
    finally:
        torch.set_num_threads(threads)
    return rows_max


def _seconds(call: Callable[[], object]) -> float:
    """Processor time of the best of a few runs: noise only ever adds."""
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best


def _holds_bf16_values(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32 and torch.equal(weight.bfloat16().float(), weight)
