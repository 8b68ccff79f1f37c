"""Whether one server computes a prompt and another one answers it. Pure: from measured costs and the request alone.

A prompt that is computed where streams run holds each of them up for as long as it takes. Computed elsewhere it
costs a hop, the queue there, and loading what was computed. Both are counted in seconds that somebody waits.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SplitMode = Literal["auto", "always", "never"]

UNMEASURED_HOPS = 3
"""So many requests are split to learn what a prefill server costs, where nothing else speaks against it."""
REMEASURE_AFTER = 100
"""After so many requests in a row that were not split, one is, or a cost that was high once would be believed for ever."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What a server takes, in seconds."""

    computed_token_s: float
    """Per prompt token that it computes."""
    hop_s: float
    """Per request, whatever its size: connection, queue, tokenizer, first token."""
    handed_token_s: float
    """Per prompt token that another server computed for it: until it was in the store, and loading it."""
    recomputed_share: float = 0.0
    """Of the tokens that another server computed for it, those that it computes all the same, because they did not come."""
    samples: int = 0
    """Requests that this was learned from."""


class Prospect(msgspec.Struct, frozen=True, kw_only=True):
    """A request as expected before it is sent."""

    prompt_tokens: int
    hit_tokens: int
    """Those that its decode server will probably find in its memory."""
    running: int
    """Streams of the decode server that computing this prompt there holds up."""


class PrefillSide(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill server that would be asked."""

    costs: Costs
    backlog_s: float
    """Of work that it was given before."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a person sets."""

    mode: SplitMode
    tokens_min: int
    """Prompts that are shorter, or have less to be computed, are never split."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Split or not, and why. Seconds are those that the request and the streams beside it wait, together."""

    is_split: bool
    reason: str
    whole_s: float = 0.0
    split_s: float = 0.0


def decide(
    terms: Terms, prospect: Prospect, prefill: PrefillSide | None, decode: Costs, *, refused: int = 0
) -> Verdict:
    """Whether to split. `prefill` is None where no such server is up; `refused`: requests in a row that were not split."""
    if terms.mode == "never":
        return Verdict(is_split=False, reason="never")
    if prefill is None:
        return Verdict(is_split=False, reason="no_prefill_server")
    if prospect.prompt_tokens < max(1, terms.tokens_min):
        return Verdict(is_split=False, reason="short_prompt")
    missing = max(0, prospect.prompt_tokens - max(0, prospect.hit_tokens))
    whole_s, split_s = _whole_s(missing, prospect, decode), _split_s(missing, prospect, prefill, decode)
    if terms.mode == "always":
        return Verdict(is_split=True, reason="always", whole_s=whole_s, split_s=split_s)
    if missing < max(1, terms.tokens_min):
        return Verdict(is_split=False, reason="cached", whole_s=whole_s, split_s=split_s)
    if split_s < whole_s:
        return Verdict(is_split=True, reason="faster", whole_s=whole_s, split_s=split_s)
    is_unknown = prefill.costs.samples < UNMEASURED_HOPS or refused >= REMEASURE_AFTER
    if is_unknown and prefill.backlog_s <= 0:
        return Verdict(is_split=True, reason="measuring", whole_s=whole_s, split_s=split_s)
    return Verdict(is_split=False, reason="slower", whole_s=whole_s, split_s=split_s)


def expected_hop_s(missing: int, costs: Costs) -> float:
    """Seconds that a prefill server will take for a prompt of which `missing` tokens are to be computed."""
    return costs.hop_s + missing * costs.computed_token_s


def _whole_s(missing: int, prospect: Prospect, decode: Costs) -> float:
    return missing * decode.computed_token_s * (1 + max(0, prospect.running))


def _split_s(missing: int, prospect: Prospect, prefill: PrefillSide, decode: Costs) -> float:
    own = expected_hop_s(missing, prefill.costs) + missing * decode.handed_token_s
    # What does not come is computed where the streams are, and holds them up; the request's own wait for that is in `own`.
    held_up = missing * decode.recomputed_share * decode.computed_token_s * max(0, prospect.running)
    return max(0.0, prefill.backlog_s) + own + held_up
