"""What the phases come to: one row each, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

import msgspec
from rich.table import Table

from workmem.core.outcomes import TierName
from workmem.demo.phase import Phase

COMPUTED = "computed"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One phase. Rates are of prompt tokens; the speed-up is of `wall_s` against the first phase."""

    name: str
    turns: int
    ttft_s_p50: float
    ttft_s_p95: float
    prompt_tokens: int
    computed_tokens: int
    hit_rate: float
    hit_rate_by_tier: dict[str, float]
    start_s: float
    wall_s: float
    speed_up: float
    same_answers: int
    """Turns whose text equals that of the first phase."""


def summarise(phases: Sequence[Phase]) -> list[Row]:
    """Rows in the order of `phases`; the first is what the others are measured against."""
    baseline = phases[0]
    return [_row(phase, baseline) for phase in phases]


def _row(phase: Phase, baseline: Phase) -> Row:
    answers = [turn.answer for turn in phase.turns]
    ttfts = [answer.ttft_s for answer in answers]
    by_source: dict[str, int] = {}
    for answer in answers:
        for source, tokens in answer.tokens_by_source.items():
            by_source[source] = by_source.get(source, 0) + tokens
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    hits = {str(tier): by_source.get(tier, 0) / prompt_tokens for tier in TierName if tier in by_source}
    return Row(
        name=phase.name,
        turns=len(answers),
        ttft_s_p50=median(ttfts),
        ttft_s_p95=percentile_95(ttfts),
        prompt_tokens=prompt_tokens,
        computed_tokens=by_source.get(COMPUTED, 0),
        hit_rate=sum(hits.values()),
        hit_rate_by_tier=hits,
        start_s=phase.start_s,
        wall_s=phase.wall_s,
        speed_up=baseline.wall_s / phase.wall_s,
        same_answers=sum(
            turn.answer.text == other.answer.text
            for turn, other in zip(phase.turns, baseline.turns, strict=True)
        ),
    )


def percentile_95(values: Sequence[float]) -> float:
    """Interpolated within the sample; of a single value, that value."""
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def table(rows: Sequence[Row], title: str) -> Table:
    """All rows for people."""
    shown = Table(title=title, title_justify="left", caption_justify="left")
    shown.caption = "hit rates are of prompt tokens; speed-up is of wall time; same answers as with reuse off"
    shown.add_column("")
    for header in (
        "TTFT p50",
        "TTFT p95",
        "tokens computed",
        "hit rate",
        "of it by tier",
        "wall",
        "speed-up",
        "same",
    ):
        shown.add_column(header, justify="right")
    for row in rows:
        tiers = "  ".join(f"{tier} {rate:.0%}" for tier, rate in row.hit_rate_by_tier.items() if rate)
        shown.add_row(
            row.name,
            _seconds(row.ttft_s_p50),
            _seconds(row.ttft_s_p95),
            f"{row.computed_tokens:,} of {row.prompt_tokens:,}",
            f"{row.hit_rate:.1%}",
            tiers or "-",
            _seconds(row.wall_s),
            f"{row.speed_up:.1f}x",
            f"{row.same_answers}/{row.turns}",
        )
    return shown


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
