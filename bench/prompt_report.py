"""What the measurements of prompts come to: sums, and tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import prompt_load
import prompt_ttft
from prompt_peers import NAMING, OURS
from prompt_traps import CONTROL
from rich.table import Table

Entries = Mapping[str, Mapping[str, Any]]


def summarise(entries: Entries) -> dict[str, Any]:
    """All parts that were measured, in `bench/results` form."""
    found: dict[str, Any] = {"traps": _traps(entries)}
    if "clients" in entries:
        found["clients"] = {
            "excerpts": entries["clients"]["excerpts"],
            "rows": entries["clients"]["rows"],
        }
    if "lists" in entries.get("mcp", {}):
        found["mcp"] = _mcp(entries["mcp"])
    if "latency" in entries:
        found["latency"] = {
            "bytes": entries["latency"]["pairs"][0]["bytes"],
            "aim_ms": {"p50": prompt_load.AIM_P50_MS, "p95": prompt_load.AIM_P95_MS},
            "arms": prompt_load.summed_latency(entries["latency"]["pairs"]),
        }
    if "streams" in entries:
        found["streams"] = entries["streams"]["found"]
    if "rates" in entries:
        found["rates"] = {
            "rows": prompt_load.summed_rates(entries["rates"]["rows"]),
            "note": "ours is one Python process; client, server and gateways share the cores",
        }
    found["ttft"] = {
        system: prompt_ttft.summed(pairs)
        for system in ("embedded", "vLLM")
        if (pairs := [entry for unit, entry in entries.items() if unit.startswith(f"ttft|{system}|")])
    }
    return found


def absent(entries: Entries, *, given: Sequence[str]) -> dict[str, Any]:
    """Who could not run, with its command and its error."""
    found = {
        unit.split("|", 1)[1]: entry["absent"]
        for unit, entry in entries.items()
        if unit.startswith(("said|", "ttft|")) and "absent" in entry
    }
    found |= entries.get("rates", {}).get("absent", {})
    if "absent" in entries.get("mcp", {}):
        found["mcp"] = entries["mcp"]["absent"]
    for name in NAMING:
        if name not in given:
            found.setdefault(name, {"error": f"no environment with it was given (--{name}-python)"})
    return found


def _traps(entries: Entries) -> dict[str, Any]:
    said = {OURS: entries.get("traps", {}).get("said", [])}
    said |= {
        unit.split("|", 1)[1]: entry["said"]
        for unit, entry in entries.items()
        if unit.startswith("said|") and "said" in entry
    }
    rows: list[dict[str, Any]] = []
    hits = {row["trap"]: row for row in entries.get("hits", {}).get("rows", [])}
    for number, row in enumerate(said[OURS]):
        name = row["trap"]
        by_peer = {
            peer: {key: each[number][key] for key in ("said", "noticed", "named")}
            for peer, each in said.items()
        }
        rows.append({"trap": name, "said": by_peer, "hits": hits.get(name)})
    counted = {
        peer: {
            "noticed": sum(row["noticed"] for row in each if row["trap"] != CONTROL),
            "named": sum(row["named"] for row in each if row["trap"] != CONTROL),
            "of": len(each) - 1,
            "says_of_control": [one for row in each if row["trap"] == CONTROL for one in row["said"]],
        }
        for peer, each in said.items()
        if each
    }
    lossless = [row for row in hits.values() if row["is_lossless"]]
    return {
        "counted": counted,
        "lossless": {"reach": sum(row["reaches"] for row in lossless), "of": len(lossless)},
        "rows": rows,
    }


def _mcp(entry: Mapping[str, Any]) -> dict[str, Any]:
    lists = entry["lists"]
    return {
        "lists": len(lists),
        "one_prompt_each": sum(row["prompts_canonical"] == 1 for row in lists),
        "key_order_costs_nothing": sum(
            row["key_order_only"]["canonical"]["hit_tokens"] == row["key_order_only"]["control"]["hit_tokens"]
            for row in lists
        ),
        "rows": lists,
        "upgrades": entry["upgrades"],
    }


def tables(found: Mapping[str, Any]) -> list[Table]:
    """For people."""
    made = [_traps_table(found["traps"])]
    if "clients" in found:
        made.append(_clients_table(found["clients"]))
    if "latency" in found:
        made.append(_latency_table(found["latency"]))
    if "rates" in found:
        made.append(_rates_table(found["rates"]["rows"]))
    return made


def _traps_table(traps: Mapping[str, Any]) -> Table:
    peers = list(traps["counted"])
    table = Table(
        "trap", *peers, "hit raw", "canonical", title="traps: what is said; hit of the second request"
    )
    for row in traps["rows"]:
        hits = row["hits"]
        shares = [f"{hits[name]['share']:.1%}" for name in ("raw", "canonical")] if hits else ["", ""]
        table.add_row(row["trap"], *(_words(row["said"][peer]) for peer in peers), *shares)
    counts = [
        f"{each['named']} named, {each['noticed']} noticed of {each['of']}"
        for each in traps["counted"].values()
    ]
    table.add_row("in all", *counts, "", "")
    return table


def _words(said: Mapping[str, Any]) -> str:
    words = ", ".join(dict.fromkeys(one[0] for one in said["said"])) or "-"
    return words if said["named"] else f"({words})"


def _clients_table(clients: Mapping[str, Any]) -> Table:
    names = ("raw", "default", "all_rules")
    table = Table("client", *names, title="share of turn n+1 that was in the turns before it")
    for row in clients["rows"]:
        cells = [
            "" if name not in row or row[name]["share"] is None else f"{row[name]['share']:.1%}"
            for name in names
        ]
        table.add_row(row["client"], *cells)
    return table


def _latency_table(latency: Mapping[str, Any]) -> Table:
    table = Table(
        "way", "p50", "p95", "added p50", "added p95", title=f"ms to the first byte, {latency['bytes']} B"
    )
    for arm, row in latency["arms"].items():
        added = row.get("added_ms")
        cells = [row["ms"]["p50"], row["ms"]["p95"], *([added["p50"], added["p95"]] if added else [])]
        table.add_row(arm, *(f"{cell:.2f}" for cell in cells))
    return table


def _rates_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("gateway", "body", "requests/s", "failed", "ours of it", title="requests a second")
    for row in rows:
        ratio = "" if row["ours_of_it"] is None else f"{row['ours_of_it']:.2f}"
        table.add_row(row["gateway"], row["body"], f"{row['per_s']['median']:.0f}", str(row["failed"]), ratio)
    return table
