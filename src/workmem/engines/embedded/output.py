"""From logits to what the client sees: sample, decode, stop, account. Runs on the engine thread."""

from __future__ import annotations

import torch

from workmem.core.clock import Clock
from workmem.core.errors import EngineError
from workmem.core.events import EventSink, RequestFinished
from workmem.core.generation import Delta, TokenLogprob, Usage
from workmem.core.outcomes import COMPUTED, TierName
from workmem.engines.embedded.detokenize import OutputText
from workmem.engines.embedded.grammar import Grammar
from workmem.engines.embedded.levers import Levers
from workmem.engines.embedded.sampling import Sampled, SamplerState, sample
from workmem.engines.embedded.sequence import Sequence
from workmem.engines.embedded.tokenizer import ModelTokenizer


class OutputWriter:
    """Holds no request state of its own: that lives in the sequence."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        vocabulary: int,
        sink: EventSink,
        clock: Clock,
        *,
        approximate: bool = False,
        levers: Levers | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._sink = sink
        self._clock = clock
        self._approximate = approximate
        """The store may round what it keeps."""
        self._levers = levers

    def prepare(self, seq: Sequence, grammar: Grammar | None) -> None:
        """Give a new sequence its sampler, decoder and grammar."""
        params = seq.request.sampling
        seq.sampler = SamplerState(params, seq.request.token_ids, self._vocabulary)
        seq.text = OutputText(self._tokenizer.backend, params.stop)
        seq.grammar = grammar
        seq.eos_ids = frozenset() if params.ignore_eos else self._tokenizer.eos_ids

    def advance(self, seqs: list[Sequence], logits: torch.Tensor) -> list[Sequence]:
        """One token for each of `seqs` from its row of `logits` [len(seqs), vocabulary], fp32.

        Emits the deltas and returns the sequences that ended.
        """
        ended: list[Sequence] = []
        rows: list[int] = []
        for row, seq in enumerate(seqs):
            if self._allows(seq, logits[row]):
                rows.append(row)
            else:
                ended.append(seq)
        alive = [seqs[row] for row in rows]
        picked = logits if len(rows) == len(seqs) else logits[rows]
        chosen = sample(picked, [seq.request.sampling for seq in alive], [seq.sampler for seq in alive])
        return ended + [
            seq for seq, token in zip(alive, chosen, strict=True) if self._guarded_take(seq, token)
        ]

    def _guarded_take(self, seq: Sequence, picked: Sampled) -> bool:
        try:
            return self._take(seq, picked)
        except Exception as error:  # noqa: BLE001 - request boundary: a decoder's failure is one request's, not the batch's
            self.fail(seq, EngineError(f"the answer could not be decoded: {type(error).__name__}: {error}"))
            return True

    def fail(self, seq: Sequence, error: EngineError) -> None:
        """The request ends in an error; that too is an event."""
        seq.emit(error)
        self._finished(seq, "error")

    def _allows(self, seq: Sequence, logits: torch.Tensor) -> bool:
        """Apply the grammar to a row in place. False if it can go no further: the request has failed."""
        if seq.grammar is None:
            return True
        try:
            seq.grammar.mask(logits)
        except EngineError as error:
            self.fail(seq, error)
            return False
        return True

    def cancel(self, seq: Sequence) -> None:
        """The client is gone: nothing more is emitted, the end is still an event."""
        self._finished(seq, "cancelled")

    def lost(self, seq: Sequence, blocks: int) -> None:
        """Blocks from `blocks` on turned out bad: account for the prompt anew, unless it has been answered."""
        if seq.first_token_at is None:
            tiers: list[str] = []
            for run in seq.sources:
                if run.source != COMPUTED:
                    tiers += [run.source] * (run.tokens // seq.block_tokens)
            seq.note_sources(tiers[:blocks], seq.denied_reason)

    def _take(self, seq: Sequence, picked: Sampled) -> bool:
        is_first = seq.first_token_at is None
        if is_first:
            seq.first_token_at = self._clock.monotonic()
        token = picked.token_id
        if token in seq.eos_ids:
            # The end mark is no output: nothing is appended, so a follow-up's prefix is what the client saw.
            self._emit(seq, picked, seq.text.finish(), "stop", has_usage=True)
            return True
        seq.tokens.append(token)
        seq.extend_keys()
        text = seq.text.push(token)
        reason = None
        if seq.grammar is not None:
            seq.grammar.accept(token)
        if seq.text.stopped_by is not None or (seq.grammar is not None and seq.grammar.is_done):
            reason = "stop"
        elif seq.output_len >= seq.max_tokens:
            reason = "length"
        if reason is not None:
            text += seq.text.finish()
        self._emit(seq, picked, text, reason, has_usage=is_first or reason is not None)
        return reason is not None

    def _emit(
        self, seq: Sequence, picked: Sampled, text: str, reason: str | None, *, has_usage: bool
    ) -> None:
        is_output = picked.token_id not in seq.eos_ids
        seq.emit(
            Delta(
                text=text,
                token_ids=(picked.token_id,) if is_output else (),
                logprobs=(self._logprob(picked),)
                if seq.request.sampling.logprobs is not None and is_output
                else (),
                finish_reason=reason,
                stopped_by=seq.text.stopped_by,
                usage=self._usage(seq, extra=0 if is_output else 1) if has_usage else None,
            )
        )
        if reason is not None:
            self._finished(seq, reason)

    def _logprob(self, picked: Sampled) -> TokenLogprob:
        name = self._tokenizer.token_text
        return TokenLogprob(
            picked.token_id,
            name(picked.token_id),
            picked.logprob if picked.logprob is not None else 0.0,
            tuple((token, name(token), logprob) for token, logprob in picked.top),
        )

    def _usage(self, seq: Sequence, *, extra: int) -> Usage:
        """`extra` counts an end mark: it was generated, though it is no text."""
        return Usage(
            prompt_tokens=seq.prompt_len,
            completion_tokens=seq.output_len + extra,
            sources=seq.sources,
            approximate=self._approximate and any(run.source != COMPUTED for run in seq.sources),
            handoff=None if seq.wait is None else seq.wait.report(_loaded(seq)),
            hints=() if self._levers is None else self._levers.finished(seq),
        )

    def _finished(self, seq: Sequence, reason: str) -> None:
        now = self._clock.monotonic()
        self._sink(
            RequestFinished(
                request_id=seq.id,
                finish_reason=reason,
                sources=seq.sources,
                completion_tokens=seq.output_len,
                queued_s=(seq.admitted_at or now) - seq.arrived,
                ttft_s=(seq.first_token_at or now) - seq.arrived,
                total_s=now - seq.arrived,
            )
        )


def _loaded(seq: Sequence) -> int:
    """Prompt tokens that the store had."""
    return sum(run.tokens for run in seq.sources if run.source not in (TierName.VRAM, COMPUTED))
