"""One forward pass over a step's work: tokens in, logits of the sampling rows out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from workmem.engines.embedded import decode_step
from workmem.engines.embedded.attention import Context, DecodeRows, Piece, Step
from workmem.engines.embedded.native import RowPages
from workmem.engines.embedded.scheduler import Work
from workmem.engines.embedded.sequence import Sequence

if TYPE_CHECKING:
    from workmem.engines.embedded.kv_pages import KVPages
    from workmem.engines.embedded.native import NativeKernel

RUN_ROWS_MAX = 64
"""Longest run of rows that reads its context in place; a longer one is faster over a gathered copy."""


class Runner(Protocol):
    """Computes a step, inside `torch.inference_mode`. Implemented by `PackedRunner` and `tiles.TileRunner`."""

    notes: tuple[str, ...]
    """Sentences for the start-up log."""

    def run(self, work: list[Work]) -> torch.Tensor:
        """Logits, fp32 [number of sampling items, vocabulary], in the order of `work`."""
        ...


class PackedRunner:
    """The fast mode: all tokens of the step in one pass, decoding rows last."""

    def __init__(self, model: Any, pages: KVPages, kernel: NativeKernel | None, device: str) -> None:
        self._model = model
        self._pages = pages
        layout = pages.layout
        group = model.config.num_attention_heads // layout.kv_heads
        usable = kernel is not None and kernel.supports(
            kv_heads=layout.kv_heads, group=group, dim=layout.head_dim, block_tokens=layout.block_tokens
        )
        self._kernel = kernel if usable else None
        self._run_rows_max = (
            min(RUN_ROWS_MAX, kernel.run_rows_max(group=group, block_tokens=layout.block_tokens))
            if kernel is not None and usable
            else 0
        )
        self._device = device
        self._decode, self.notes = decode_step.build(model, layout, kernel if usable else None)

    def run(self, work: list[Work]) -> torch.Tensor:
        """See `Runner.run`."""
        if self._decode is not None and len(work) <= decode_step.ROWS_MAX and all(w.is_decode for w in work):
            return self._decode.run(
                [item.seq.tokens[item.start] for item in work],
                [item.start for item in work],
                self._decode_rows(work, 0).where,
                [item.seq.gate for item in work if item.seq.gate is not None],
            )
        step, tokens, positions = self._lay_out(work)
        hidden = self._model.model(
            input_ids=torch.tensor([tokens], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            workmem_step=step,
        ).last_hidden_state[0]
        rows, at = [], 0
        for item in work:
            at += item.count
            if item.samples:
                rows.append(at - 1)
        if not rows:
            return torch.empty(0, 0)
        return self._model.lm_head(hidden[rows]).float()

    def _lay_out(self, work: list[Work]) -> tuple[Step, list[int], list[int]]:
        tokens: list[int] = []
        positions: list[int] = []
        write_blocks: list[int] = []
        pieces: list[Piece] = []
        decoding: list[Work] = []
        size = self._pages.layout.block_tokens
        for item in work:
            seq, end = item.seq, item.start + item.count
            if item.is_decode and self._kernel is not None:
                decoding.append(item)
            else:
                pieces.append(self._piece(item, len(tokens)))
            tokens += seq.tokens[item.start : end]
            positions += range(item.start, end)
            offset = len(seq.spilled)
            write_blocks += [seq.table[position // size - offset] for position in range(item.start, end)]
        position_ids = torch.tensor(positions, device=self._device)
        step = Step(
            pages=self._pages,
            write_blocks=torch.tensor(write_blocks, device=self._device),
            write_offsets=position_ids % size,
            pieces=pieces,
            decode=self._decode_rows(decoding, len(tokens) - len(decoding)) if decoding else None,
            kernel=self._kernel,
            gates=[item.seq.gate for item in work if item.seq.gate is not None],
        )
        return step, tokens, positions

    def _piece(self, item: Work, row: int) -> Piece:
        piece = Piece(row, item.count, self._context(item.seq, item.start))
        if item.start and item.count <= self._run_rows_max:
            piece.pages = np.concatenate([_spilled_addresses(item.seq), self._pages.address(item.seq.table)])
        return piece

    def _context(self, seq: Sequence, tokens: int) -> Context:
        blocks = (
            seq.table[: -(-tokens // self._pages.layout.block_tokens) - len(seq.spilled)] if tokens else []
        )
        return Context(tokens, seq.spilled, torch.tensor(blocks, dtype=torch.int64, device=self._device))

    def _decode_rows(self, work: list[Work], row: int) -> DecodeRows:
        addresses = [
            np.concatenate([_spilled_addresses(item.seq), self._pages.address(item.seq.table)])
            for item in work
        ]
        first = np.zeros(len(work), dtype=np.int64)
        np.cumsum([len(a) for a in addresses[:-1]], out=first[1:])
        lengths = np.array([item.start + 1 for item in work], dtype=np.int64)
        return DecodeRows(row, RowPages(np.concatenate(addresses), first, lengths))


def _spilled_addresses(seq: Sequence) -> np.ndarray:
    """Where the pages lie that a sequence reads from dram in place."""
    views = (np.frombuffer(lease.page(index), dtype=np.uint8) for lease, index in seq.spilled)
    return np.fromiter((view.ctypes.data for view in views), dtype=np.int64, count=len(seq.spilled))
