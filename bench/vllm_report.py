"""What the samples of `vllm_ttft.py` come to: times by cell, paired ratios and their bounds, tokens that differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from harness import spread
from rich.table import Table
from vllm_systems import ALONE, OURS

SOURCES = ("cold", "own", "dram", "ssd")
"""Computed; vLLM's own prefix cache; the memory tier, that cache emptied; the disk, all processes started anew."""
HIT_BOUND, COLD_BOUND = 1.05, 1.02
LEAST_PAIRS = 20
"""Fewer say how it looks, and prove nothing."""
_Z = 1.6449
_T = (
    *(
        6.314,
        2.920,
        2.353,
        2.132,
        2.015,
        1.943,
        1.895,
        1.860,
        1.833,
        1.812,
        1.796,
        1.782,
        1.771,
        1.761,
        1.753,
    ),
    *(
        1.746,
        1.740,
        1.734,
        1.729,
        1.725,
        1.721,
        1.717,
        1.714,
        1.711,
        1.708,
        1.706,
        1.703,
        1.701,
        1.699,
        1.697,
    ),
)
"""95% quantiles of Student's t, for 1 degree of freedom and more."""


class Sample(NamedTuple):
    """One request of one system."""

    system: str
    source: str
    """Where its prompt should have come from."""
    prompt_tokens: int
    pair: int
    ttft_s: float
    tpot_s: float | None
    cached: int
    wanted: int
    """Tokens that had to be cached: all of full blocks short of the last token; none of a cold prompt."""
    sources: dict[str, int] | None
    """Where they came from as our connector says; None for others."""
    token_ids: list[int]
    saved_s: float | None = None
    """Of a cold prompt of ours: how long after its last token its blocks were still on their way to the store."""

    @property
    def is_pure(self) -> bool:
        """It came from where it should have: whole, and from nowhere else."""
        if self.cached != self.wanted:
            return False
        if self.sources is None or self.source == "cold":
            return True
        return self.sources.get("vram" if self.source == "own" else self.source, 0) == self.wanted


def summarise(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """One row per prompt length, source and system, of pure samples."""
    cells: dict[tuple[int, str, str], list[Sample]] = {}
    for sample in samples:
        if sample.is_pure:
            cells.setdefault((sample.prompt_tokens, sample.source, sample.system), []).append(sample)
    rows = []
    for (n, source, system), found in cells.items():
        row: dict[str, Any] = {"prompt_tokens": n, "source": source, "system": system}
        row["ttft_s"] = spread([sample.ttft_s for sample in found])
        if source == "cold":
            steps = [sample.tpot_s for sample in found if sample.tpot_s is not None]
            row |= {"tpot_s": spread(steps)} if steps else {}
            saved = [sample for sample in found if sample.saved_s is not None]
            if saved:
                row["saved_s"] = spread([sample.saved_s or 0.0 for sample in saved])
                row["saved_of_prefill"] = spread([(s.saved_s or 0.0) / s.ttft_s for s in saved])
        rows.append(row)
    return sorted(rows, key=lambda row: (row["prompt_tokens"], SOURCES.index(row["source"])))


def ratios(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Ours over others, pair by pair, with the bound where one is held."""
    pure = {(s.prompt_tokens, s.source, s.system, s.pair): s for s in samples if s.is_pure}
    found = []
    for n in sorted({sample.prompt_tokens for sample in samples}):
        for source in SOURCES:
            others = {s.system for s in pure.values() if (s.prompt_tokens, s.source) == (n, source)} - {OURS}
            if source in ("cold", "own"):
                others &= {ALONE}
            rows = [
                row | {"prompt_tokens": n, "source": source, "against": other, "of": "ttft"}
                for other in sorted(others)
                if (row := paired(_pairs(pure, n, source, other, "ttft_s")))
            ]
            if source == "cold":
                rows += [
                    row | {"prompt_tokens": n, "source": source, "against": other, "of": "tpot"}
                    for other in sorted(others)
                    if (row := paired(_pairs(pure, n, source, other, "tpot_s")))
                ]
            found += _held(rows, source, pure)
    return found


def _held(rows: list[dict[str, Any]], source: str, pure: dict[Any, Sample]) -> list[dict[str, Any]]:
    """Cold: each row. Tiers: the row of the best peer, the one with the least median."""
    held = rows if source == "cold" else []
    if source in ("dram", "ssd") and rows:

        def median(row: dict[str, Any]) -> float:
            key = (row["prompt_tokens"], source, row["against"])
            return statistics.median(s.ttft_s for k, s in pure.items() if k[:3] == key)

        held = [min(rows, key=median)]
    for row in held:
        row["bound"] = COLD_BOUND if source == "cold" else HIT_BOUND
        row["is_met"] = row["upper"] is not None and row["upper"] <= row["bound"]
        row["is_proof"] = row["pairs"] >= LEAST_PAIRS
    return rows


def _pairs(
    pure: dict[tuple[int, str, str, int], Sample], n: int, source: str, other: str, field: str
) -> list[tuple[float, float]]:
    found = []
    for (tokens, where, system, pair), theirs in pure.items():
        mine = pure.get((n, source, OURS, pair))
        if (tokens, where, system) == (n, source, other) and mine is not None:
            found.append((getattr(mine, field), getattr(theirs, field)))
    return [(a, b) for a, b in found if a and b]


def paired(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Geometric mean of the ratios, and its upper 95% bound (one-sided) by a paired t test on their logarithms."""
    logs = [math.log(mine / theirs) for mine, theirs in pairs]
    if not logs:
        return {}
    mean = statistics.fmean(logs)
    upper = None
    if len(logs) > 1:
        upper = math.exp(mean + quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs)))
    each = spread([math.exp(log) for log in logs])
    return {"ratio": math.exp(mean), "upper": upper, "pairs": len(logs), "each": each}


def quantile(freedom: int) -> float:
    """The value that Student's t stays below 95 times in 100."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    return _Z + (_Z**3 + _Z) / (4 * freedom)


def differing(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Samples whose tokens differ from those that vLLM alone gave for as many cached tokens of the same prompt."""
    alone = {(s.prompt_tokens, s.pair, s.source): s for s in samples if s.system == ALONE and s.is_pure}
    found = []
    for sample in samples:
        like = alone.get((sample.prompt_tokens, sample.pair, "cold" if sample.source == "cold" else "own"))
        if not sample.is_pure or like is None:
            continue
        wanted = like.token_ids[: len(sample.token_ids)]
        if sample.token_ids != wanted:
            place = {"prompt_tokens": sample.prompt_tokens, "source": sample.source, "pair": sample.pair}
            found.append({"system": sample.system, **place, "wanted": wanted, "got": sample.token_ids})
    return found


def table(rows: list[dict[str, Any]], compared: list[dict[str, Any]]) -> tuple[Table, Table]:
    """For people: times in milliseconds, and the ratios."""
    times = Table("tokens", "from", "system", "min", "median", "max", "n", title="TTFT in ms")
    for row in rows:
        values = row["ttft_s"]
        shown = [f"{values[name] * 1e3:.1f}" for name in ("min", "median", "max")]
        times.add_row(str(row["prompt_tokens"]), row["source"], row["system"], *shown, str(values["n"]))
    ratio = Table("tokens", "from", "of", "ours over", "ratio", "at most (95%)", "pairs", "held to")
    for row in compared:
        upper = "-" if row["upper"] is None else f"{row['upper']:.3f}"
        held = ""
        if "bound" in row:
            held = f"{row['bound']:.2f} {'met' if row['is_met'] else 'missed'}"
            held += "" if row["is_proof"] else ", too few pairs to tell"
        what = (str(row["prompt_tokens"]), row["source"], row["of"], row["against"])
        ratio.add_row(*what, f"{row['ratio']:.3f}", upper, str(row["pairs"]), held)
    return times, ratio
