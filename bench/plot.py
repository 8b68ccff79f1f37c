"""Figures of result files: python bench/plot.py bench/results/engine-quick.json [...].

Writes an SVG and a PNG beside each file. Needs matplotlib (extra "plots") and nothing else of ours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

_COLOURS = ("#3b6ea5", "#8fb3d9", "#d1495b", "#5c946e", "#a3c9a8", "#8d6a9f", "#c9a227")
_OURS = "workmem"
_SOURCES = ("cold", "vram", "dram", "ssd")
_WAYS = {"cold": "computed", "own": "vLLM's own\ncache", "dram": "memory tier", "ssd": "disk,\nall restarted"}
_LABELS = {"cold": "computed", "vram": "vram hit", "dram": "dram hit", "ssd": "ssd hit after a restart"}


def plot_engine(result: dict[str, Any]) -> plt.Figure:
    """Tokens per second of each system, one panel for prefill and one for decode; whiskers span the rounds."""
    names = list(result["systems"])
    figure, panels = plt.subplots(2, 1, figsize=(9, 7), layout="constrained")
    for panel, kind in zip(panels, ("prefill", "decode"), strict=True):
        rows = [row for row in result["rows"] if row["kind"] == kind]
        shapes = sorted({(row["prompt_tokens"], row["batch"]) for row in rows})
        width = 0.8 / max(len(names), 1)
        for position, name in enumerate(names):
            found = {
                (row["prompt_tokens"], row["batch"]): row["tokens_per_s"]
                for row in rows
                if row["system"] == name and "tokens_per_s" in row
            }
            places = [
                i + (position - (len(names) - 1) / 2) * width for i, s in enumerate(shapes) if s in found
            ]
            _bars(
                panel, places, [found[s] for s in shapes if s in found], width, name, _COLOURS[position % 6]
            )
        panel.set_xticks(range(len(shapes)), [f"{n} x {b}" for n, b in shapes])
        panel.set_xlim(-0.6, len(shapes) - 0.4)
        panel.set_ylabel(f"{kind}, tokens/s")
        panel.set_xlabel("prompt tokens x batch")
    panels[0].legend(ncols=3, fontsize="small", frameon=False)
    figure.suptitle(
        f"{result['machine']['cpu']}, {result['machine']['cores']} cores; a missing bar is a skipped unit"
    )
    return figure


def plot_restart(result: dict[str, Any]) -> plt.Figure:
    """Time to first token by source for each prompt length, logarithmic; ticks mark the reach."""
    rows = result["rows"]
    figure, panel = plt.subplots(figsize=(9, 4.5), layout="constrained")
    width = 0.2
    for position, source in enumerate(_SOURCES):
        offset = (position - 1.5) * width
        found = [(i + offset, row["ttft_s"][source]) for i, row in enumerate(rows) if source in row["ttft_s"]]
        label = _LABELS[source]
        _bars(
            panel,
            [place for place, _ in found],
            [value for _, value in found],
            width,
            label,
            _COLOURS[position],
        )
        for i, row in enumerate(rows):
            if source in row["reach"]:
                bound = row["reach"][source]["bound_s"]
                panel.plot([i + offset - width / 2, i + offset + width / 2], [bound, bound], color="black")
    panel.set_yscale("log")
    panel.set_ylabel("time to first token, s")
    panel.set_xticks(range(len(rows)), [f"{row['prompt_tokens']} tokens" for row in rows])
    figure.legend(ncols=4, fontsize="small", frameon=False, loc="outside lower center")
    figure.suptitle(
        f"{result['machine']['cpu']}, {result['machine']['cores']} cores; black lines are the reach"
    )
    return figure


def plot_store(result: dict[str, Any]) -> plt.Figure:
    """Rate of each store over the block size with one client; one row for memory, one for disk, operations side by side."""
    ops = ("get", "get64", "mixed", "put", "put64")
    figure, panels = plt.subplots(2, len(ops), figsize=(16, 7), layout="constrained", sharey="row")
    for line, medium in zip(panels, ("dram", "ssd"), strict=True):
        names = [name for name, about in result["systems"].items() if about["medium"] == medium]
        for panel, op in zip(line, ops, strict=True):
            for name, colour in zip(names, _COLOURS[: len(names)], strict=True):
                rows = [
                    row
                    for row in result["rows"]
                    if row["system"] == name and row["op"] == op and row["clients"] == 1 and "of" in row
                ]
                _rate_line(panel, rows, name, colour)
            panel.set_title(f"{op}, {medium}", fontsize="medium")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(sizes := sorted({row["size"] for row in result["rows"]}))
            panel.set_xticklabels([f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB" for n in sizes])
            panel.minorticks_off()
        line[0].set_ylabel("GB/s")
        line[-1].legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(
        f"{result['machine']['cpu']}, {result['machine']['cores']} cores; grey: memcpy by the same thread beside {_OURS}"
    )
    return figure


def plot_vllm_ttft(result: dict[str, Any]) -> plt.Figure:
    """Time to first token of each system, one panel per prompt length, logarithmic; whiskers span the pairs."""
    rows = result["rows"]
    lengths = sorted({row["prompt_tokens"] for row in rows})
    names = [name for name in result["systems"] if any(row["system"] == name for row in rows)]
    sources = list(_WAYS)
    figure, panels = plt.subplots(
        1, max(len(lengths), 1), figsize=(12, 4.8), layout="constrained", sharey="row", squeeze=False
    )
    for panel, n in zip(panels[0], lengths, strict=False):
        width = 0.8 / max(len(names), 1)
        for position, name in enumerate(names):
            found = {
                row["source"]: row["ttft_s"]
                for row in rows
                if row["prompt_tokens"] == n and row["system"] == name
            }
            offset = (position - (len(names) - 1) / 2) * width
            places = [i + offset for i, source in enumerate(sources) if source in found]
            values = [found[source] for source in sources if source in found]
            _bars(panel, places, values, width, name, _COLOURS[position % 6])
        panel.set_title(f"{n} tokens", fontsize="medium")
        panel.set_xticks(range(len(sources)), [_WAYS[source] for source in sources])
        panel.set_yscale("log")
    panels[0][0].set_ylabel("time to first token, s")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, ncols=len(names) or 1, fontsize="small", frameon=False, loc="outside lower center"
    )
    figure.suptitle(f"vLLM, {result['machine']['cpu']}, {result['machine']['cores']} cores")
    return figure


def plot_fleet(result: dict[str, Any]) -> plt.Figure:
    """By round: tokens that all agents' prompts cost to compute, and the median time to first token."""
    rows = result["rows"]
    names = [name for name in result["systems"] if any(row["arm"] == name for row in rows)]
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for name, colour in zip(names, _COLOURS[: len(names)], strict=True):
        found = sorted((row for row in rows if row["arm"] == name), key=lambda row: row["round"])
        rounds = [row["round"] + 1 for row in found]
        panels[0].plot(rounds, [row["computed"] for row in found], marker="o", color=colour, label=name)
        panels[1].plot(rounds, [row["ttft_s"]["p50"] for row in found], marker="o", color=colour, label=name)
    panels[0].set_ylabel("tokens computed, all agents")
    panels[1].set_ylabel("time to first token, median, s")
    panels[1].set_yscale("log")
    for panel in panels:
        panel.set_xlabel("round")
    panels[0].legend(fontsize="small", frameon=False)
    figure.suptitle(
        f"{result['config']['prompt_tokens']:,} prompt tokens, {result['machine']['cpu']}, "
        f"{result['machine']['cores']} cores"
    )
    return figure


def plot_agents(result: dict[str, Any]) -> plt.Figure:
    """By arm: input tokens a second, times to first token (median, and 95th percentile above it), tokens computed."""
    rows = {row["arm"]: row for row in result["rows"]}
    names = [name for name in result["systems"] if name in rows]
    places, colours = range(len(names)), _COLOURS[: len(names)]
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.5), layout="constrained")
    for place, name, colour in zip(places, names, colours, strict=True):
        row = rows[name]
        _bars(panels[0], [place], [row["input_tokens_per_s"]], 0.7, name, colour)
        for offset, of in ((-0.2, "ttft_first_s"), (0.2, "ttft_later_s")):
            panels[1].bar(place + offset, row[of]["p95"], 0.36, color=colour, alpha=0.45)
            panels[1].bar(place + offset, row[of]["p50"], 0.36, color=colour)
        new = row["computed"] - row["recomputed"]
        panels[2].bar(place, new, 0.7, color="#999999")
        panels[2].bar(place, row["recomputed"], 0.7, bottom=new, color=colour)
    panels[0].set_ylabel("input tokens/s")
    panels[1].set_ylabel("TTFT of first and later turns, s (p95 pale)")
    panels[1].set_yscale("log")
    panels[2].set_ylabel("tokens computed: new (grey), again")
    for panel in panels:
        panel.set_xticks([])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=6, fontsize="small", frameon=False, loc="outside lower center")
    figure.suptitle(
        f"{result['config']['mode']['size']['sessions']} sessions, {result['config']['prompt_tokens']:,} prompt tokens, "
        f"{result['machine']['cpu']}, {result['machine']['cores']} cores"
    )
    return figure


def plot_remote(result: dict[str, Any]) -> plt.Figure:
    """Rates of the pool beside Mooncake's best path; first tokens by where a context was; agents under pressure."""
    figure, panels = plt.subplots(1, 4, figsize=(16, 4.5), layout="constrained")
    for panel, op in zip(panels, ("put", "get"), strict=False):
        rows = [row for row in result["moves"] if row["op"] == op]
        names = [f"{row['batch'] >> 20} MiB\nof {row['block'] >> 10} KiB" for row in rows]
        for offset, field, label, colour in (
            (-0.2, "bytes_per_s", "workmem", _COLOURS[0]),
            (0.2, "best_bytes_per_s", "Mooncake's best path", _COLOURS[2]),
        ):
            _bars(
                panel,
                [at + offset for at in range(len(rows))],
                [row[field] for row in rows],
                0.38,
                label,
                colour,
            )
        panel.set_xticks(range(len(rows)), names, fontsize="x-small")
        panel.set_ylabel(f"{op}, bytes/s")
    panels[0].legend(fontsize="small", frameon=False)
    if times := result["contexts"].get("ttft_s"):
        _bars(panels[2], list(range(len(times))), list(times.values()), 0.7, "", _COLOURS[0])
        panels[2].set_xticks(range(len(times)), list(times))
        panels[2].set_yscale("log")
    panels[2].set_ylabel("TTFT of a context, s")
    rows = result["pressure"]
    panels[3].bar(range(len(rows)), [row["input_tokens_per_s"] for row in rows], color=_COLOURS[: len(rows)])
    panels[3].set_xticks(
        range(len(rows)), [row["arm"].replace(", ", ",\n") for row in rows], fontsize="small"
    )
    panels[3].set_ylabel("input tokens/s, working set 4 times vram")
    figure.suptitle(f"{result['machine']['cpu']}, {result['machine']['cores']} cores, TCP on one machine")
    return figure


def plot_disaggregation(result: dict[str, Any]) -> plt.Figure:
    """By arm: the time between a stream's tokens as a distribution, and to the first token of long prompts."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name, colour in zip(result["systems"], _COLOURS[::2], strict=False):
        found = [entry for entry in result["raw"] if entry["arm"] == name]
        for panel, field in zip(panels, ("gaps_s", "long_ttft_s"), strict=True):
            values = sorted(value for entry in found for value in entry[field])
            shares = [(at + 1) / len(values) for at in range(len(values))]
            panel.step(values, shares, where="post", color=colour, label=name)
    panels[0].axhline(0.99, color="#999999", linestyle=":", linewidth=1)
    for panel, label in zip(panels, ("time between tokens, s", "TTFT of long prompts, s"), strict=True):
        panel.set_xscale("log")
        panel.set_xlabel(label)
        panel.set_ylabel("share below")
    panels[0].legend(fontsize="small", frameon=False)
    figure.suptitle(f"two vLLM servers, {result['machine']['cpu']}, a core each")
    return figure


def plot_prompt(result: dict[str, Any]) -> plt.Figure:
    """Hit of the second request of each trap as it came and canonical, and what the gateway adds, as distributions."""
    figure, panels = plt.subplots(
        1, 2, figsize=(12, 5), layout="constrained", gridspec_kw={"width_ratios": [3, 2]}
    )
    rows = [row for row in result["traps"]["rows"] if row["hits"]]
    places = range(len(rows))
    for offset, name, colour in ((0.2, "raw", _COLOURS[5]), (-0.2, "canonical", _COLOURS[0])):
        shares = [row["hits"][name]["share"] for row in rows]
        panels[0].barh([at + offset for at in places], shares, 0.38, label=name, color=colour)
    panels[0].set_yticks(places, [row["trap"] for row in rows], fontsize="small")
    panels[0].invert_yaxis()
    panels[0].set_xlabel("share of the second request that an engine finds")
    panels[0].legend(fontsize="small", frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    pairs = next((entry["pairs"] for entry in result["raw"] if entry["unit"] == "latency"), [])
    arms = list(pairs[0]["ms"])[1:] if pairs else []
    for arm, colour in zip(arms, _COLOURS[::2], strict=False):
        added = sorted(pair["ms"][arm] - pair["ms"]["direct"] for pair in pairs)
        panels[1].step(added, [(at + 1) / len(added) for at in range(len(added))], color=colour, label=arm)
    panels[1].set_xlabel("added by the gateway, ms, 75 kB")
    panels[1].set_ylabel("share below")
    panels[1].legend(fontsize="small", frameon=False)
    figure.suptitle(f"{result['machine']['cpu']}, {result['machine']['cores']} cores")
    return figure


def _rate_line(panel: Any, rows: list[dict[str, Any]], name: str, colour: str) -> None:
    """One store; beside ours, the copies that alternated with it."""
    sizes = [row["size"] for row in rows]
    rates = [row["bytes_per_s"]["median"] / 1e9 for row in rows]
    is_ours = name.startswith(_OURS)
    panel.plot(sizes, rates, marker="o", color=colour, label=name, linewidth=2.2 if is_ours else 1.2)
    if name in {f"{_OURS} dram", f"{_OURS} ssd"}:
        copied = [rate / row["of"]["memcpy"]["median"] for rate, row in zip(rates, rows, strict=True)]
        panel.plot(sizes, copied, color="#999999", linestyle=":", label="memcpy")


def _bars(
    panel: Any, places: list[float], values: list[dict[str, float]], width: float, label: str, colour: str
) -> None:
    medians = [value["median"] for value in values]
    below = [value["median"] - value["min"] for value in values]
    above = [value["max"] - value["median"] for value in values]
    errors = {"elinewidth": 1, "ecolor": "#444444"}
    panel.bar(places, medians, width, yerr=(below, above), error_kw=errors, label=label, color=colour)


_PLOTS: dict[str, Callable[[dict[str, Any]], plt.Figure]] = {
    "engine": plot_engine,
    "restart": plot_restart,
    "store": plot_store,
    "vllm-ttft": plot_vllm_ttft,
    "fleet": plot_fleet,
    "agents": plot_agents,
    "remote": plot_remote,
    "disaggregation": plot_disaggregation,
    "prompt": plot_prompt,
}


def main() -> None:
    # Without this two runs over the same numbers differ in the SVG's ids and date.
    mpl.rcParams["svg.hashsalt"] = "workmem"
    for name in sys.argv[1:]:
        path = Path(name)
        result = json.loads(path.read_text())
        figure = _PLOTS[result["bench"]](result)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=120)
        plt.close(figure)
        print(f"{path.with_suffix('.svg')}  {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
