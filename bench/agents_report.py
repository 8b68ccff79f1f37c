"""What the runs of `agents.py` come to: rates and times by arm, and how they compare."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fleet import percentiles
from harness import spread
from rich.table import Table
from vllm_systems import ALONE, LMCACHE, MOONCAKE, NATIVE, OURS

PLAIN = "workmem, no levers"
PEERS = (NATIVE, LMCACHE, MOONCAKE)
THROUGHPUT_AIM, P95_AIM = 2.28, 6.4
"""Times vLLM alone: input tokens a second, and the 95th percentile of later turns' TTFT."""


def summarise(entries: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per arm, over the repetitions that all arms with any have."""
    by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for entry in entries.values():
        by_arm.setdefault(entry["arm"], {})[entry["repetition"]] = entry
    if not by_arm:
        return []
    common = sorted(set.intersection(*(set(runs) for runs in by_arm.values())))
    if not common:
        return []
    answers = {
        arm: [request["token_ids"] for request in runs[common[0]]["requests"]] for arm, runs in by_arm.items()
    }
    rows = []
    for arm, runs in by_arm.items():
        row = _row(arm, [runs[number] for number in common])
        if ALONE in answers and arm != ALONE:
            pairs = list(zip(answers[arm], answers[ALONE], strict=True))
            row |= {"same_answers": sum(a == b for a, b in pairs), "answers": len(pairs)}
        rows.append(row)
    return rows


def _row(arm: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    requests = [request for run in runs for request in run["requests"]]
    counted = sum(request["prompt_tokens"] for request in requests)
    computed = counted - sum(request["cached"] for request in requests)
    row: dict[str, Any] = {"arm": arm, "repetitions": len(runs), "requests": len(requests)}
    row |= {"prompt_tokens": counted, "computed": computed}
    # A request computes its own new tokens whatever is cached; the rest had been computed before.
    row["recomputed"] = computed - sum(request["new"] for request in requests)
    row["wall_s"] = spread([run["wall_s"] for run in runs])
    row["input_tokens_per_s"] = spread([_tokens(run) / run["wall_s"] for run in runs])
    row["requests_per_s"] = spread([len(run["requests"]) / run["wall_s"] for run in runs])
    for name, is_first in (("ttft_first_s", True), ("ttft_later_s", False)):
        times = [request["ttft_s"] for request in requests if (request["turn"] == 0) == is_first]
        row[name] = percentiles(times) if times else None
    for name in ("sources", "hints", "counts"):
        row[name] = dict(sum((Counter(run[name]) for run in runs), Counter()))
    return row


def _tokens(run: dict[str, Any]) -> int:
    return sum(request["prompt_tokens"] for request in run["requests"])


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Each arm beside vLLM alone, ours beside the best peer, and what comes of holding and what of policy.

    Every ratio is above 1 where the first named is better.
    """
    by_arm = {row["arm"]: row for row in rows}
    found: dict[str, Any] = {"against_alone": {}}
    alone, mine, plain = (by_arm.get(name) for name in (ALONE, OURS, PLAIN))
    if alone is not None:
        found["against_alone"] = {arm: better(row, alone) for arm, row in by_arm.items() if arm != ALONE}
    peers = [by_arm[name] for name in PEERS if name in by_arm]
    aims = []
    if mine is not None and alone is not None:
        ratio = better(mine, alone)
        aims += [
            _aim("throughput", ALONE, ratio["throughput"], THROUGHPUT_AIM),
            _aim("p95 of later turns", ALONE, ratio["ttft_later_p95"], P95_AIM),
        ]
    if mine is not None and peers:
        fastest = max(peers, key=lambda row: row["input_tokens_per_s"]["median"])
        soonest = min(peers, key=lambda row: row["ttft_later_s"]["p95"])
        aims += [
            _aim("throughput", fastest["arm"], better(mine, fastest)["throughput"], 1.0),
            _aim("p95 of later turns", soonest["arm"], better(mine, soonest)["ttft_later_p95"], 1.0),
        ]
    found["aims"] = aims
    if plain is not None and alone is not None:
        found["holding"] = better(plain, alone)
    if plain is not None and mine is not None:
        found["policy"] = better(mine, plain)
    return found


def better(row: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """How many times `row` is better than `other`."""
    found = {
        "throughput": row["input_tokens_per_s"]["median"] / other["input_tokens_per_s"]["median"],
        "requests": row["requests_per_s"]["median"] / other["requests_per_s"]["median"],
    }
    for of in ("first", "later"):
        mine, theirs = row[f"ttft_{of}_s"], other[f"ttft_{of}_s"]
        for name in ("p50", "p95"):
            found[f"ttft_{of}_{name}"] = theirs[name] / mine[name]
    return found


def _aim(of: str, against: str, ratio: float, aim: float) -> dict[str, Any]:
    return {"of": of, "against": against, "ratio": ratio, "aim": aim, "is_met": ratio >= aim}


def table(rows: list[dict[str, Any]], compared: dict[str, Any]) -> tuple[Table, Table]:
    """For people: by arm, and ours beside the others."""
    names = ("", "tokens/s", "first turns", "later turns", "recomputed", "times alone")
    shown = Table(
        *names, title="input tokens/s, TTFT p50 and p95 in s, and throughput and later p95 beside vLLM alone"
    )
    for row in rows:
        times = [
            f"{row[name]['p50']:.2f} {row[name]['p95']:.2f}" for name in ("ttft_first_s", "ttft_later_s")
        ]
        ratio = compared["against_alone"].get(row["arm"])
        said = f"{ratio['throughput']:.2f} {ratio['ttft_later_p95']:.2f}" if ratio else ""
        rate = f"{row['input_tokens_per_s']['median']:.0f}"
        shown.add_row(row["arm"], rate, *times, f"{row['recomputed']:,}", said)
    aims = Table("workmem", "against", "times", "aim", "")
    for aim in compared["aims"]:
        met = "met" if aim["is_met"] else "missed"
        aims.add_row(aim["of"], aim["against"], f"{aim['ratio']:.2f}", f"{aim['aim']:.2f}", met)
    for part, other in (("holding", ALONE), ("policy", PLAIN)):
        for name, of in (("throughput", "throughput"), ("ttft_later_p95", "p95 of later turns")):
            if part in compared:
                aims.add_row(f"{of}, by {part}", other, f"{compared[part][name]:.2f}", "", "")
    return shown, aims


def typical(values: list[float], part: float) -> float:
    """That part of `values` is not above it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else statistics.nan
