"""From logits to tokens, for all rows of a step at once.

A row's token depends on its logits, its parameters and its own generator alone, never on the rows beside
it: each draw takes one number from the request's generator, and only kernels that work row by row are
used, so that a seed gives the same answer in any batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import torch

from workmem.core.generation import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""
SHORTLIST = 1024
"""Candidates sorted first; a nucleus that is larger costs a full sort."""


class Sampled(msgspec.Struct, frozen=True):
    """A chosen token. `logprob` and `top` are of the raw distribution, before temperature and penalties."""

    token_id: int
    logprob: float | None = None
    """None where the request asked for none."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (token id, logprob), best first; as many as were asked for."""


class SamplerState:
    """What one request carries from token to token; survives preemption. Not thread-safe."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocabulary: int) -> None:
        # Not for secrets: reproducible draws, the same in every version of Python and torch.
        self.generator = random.Random(params.seed)  # noqa: S311
        self.counts: torch.Tensor | None = None
        """fp32 [vocabulary]: how often each token was generated. None without penalties."""
        self.seen: torch.Tensor | None = None
        """bool [vocabulary]: tokens of prompt and output. None without repetition penalty."""
        if params.presence_penalty or params.frequency_penalty:
            self.counts = torch.zeros(vocabulary)
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(vocabulary, dtype=torch.bool)
            self.seen[torch.as_tensor(list(prompt), dtype=torch.long)] = True

    def observe(self, token_id: int) -> None:
        """Count a generated token. `sample` does this itself."""
        if self.counts is not None:
            self.counts[token_id] += 1
        if self.seen is not None:
            self.seen[token_id] = True


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], states: Sequence[SamplerState]
) -> list[Sampled]:
    """Choose one token per row of `logits` (fp32 [rows, vocabulary], left unchanged) and count it.

    Greedy rows take the largest logit, the lowest id on ties.
    """
    asked = [row for row, one in enumerate(params) if one.logprobs is not None]
    raw = torch.log_softmax(logits[asked], dim=-1) if asked else None
    penalised = [
        row for row, state in enumerate(states) if state.counts is not None or state.seen is not None
    ]
    if penalised:
        logits = logits.clone()
        for row in penalised:
            _penalise(logits[row], params[row], states[row])
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [row for row, one in enumerate(params) if one.temperature >= GREEDY_BELOW]
    if drawn:
        some = logits if len(drawn) == len(params) else logits[drawn]
        draws = [states[row].generator.random() for row in drawn]
        for row, token in zip(drawn, _draw(some, [params[row] for row in drawn], draws), strict=True):
            chosen[row] = token
    for state, token in zip(states, chosen, strict=True):
        state.observe(token)
    results = [Sampled(token) for token in chosen]
    if raw is not None:
        for index, row in enumerate(asked):
            results[row] = _with_logprobs(chosen[row], raw[index], params[row].logprobs or 0)
    return results


def _with_logprobs(token: int, raw: torch.Tensor, alternatives: int) -> Sampled:
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        values, ids = raw.topk(min(alternatives, raw.shape[-1]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Sampled(token, float(raw[token]), top)


def _penalise(row: torch.Tensor, params: SamplingParams, state: SamplerState) -> None:
    """Apply penalties in place: repetition to prompt and output, the others to the output alone."""
    if state.seen is not None:
        ids = state.seen.nonzero().squeeze(-1).to(row.device)
        values = row[ids]
        factor = params.repetition_penalty
        row[ids] = torch.where(values > 0, values / factor, values * factor)
    if state.counts is not None:
        ids = state.counts.nonzero().squeeze(-1)
        counts = state.counts[ids].to(row.device)
        row[ids.to(row.device)] -= params.frequency_penalty * counts + params.presence_penalty


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int]:
    """One token per row, at `draws` (in [0, 1)) of the row's filtered cumulative distribution."""
    temperature = torch.tensor([one.temperature for one in params], device=logits.device)
    probs = torch.softmax(logits / temperature[:, None], dim=-1)
    tokens = [0] * len(params)
    plain = [i for i, one in enumerate(params) if not (one.top_k > 0 or one.top_p < 1.0 or one.min_p > 0.0)]
    if plain:
        picked = _pick(probs[plain].double(), [draws[i] for i in plain])
        for i, token in zip(plain, picked.tolist(), strict=True):
            tokens[i] = token
    left = sorted(set(range(len(params))) - set(plain))
    vocabulary = probs.shape[-1]
    width = min(SHORTLIST, vocabulary)
    while left:
        some = probs[left]
        values, ids = some.topk(width, dim=-1) if width < vocabulary else some.sort(dim=-1, descending=True)
        kept, enough = _filter(values.double(), [params[i] for i in left], vocabulary)
        picked = ids.gather(-1, _pick(kept, [draws[i] for i in left])[:, None]).squeeze(-1)
        for i, token in zip(left, picked.tolist(), strict=True):
            tokens[i] = token
        left = [i for i, done in zip(left, enough, strict=True) if not done]
        width = vocabulary
    return tokens


def _filter(
    probs: torch.Tensor, params: Sequence[SamplingParams], vocabulary: int
) -> tuple[torch.Tensor, list[bool]]:
    """Zero what min_p, top_k and top_p exclude from `probs` (fp64 [rows, width], best first).

    The second result tells, per row, whether all that may be drawn lies within `width`.
    """

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=probs.device)[:, None]

    width = probs.shape[-1]
    min_p = column([one.min_p for one in params])
    top_k = column([one.top_k or vocabulary + 1 for one in params])
    top_p = column([one.top_p for one in params])
    rank = torch.arange(width, device=probs.device)
    allowed = (probs >= min_p * probs[:, :1]) & (rank < top_k)
    # Where min_p or top_k closes within the width, the mass left is known; without either it is 1.
    closed = ~allowed[:, -1:] | (top_k <= width) | (width == vocabulary)
    kept = torch.where(allowed, probs, 0.0)
    cumulative = kept.cumsum(-1)
    total = torch.where(closed, cumulative[:, -1:], torch.ones_like(min_p))
    # A token stays while the mass before it is under top_p, so the best one always stays.
    in_nucleus = (cumulative - kept < top_p * total) | (top_p >= 1.0)
    in_nucleus[:, 0] = True
    kept = torch.where(in_nucleus, kept, 0.0)
    unrestricted = (min_p == 0) & (top_k > vocabulary)
    enough = closed | (unrestricted & ~in_nucleus[:, -1:])
    return kept, enough.squeeze(-1).tolist()


def _pick(weights: torch.Tensor, draws: Sequence[float]) -> torch.Tensor:
    """Column per row where the cumulative weight passes draw x total; never one of weight zero."""
    cumulative = weights.cumsum(-1)
    target = torch.tensor(draws, dtype=torch.float64, device=weights.device)[:, None] * cumulative[:, -1:]
    # The largest column with weight bounds the search: rounding must not carry the draw past it.
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True).squeeze(-1), last)
