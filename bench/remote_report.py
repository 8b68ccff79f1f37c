"""What the measurements of `remote.py` come to: rows, ratios, and the bounds that the remote tier is held to."""

from __future__ import annotations

import statistics
from typing import Any

from harness import spread
from rich.table import Table
from vllm_report import paired

KIB, MIB = 1 << 10, 1 << 20
OURS, THEIRS = "workmem", "Mooncake"
MOVE_BOUND = 0.9
"""Of the best path of Mooncake's own client."""
CONTEXT_BOUND = 1.3
"""Time that a remote hit takes beyond one in dram, in times that Mooncake's client needs for the same bytes."""
PRESSURE_AIM = 2.28


def summarise(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All parts that were measured."""
    return {
        "moves": moves(entries),
        "flood": entries.get("flood", {}).get("flood", {}),
        "contexts": contexts(entries),
        "pressure": pressure(entries),
    }


def moves(entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per operation, batch and block of ours: its rate, over Mooncake's best path and over it with such blocks.

    What was not moved whole is counted as `short`, and its time says nothing.
    """
    cells: dict[tuple[str, str, int, int], dict[str, dict[str, Any]]] = {}
    for unit, entry in entries.items():
        for row in entry["moves"] if unit.startswith("moves|") else ():
            cells.setdefault((row["system"], row["op"], row["batch"], row["block"]), {})[unit] = row
    rows: list[dict[str, Any]] = []
    for (system, op, batch, block), mine in sorted(cells.items()):
        if system != OURS:
            continue
        theirs = {
            size: found for (name, o, b, size), found in cells.items() if (name, o, b) == (THEIRS, op, batch)
        }
        best = max(theirs, key=lambda size: statistics.median(_whole(theirs[size], "bytes_per_s") or [0.0]))
        row: dict[str, Any] = {"op": op, "batch": batch, "block": block, "best_object": best}
        row["short"] = sum(found["short"] for found in mine.values())
        row["of_best"], row["of_such_blocks"] = _over(mine, theirs[best]), _over(mine, theirs[block])
        for field in ("bytes_per_s", "cpu_s_per_gib"):
            for name, found in ((field, mine), (f"best_{field}", theirs[best])):
                values = _whole(found, field)
                row[name] = spread(values) if values else None
        rows.append(row)
    return rows


def _whole(found: dict[str, dict[str, Any]], field: str) -> list[float]:
    return [row[field] for row in found.values() if not row["short"]]


def _over(
    mine: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]
) -> dict[str, float | int] | None:
    """Rate over rate, round by round."""
    pairs = [(mine[unit], theirs[unit]) for unit in mine.keys() & theirs.keys()]
    ratios = [a["bytes_per_s"] / b["bytes_per_s"] for a, b in pairs if not a["short"] and not b["short"]]
    return spread(ratios) if ratios else None


def contexts(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Time to first token by where the context was, and what the way from the pool costs. Empty without pairs."""
    found = [entry for unit, entry in entries.items() if unit.startswith("context|")]
    whole = [entry for entry in found if entry["bytes"]]
    if not whole:
        return {}
    ways = [
        (entry["remote"]["ttft_s"] - entry["dram"]["ttft_s"]) / (entry["bytes"] / entry["raw_bytes_per_s"])
        for entry in whole
    ]
    return {
        "pairs": len(whole),
        "not_from_the_pool": len(found) - len(whole),
        "bytes": whole[0]["bytes"],
        "ttft_s": {
            name: spread([entry[name]["ttft_s"] for entry in whole])
            for name in ("computed", "remote", "dram")
        },
        "raw_bytes_per_s": spread([entry["raw_bytes_per_s"] for entry in whole]),
        "way_of_raw": spread(ways),
        "remote_of_computed": paired(
            [(entry["remote"]["ttft_s"], entry["computed"]["ttft_s"]) for entry in whole]
        ),
        "same_answers": sum(entry["same"] for entry in whole),
    }


def pressure(entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per arm, over the rounds behind the first that all arms took."""
    by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for unit, entry in entries.items():
        if unit.startswith("pressure|"):
            by_arm.setdefault(entry["arm"], {})[entry["round"]] = entry
    if not by_arm:
        return []
    common = sorted(set.intersection(*(set(rounds) for rounds in by_arm.values())) - {0})
    rows: list[dict[str, Any]] = []
    for arm, rounds in by_arm.items():
        mine = [rounds[number] for number in common]
        if not mine:
            continue
        wall_s = sum(entry["wall_s"] for entry in mine)
        tokens = sum(entry["prompt_tokens"] for entry in mine)
        rows.append(
            {
                "arm": arm,
                "rounds": len(common),
                "prompt_tokens": tokens,
                "computed": sum(entry["computed"] for entry in mine),
                "input_tokens_per_s": tokens / wall_s,
                "requests_per_s": sum(entry["requests"] for entry in mine) / wall_s,
                "same_answers": sum(
                    a == b
                    for number in common
                    for a, b in zip(
                        rounds[number]["token_ids"],
                        by_arm[next(iter(by_arm))][number]["token_ids"],
                        strict=True,
                    )
                ),
            }
        )
    for row in rows:
        row["of_first"] = row["input_tokens_per_s"] / rows[0]["input_tokens_per_s"]
    return rows


def tables(summed: dict[str, Any]) -> list[Table]:
    """For people."""
    moved = Table(
        "",
        "batch",
        "blocks",
        "MB/s",
        "of Mooncake's best path",
        "of it with such blocks",
        "CPU s/GiB (best path)",
    )
    for row in summed["moves"]:
        if row["of_best"] is None:
            moved.add_row(
                row["op"], f"{row['batch'] // MIB} MiB", f"{row['block'] // KIB} KiB", "never whole"
            )
            continue
        moved.add_row(
            row["op"],
            f"{row['batch'] // MIB} MiB",
            f"{row['block'] // KIB} KiB",
            f"{row['bytes_per_s']['median'] / 1e6:.0f}",
            f"{row['of_best']['median']:.2f} (objects of {row['best_object'] // KIB} KiB)",
            f"{row['of_such_blocks']['median']:.2f}" if row["of_such_blocks"] else "-",
            f"{row['cpu_s_per_gib']['median']:.2f} ({row['best_cpu_s_per_gib']['median']:.2f})",
        )
    shown = [moved]
    if summed["flood"]:
        flood = Table("four times the pool", "objects", "refused")
        for name, found in summed["flood"].items():
            flood.add_row(name, f"{found['objects']:,}", f"{found['refused']:,}")
        shown.append(flood)
    if found := summed["contexts"]:
        context = Table("TTFT of a context", "ms", "what of")
        for name, times in found["ttft_s"].items():
            context.add_row(name, f"{times['median'] * 1e3:.0f}", "")
        context.add_row(
            "way from the pool", "", f"{found['way_of_raw']['median']:.2f} of Mooncake's own time"
        )
        context.add_row("remote", "", f"{found['remote_of_computed']['ratio']:.3f} of computing")
        shown.append(context)
    if summed["pressure"]:
        table = Table("memory", "input tokens/s", "requests/s", "computed", "times the first")
        for row in summed["pressure"]:
            table.add_row(
                row["arm"],
                f"{row['input_tokens_per_s']:.0f}",
                f"{row['requests_per_s']:.2f}",
                f"{row['computed']:,} of {row['prompt_tokens']:,}",
                f"{row['of_first']:.2f}",
            )
        shown.append(table)
    return shown
