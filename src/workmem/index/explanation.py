"""The account of one prompt: which span came from where, and where it left the earlier prompt's path."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import takewhile

import msgspec

from workmem.core.generation import HandoffReport, Span
from workmem.core.outcomes import COMPUTED, MissReason, SourceRun

UNACCOUNTED = "unaccounted"
"""Source of tokens the engine has not reported: the request runs still, or ended before its prompt did."""

_MESSAGE = re.compile(r"^messages\[(\d+)\]\.?(.*)$")


class Part(msgspec.Struct, frozen=True):
    """Consecutive tokens of a span with one source: a tier, `COMPUTED`, or "unaccounted"."""

    source: str
    tokens: int
    reason: MissReason | None = None


class ExplainedSpan(msgspec.Struct, frozen=True):
    """Prompt tokens [start, end) rendered from the request field `path`; the parts' tokens sum to its length."""

    path: str
    start: int
    end: int
    parts: tuple[Part, ...]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first token at which a prompt departs from the earlier one it is compared with."""

    token: int
    """Position in both prompts."""
    path: str
    """Request field the token renders here."""
    path_before: str
    """Request field the token rendered in the earlier prompt."""
    offset: int
    """Tokens from the start of the span `path`."""
    message: int | None
    """Index into `messages`, where `path` lies in one."""
    field: str
    """Field within that message, or `path` itself."""
    here: tuple[int, ...]
    before: tuple[int, ...]
    """Token ids from `token` on, at most eight of each prompt."""
    reason: str
    """The same in a sentence."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Every prompt token of a request, accounted for."""

    request_id: str
    created: float
    """Unix seconds at which the prompt arrived."""
    finished: bool
    prompt_tokens: int
    cached_tokens: int
    approximate: bool
    """Whether some of the reused KV may have been kept rounded (`store.ssd.approximate`)."""
    handoff: HandoffReport | None
    """Where the request had one: how long it waited for tokens computed elsewhere, and how many came."""
    tokens_by_source: dict[str, int]
    spans: tuple[ExplainedSpan, ...]
    compared_with: str | None
    """The earlier prompt of the same space with the longest common prefix."""
    difference: Difference | None
    """None where one prompt continues the other, or where the reuse went beyond their common prefix."""


def describe(
    *,
    token: int,
    spans: Sequence[Span],
    spans_before: Sequence[Span],
    here: tuple[int, ...],
    before: tuple[int, ...],
) -> Difference:
    """Name the fields that hold `token` in either prompt."""
    span, span_before = _span_at(spans, token), _span_at(spans_before, token)
    match = _MESSAGE.match(span.path)
    offset = token - span.start
    if span.path == span_before.path and span.start == span_before.start:
        reason = f"{span.path} differs from its token {offset} on"
    else:
        reason = f"{span.path} stands where {span_before.path} stood before"
    return Difference(
        token=token,
        path=span.path,
        path_before=span_before.path,
        offset=offset,
        message=int(match[1]) if match else None,
        field=match[2] if match else span.path,
        here=here,
        before=before,
        reason=reason,
    )


def account(
    *,
    request_id: str,
    created: float,
    spans: tuple[Span, ...],
    sources: tuple[SourceRun, ...] | None,
    approximate: bool,
    handoff: HandoffReport | None,
    compared_with: str | None,
    difference: Difference | None,
    block_tokens: int,
) -> Explanation:
    """Lay the runs of the engine over the spans of the prompt."""
    prompt_tokens = spans[-1].end if spans else 0
    if difference is not None and _cached_prefix(sources or ()) > difference.token:
        difference = None  # The engine knew a closer prompt than this history holds.
    runs = list(_runs(sources or (), prompt_tokens, difference, block_tokens))
    by_source: dict[str, int] = {}
    for run in runs:
        by_source[run.source] = by_source.get(run.source, 0) + run.tokens
    return Explanation(
        request_id=request_id,
        created=created,
        finished=sources is not None,
        prompt_tokens=prompt_tokens,
        cached_tokens=prompt_tokens - by_source.get(COMPUTED, 0) - by_source.get(UNACCOUNTED, 0),
        approximate=approximate,
        handoff=handoff,
        tokens_by_source=by_source,
        spans=_explained(spans, runs),
        compared_with=compared_with,
        difference=difference,
    )


def _cached_prefix(sources: Sequence[SourceRun]) -> int:
    """Leading tokens that were not computed."""
    return sum(run.tokens for run in takewhile(lambda run: run.source != COMPUTED, sources))


def _runs(
    sources: tuple[SourceRun, ...], prompt_tokens: int, difference: Difference | None, block_tokens: int
) -> Iterator[Part]:
    """Yield the engine's runs, with COLD refined to CHANGED, filled up to the length of the prompt."""
    start = 0
    for run in sources:
        if not run.tokens:
            continue
        end = start + run.tokens
        if run.reason is MissReason.COLD and difference is not None and difference.token < end:
            # A block is hit or missed whole, so what the change costs starts with its block.
            changed = max(start, difference.token - difference.token % block_tokens)
            if changed > start:
                yield Part(run.source, changed - start, run.reason)
            yield Part(run.source, end - changed, MissReason.CHANGED)
        else:
            yield Part(run.source, run.tokens, run.reason)
        start = end
    if start < prompt_tokens:
        yield Part(UNACCOUNTED, prompt_tokens - start)


def _explained(spans: tuple[Span, ...], runs: Sequence[Part]) -> tuple[ExplainedSpan, ...]:
    explained: list[ExplainedSpan] = []
    pending = iter(runs)
    run, left = None, 0
    for span in spans:
        parts: list[Part] = []
        wanted = span.end - span.start
        while wanted:
            if run is None or not left:
                run = next(pending)
                left = run.tokens
            taken = min(wanted, left)
            parts.append(Part(run.source, taken, run.reason))
            wanted -= taken
            left -= taken
        explained.append(ExplainedSpan(span.path, span.start, span.end, tuple(parts)))
    return tuple(explained)


def _span_at(spans: Sequence[Span], token: int) -> Span:
    """Find the span that holds `token`. Empty spans end before they start and so are never chosen."""
    return spans[bisect_right(spans, token, key=lambda span: span.end)]
