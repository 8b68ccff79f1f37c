"""The verdict on one request: what broke its prefix, what that cost, what to do. Computes only, on any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from workmem.core.outcomes import MissReason
from workmem.gateway.recent_requests import Kept, Outcome
from workmem.index.explanation import Explanation
from workmem.index.history import Overlap
from workmem.prompt.canonical.argument_form import ARGUMENT_FORM, respaced
from workmem.prompt.canonical.rule import Canonical
from workmem.prompt.causes.cause import KINDS, Cause, cause
from workmem.prompt.causes.diagnose import Comparison, compare
from workmem.prompt.causes.raw_prompts import compare_raw
from workmem.prompt.causes.view import view_of

_MINIMUM_TOKENS = 1024
"""Below which several servers keep nothing."""
_OF_ENGINE = (
    MissReason.EVICTED,
    MissReason.CORRUPT,
    MissReason.UNAVAILABLE,
    MissReason.EXPIRED,
    MissReason.DISABLED,
)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier request that this one may be meant to continue."""

    kept: Kept
    overlap: Overlap | None
    """Of the tokens; None where they are not known."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request. Gathered where it is kept, judged elsewhere."""

    kept: Kept
    candidates: Sequence[Candidate]
    """The likeliest first."""
    explanation: Explanation | None
    """What the embedded engine says; None of another server's requests."""
    nearest: int | None
    """Number of the request that the explanation's difference is told against."""
    block_tokens: int
    is_finished: bool


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a request."""

    causes: list[Cause]
    """The one that broke the prefix first, then what else is different."""
    lost_tokens: int | None
    """Tokens that had to be computed because of the first cause; None where that is not known (yet)."""
    against: int | None
    """Number of the earlier request."""
    tokens_by_cause: dict[str, int]
    """What each cause lost. Of several changes in one request the first bears all."""
    canonical: dict[str, int] = {}
    """Rules that changed something in the request, and in how many places."""
    repaired: list[str] = []
    """Causes that there would have been without them."""


def judge(facts: Facts) -> Verdict:
    """Compare `facts.kept` with the earlier request that it has most in common with."""
    try:
        return _judge(facts)
    except RecursionError:
        # Nested deeper than anybody's schema: nothing is worth being said of it.
        return Verdict(causes=[], lost_tokens=None, against=None, tokens_by_cause={})


def _judge(facts: Facts) -> Verdict:
    after = facts.kept.canonical()
    tools_first = _tools_first(facts.explanation)
    best: tuple[Candidate, Comparison, Canonical] | None = None
    for candidate in facts.candidates:
        if candidate.kept.dialect is not facts.kept.dialect:
            continue
        before = candidate.kept.canonical()
        found = _compare(candidate.kept, before.body, facts.kept, after.body, tools_first=tools_first)
        if best is None or found.shared_turns > best[1].shared_turns:
            best = (candidate, found, before)
    if best is None:
        return msgspec.structs.replace(_of_engine(facts, None, {}, []), canonical=after.counts)
    candidate, comparison, before = best
    causes = [
        msgspec.structs.replace(
            one, path=after.client_path(one.path), path_before=before.client_path(one.path_before)
        )
        for one in comparison.causes
    ]
    verdict = _weighed(facts, candidate, before.body, _broke_first(causes, facts, candidate))
    repaired: list[str] = []
    if after.applied or before.applied:
        raw = candidate.kept.body(), facts.kept.body()
        sent = _compare(candidate.kept, raw[0], facts.kept, raw[1], tools_first=tools_first)
        left = {one.name for one in causes}
        repaired = [one.name for one in sent.causes if one.name not in left]
    return msgspec.structs.replace(verdict, canonical=after.counts, repaired=repaired)


def _weighed(facts: Facts, candidate: Candidate, before: dict[str, Any], causes: list[Cause]) -> Verdict:
    if not any(KINDS[one.name].is_loss for one in causes):
        return _of_engine(facts, candidate, before, causes)
    lost = lost_to(facts, candidate)
    losses = engine_losses(facts.explanation)
    by_cause = {name: tokens for name, tokens in losses.items() if KINDS[name].is_loss}
    if lost:
        by_cause[causes[0].name] = by_cause.get(causes[0].name, 0) + lost
    return Verdict(causes=causes, lost_tokens=lost, against=candidate.kept.number, tokens_by_cause=by_cause)


def _compare(
    kept_before: Kept, before: dict[str, Any], kept: Kept, after: dict[str, Any], *, tools_first: bool
) -> Comparison:
    if kept.dialect is None:
        return compare_raw(before, after)
    made = kept_before.made
    if made is not None and ARGUMENT_FORM.name in kept.rules:
        calls = (msgspec.structs.replace(call, arguments=respaced(call.arguments)) for call in made.calls)
        made = msgspec.structs.replace(made, calls=tuple(calls))
    return compare(before, after, kept.dialect, made=made, tools_first=tools_first)


def _tools_first(explanation: Explanation | None) -> bool:
    """Whether the template printed tools before anything else of the request."""
    if explanation is None:
        return True
    paths = [span.path for span in explanation.spans if span.path != "template"]
    return not any(path.startswith("tools[") for path in paths) or paths[0].startswith("tools[")


def _broke_first(causes: list[Cause], facts: Facts, candidate: Candidate) -> list[Cause]:
    """`causes` with the one in front that stands where the tokens part."""
    difference = facts.explanation.difference if facts.explanation is not None else None
    if difference is None or candidate.kept.number != facts.nearest:
        return causes
    at = {difference.path, difference.path_before}
    for index, one in enumerate(causes):
        if any(_is_within(one.path, path) or _is_within(path, one.path) for path in at):
            return [one, *causes[:index], *causes[index + 1 :]]
    return causes


def _is_within(path: str, outer: str) -> bool:
    return path == outer or (path.startswith(outer) and path[len(outer)] in ".[")


def lost_to(facts: Facts, candidate: Candidate) -> int | None:
    """Tokens of the earlier prompt, and of its answer, that this one has and that had to be computed all the same."""
    now, before = facts.kept.outcome, candidate.kept.outcome
    if now is None or now.cached_tokens is None or not facts.is_finished:
        return None
    overlap = candidate.overlap
    if overlap is not None:
        # Where both go on alike, what is left to reuse is the answer in between.
        reusable = overlap.tokens_before
        if overlap.shared == overlap.tokens_before and before is not None:
            reusable += before.completion_tokens
        reused = max(now.cached_tokens, overlap.shared)
    elif before is not None:
        reusable, reused = before.prompt_tokens, now.cached_tokens
    else:
        return None
    lost = min(reusable, now.prompt_tokens) - reused
    return max(0, min(lost, now.prompt_tokens - now.cached_tokens))


def engine_losses(explanation: Explanation | None) -> dict[str, int]:
    """Tokens that were computed for reasons of the engine's own."""
    losses: dict[str, int] = {}
    for span in explanation.spans if explanation is not None else ():
        for part in span.parts:
            if part.reason is not None and part.reason in _OF_ENGINE:
                losses[part.reason.value] = losses.get(part.reason.value, 0) + part.tokens
    return losses


def _of_engine(
    facts: Facts, candidate: Candidate | None, before: dict[str, Any], causes: list[Cause]
) -> Verdict:
    """The request itself lost nothing: whether something else did."""
    against = None if candidate is None else candidate.kept.number
    losses = engine_losses(facts.explanation)
    if losses:
        found = [
            cause(name, "", "", f"{tokens} tokens were {_SAID[name]}") for name, tokens in losses.items()
        ]
        found.sort(key=lambda one: (not KINDS[one.name].is_loss, -losses[one.name]))
        lost = {name: tokens for name, tokens in losses.items() if KINDS[name].is_loss}
        return Verdict(
            causes=[*found, *causes],
            lost_tokens=lost.get(found[0].name, 0),
            against=against,
            tokens_by_cause=lost,
        )
    if candidate is None:
        text = "no earlier request of this tenant and API is remembered"
        causes = [cause("new_conversation", "", "", text)]
        return Verdict(causes=causes, lost_tokens=0, against=None, tokens_by_cause={})
    if not causes and facts.is_finished:
        lost_tokens = lost_to(facts, candidate)
        engine = _gap(facts, candidate, before, lost_tokens)
        if engine is not None:
            known = lost_tokens if KINDS[engine.name].is_loss else 0
            by_cause = {engine.name: known} if known else {}
            return Verdict(causes=[engine], lost_tokens=known, against=against, tokens_by_cause=by_cause)
    lost_tokens = 0 if facts.is_finished else None
    return Verdict(causes=causes, lost_tokens=lost_tokens, against=against, tokens_by_cause={})


_SAID = {
    "evicted": "held once and had to make room",
    "corrupt": "held, but failed their check",
    "unavailable": "held, but their tier did not deliver",
    "expired": "held, but not for long enough to be copied",
    "disabled": "computed because reuse is off for this request",
}


def _gap(facts: Facts, candidate: Candidate, before: dict[str, Any], lost: int | None) -> Cause | None:
    """Why a request that continues another one got less than it had; None where it got what there was."""
    now, overlap, path = facts.kept.outcome, candidate.overlap, ""
    if now is None:
        return None
    if now.cached_tokens is None:
        return cause("not_reported", "", "", "the server's `usage` does not say what was reused")
    if overlap is None:
        return _gap_elsewhere(now, candidate.kept.outcome, lost)
    difference = facts.explanation.difference if facts.explanation is not None else None
    if overlap.shared < min(overlap.tokens_before, overlap.tokens_here):
        if difference is not None and candidate.kept.number == facts.nearest:
            path = difference.path
        if (dialect := candidate.kept.dialect) is not None and any(
            atom.kind == "thinking" for turn in view_of(before, dialect).turns for atom in turn.atoms
        ):
            what = "earlier thinking is in both requests, and no longer in the prompt"
            return cause("template_strips_thinking", path, path, what)
        # The last tokens of a prompt open the answer's turn; templates write them otherwise into a history.
        if overlap.tokens_before - overlap.shared > facts.block_tokens:
            return cause(
                "rendering_changed", path, path, "both bodies say the same, and their prompts do not"
            )
        return None
    if now.cached_tokens == 0 and overlap.shared < facts.block_tokens:
        what = f"{overlap.shared} tokens are shared, and a block has {facts.block_tokens}"
        return cause("below_block_size", "", "", what)
    if lost is not None and lost >= 2 * facts.block_tokens and candidate.kept.made is not None:
        what = f"{lost} tokens of the earlier answer were computed again, though its text came back as it was"
        return cause("retokenised", "", "", what)
    return None


def _gap_elsewhere(now: Outcome, before: Outcome | None, lost: int | None) -> Cause | None:
    """The same of a server that is not ours, from its counts."""
    if before is None or not lost or now.cached_tokens is None:
        return None
    if now.cached_tokens == 0 and before.prompt_tokens < _MINIMUM_TOKENS:
        what = (
            f"{before.prompt_tokens} tokens are shared; several servers keep nothing below {_MINIMUM_TOKENS}"
        )
        return cause("below_minimum", "", "", what)
    if 4 * now.cached_tokens < before.prompt_tokens:
        what = f"the server reused {now.cached_tokens} of {before.prompt_tokens} tokens that it had computed before"
        return cause("not_kept", "", "", what)
    return None
