"""What a recording's replay came to."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

_INDEX = re.compile(r"\[\d+\]")


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were computed although an earlier request had them, and why."""

    file: str
    line: int
    cause: str
    path: str
    """In the request's own body; empty where it is nowhere in it."""
    what: str
    fix: str
    rule: str
    """The canonical rule that repairs it; empty where none does."""
    tokens: int
    compared_with: str
    """`FILE:LINE` of the earlier request."""
    also: tuple[str, ...] = ()
    """Further causes in the same request, behind the one that broke the prefix."""


class CauseTotal(msgspec.Struct, frozen=True, kw_only=True):
    """All losses of one cause in one kind of place."""

    cause: str
    where: str
    """Their path, with `[*]` for any index."""
    requests: int
    tokens: int
    fix: str
    rule: str
    example: str
    """`FILE:LINE` of the costliest."""


class RuleTotal(msgspec.Struct, frozen=True, kw_only=True):
    """What one rule alone would change."""

    rule: str
    requests: int
    """In how many it changed something."""
    prompt_tokens: int
    """Of all prompts, if it were the only one."""
    cached_tokens: int
    """Those of them that would be found."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole replay."""

    engine: str
    block: int
    cache_tokens: int | None
    tokens_by: str
    """What made tokens of texts."""
    is_exact: bool
    """Whether those are a model's own."""
    requests: int
    sessions: int
    skipped_lines: int
    """Lines that hold no prompt."""
    prompt_tokens: int
    cached_tokens: int
    canonical_cached_tokens: int
    """After the chosen rules."""
    canonical_prompt_tokens: int
    rules: list[RuleTotal]
    causes: list[CauseTotal]
    lost_tokens: int
    losses: list[Loss]
    notes: list[str]


def totals(losses: Sequence[Loss]) -> list[CauseTotal]:
    """By cause and kind of place, the costliest first."""
    groups: dict[tuple[str, str], list[Loss]] = {}
    for loss in losses:
        groups.setdefault((loss.cause, _INDEX.sub("[*]", loss.path)), []).append(loss)
    found = [_total(cause, where, group) for (cause, where), group in groups.items()]
    return sorted(found, key=lambda one: (-one.tokens, one.cause, one.where))


def _total(cause: str, where: str, group: Sequence[Loss]) -> CauseTotal:
    worst = max(group, key=lambda loss: loss.tokens)
    return CauseTotal(
        cause=cause,
        where=where,
        requests=len(group),
        tokens=sum(loss.tokens for loss in group),
        fix=worst.fix,
        rule=worst.rule,
        example=f"{worst.file}:{worst.line}",
    )
