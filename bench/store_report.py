"""What the measurements of `store.py` come to: rows, ratios to others, and the bounds that our store is held to."""

from __future__ import annotations

import statistics
from typing import Any

from harness import spread
from rich.table import Table

KIB, MIB = 1 << 10, 1 << 20
OURS = {"dram": "workmem dram", "ssd": "workmem ssd"}
COPY_BOUND, DISK_BOUND = 0.85, 0.85
"""Reach of a get or put: of a copy with the checksum of its destination, and of the raw disk."""
LOOKUP_BOUND_US = 100.0
ECHO_BOUNDS = {32: 3.0, 512: 8.0}
REPLAY_BOUND_S = 3.0
RECORD_BOUND_BYTES = 300
CHAIN_ONLY = 512
"""Records of the store that growth is counted from."""


def summarise(entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per size, operation, number of clients and system: rates, times, ratios to the baselines."""
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in entries.values():
        if "op" in entry:
            key = (entry["size"], entry["op"], entry["clients"], entry["system"])
            grouped.setdefault(key, []).append(entry)
    rows = []
    for (size, op, clients, system), found in sorted(grouped.items()):
        row: dict[str, Any] = {"size": size, "op": op, "clients": clients, "system": system}
        measured = [entry for entry in found if "bytes_per_s" in entry]
        if measured:
            for field in ("bytes_per_s", "ops_per_s", "p50_us", "p99_us", "cpu_s_per_gb"):
                row[field] = spread([entry[field] for entry in measured])
            row["short"] = sum(entry["short"] for entry in measured) / sum(
                entry["short"] + entry["blocks"] for entry in measured
            )
            row["of"] = _of_baselines(measured)
        row["skipped"] = sorted({entry["skipped"] for entry in found if "skipped" in entry})
        rows.append(row)
    return rows


def _of_baselines(measured: list[dict[str, Any]]) -> dict[str, dict[str, float | int]]:
    """Rate over the rate of each baseline, slice by slice."""
    ratios: dict[str, list[float]] = {}
    for entry in measured:
        for name, rates in entry["baselines"].items():
            pairs = zip(entry["rates"], rates, strict=True)
            ratios.setdefault(name, []).extend(own / base for own, base in pairs if base)
        raw = [rates for name, rates in entry["baselines"].items() if name.startswith("raw")]
        if raw:
            best = max(statistics.median(rates) for rates in raw)
            ratios.setdefault("raw_best", []).extend(own / best for own in entry["rates"])
    return {name: spread(values) for name, values in ratios.items() if values}


def against(rows: list[dict[str, Any]], media: dict[str, str]) -> list[dict[str, Any]]:
    """Ours over each other system of the same medium: as measured, and with both as parts of their memcpy."""
    by_key = {(r["size"], r["op"], r["clients"], r["system"]): r for r in rows if "bytes_per_s" in r}
    found = []
    for (size, op, clients, system), row in by_key.items():
        ours = by_key.get((size, op, clients, OURS[media[system]]))
        if ours is None or ours is row:
            continue
        ratio = ours["bytes_per_s"]["median"] / row["bytes_per_s"]["median"]
        levelled = ours["of"]["memcpy"]["median"] / row["of"]["memcpy"]["median"]
        found.append(
            {
                "size": size,
                "op": op,
                "clients": clients,
                "against": system,
                "ratio": ratio,
                "levelled": levelled,
            }
        )
    return found


def behind(found: list[dict[str, Any]]) -> list[str]:
    """Every system that ours is not ahead of as measured, with where: one line each, for people."""
    places: dict[str, list[str]] = {}
    for entry in found:
        if entry["ratio"] < 1:
            where = f"{entry['size'] // KIB} KiB {entry['op']} x{entry['clients']} {entry['ratio']:.2f}"
            places.setdefault(entry["against"], []).append(where)
    return [f"{system}: {', '.join(where)}" for system, where in sorted(places.items())]


def reaches(rows: list[dict[str, Any]], entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every bound that the store is held to, what was measured, and whether it is met."""
    found: list[dict[str, Any]] = []

    def add(what: str, measured: float, bound: float, *, at_least: bool) -> None:
        is_met = measured >= bound if at_least else measured <= bound
        found.append({"what": what, "measured": measured, "bound": bound, "is_met": is_met})

    for row in rows:
        if "of" not in row or row["op"] == "mixed":
            continue
        name = f"{row['system']} {row['op']} x{row['clients']} of {row['size'] // KIB} KiB"
        if row["system"] == OURS["dram"] and row["size"] >= 360 * KIB:
            copied = row["of"]["memcpy_xxh3"]["median"]
            add(f"{name}, of memcpy and xxh3-64", copied, COPY_BOUND, at_least=True)
        if row["system"] == OURS["ssd"] and row["size"] >= 2 * MIB and "raw_best" in row["of"]:
            add(f"{name}, of the raw disk", row["of"]["raw_best"]["median"], DISK_BOUND, at_least=True)
    looked = entries.get("lookups", {}).get("found", {})
    if "lookup_512" in looked:
        add("lookup of 512 keys, us", looked["lookup_512"]["p50_us"], LOOKUP_BOUND_US, at_least=False)
    for row in entries.get("host_latency", {}).get("found", ()):
        what = f"lookup and lease of {row['blocks']} from another process, of an echo"
        add(what, row["ratio_p50"], ECHO_BOUNDS[row["blocks"]], at_least=False)
    return found + growth(entries)


def growth(entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Start and memory of stores of many records, beside what they are held to."""
    found = []
    for count, (seconds, each) in opened(entries).items():
        if count == 1_000_000:
            found.append(
                {
                    "what": f"process start to the first lookup over {count} records, s",
                    "measured": seconds,
                    "bound": REPLAY_BOUND_S,
                    "is_met": seconds <= REPLAY_BOUND_S,
                }
            )
        if each is not None:
            found.append(
                {
                    "what": f"bytes of memory per record at {count}",
                    "measured": each,
                    "bound": RECORD_BOUND_BYTES,
                    "is_met": each < RECORD_BOUND_BYTES,
                }
            )
    return found


def opened(entries: dict[str, dict[str, Any]]) -> dict[int, tuple[float, float | None]]:
    """By how many records a store held: seconds to the first lookup, and bytes of memory per record."""
    made = {
        int(k.split("|")[1]): e["found"]["starts"]
        for k, e in sorted(entries.items())
        if k.startswith("records|") and "found" in e
    }
    base = made.pop(CHAIN_ONLY, None)

    def each(count: int) -> float | None:
        if base is None:
            return None
        grown = min(s["private_bytes"] for s in made[count]) - min(s["private_bytes"] for s in base)
        return grown / (count - CHAIN_ONLY)

    return {n: (statistics.median(s["seconds"] for s in made[n]), each(n)) for n in sorted(made)}


def many_blocks(entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """How stores of many blocks open, grow and are purged, each also as a line for people."""
    found: list[dict[str, Any]] = []
    for count, (seconds, each) in opened(entries).items():
        size = "" if each is None else f", {each:.0f} bytes of memory per block"
        said = f"{count} blocks: {seconds:.2f} s from process start to the first lookup{size}"
        found.append({"blocks": count, "start_s": seconds, "bytes_per_block": each, "said": said})
    for made in (e["found"] for k, e in entries.items() if k.startswith("purge|") and "found" in e):
        waits = {name: took["max_us"] / 1000 for name, took in made["other_meanwhile"].items()}
        said = (
            f"purge of {made['blocks']} blocks: {made['gone_from_disk_s']:.1f} s until nothing is left; longest wait "
            f"of another tenant {waits['lookup']:.1f} ms for a lookup, {waits['lease']:.1f} ms for a lease"
        )
        found.append(
            {"blocks": made["blocks"], "purge_s": made["gone_from_disk_s"], "waits_ms": waits, "said": said}
        )
    return found


def table(rows: list[dict[str, Any]], names: list[str]) -> Table:
    """Systems side by side, gigabytes per second."""
    shown = Table("blocks", *names, title="GB/s, median; in brackets the part of a memcpy beside it")
    by_unit: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in (row for row in rows if row["system"] in names):
        cell = "failed"
        if "bytes_per_s" in row:
            cell = f"{row['bytes_per_s']['median'] / 1e9:.2f} ({row['of']['memcpy']['median']:.2f})"
        by_unit.setdefault((row["size"], row["op"], row["clients"]), {})[row["system"]] = cell
    for (size, op, clients), cells in by_unit.items():
        label = f"{size // KIB} KiB {op} x{clients}"
        shown.add_row(label, *(cells.get(name, "-") for name in names))
    return shown
