"""What the phases come to: one row each, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, quantiles

import msgspec
from rich.table import Table

from workmem.core.outcomes import COMPUTED, TierName
from workmem.demo.phase import Phase


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
    """All rows for people: a column per phase, so that it fits a narrow terminal."""
    shown = Table(title=title, title_justify="left", caption_justify="left")
    shown.caption = "hit rates are of prompt tokens, the speed-up is of wall time"
    shown.add_column("")
    for row in rows:
        shown.add_column(row.name, justify="right")
    tiers = [str(tier) for tier in TierName if any(row.hit_rate_by_tier.get(tier) for row in rows)]

    def line(name: str, cell: Callable[[Row], str]) -> None:
        shown.add_row(name, *(cell(row) for row in rows))

    line("TTFT p50", lambda row: _seconds(row.ttft_s_p50))
    line("TTFT p95", lambda row: _seconds(row.ttft_s_p95))
    line("prompt tokens", lambda row: f"{row.prompt_tokens:,}")
    line("tokens computed", lambda row: f"{row.computed_tokens:,}")
    line("hit rate", lambda row: f"{row.hit_rate:.1%}")
    for tier in tiers:
        line(f"  from {tier}", lambda row, tier=tier: f"{row.hit_rate_by_tier.get(tier, 0.0):.1%}")
    line("wall time", lambda row: _seconds(row.wall_s))
    line("speed-up", lambda row: f"{row.speed_up:.1f}x")
    line("same answers", lambda row: f"{row.same_answers} of {row.turns}")
    return shown


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
