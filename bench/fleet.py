r"""A fleet of agents, round after round, with and without us: tokens computed and time to first token.

    python bench/fleet.py --quick --model MODEL --vllm-python VENV/bin/python

Every agent's context grows with each round: its own answer, a tool's result, a message that another agent sent. In a
full run 10 agents take 20 rounds over 1,000,000 prompt tokens. vLLM runs alone, with its prefix cache, and with our
connector; the embedded engine with reuse off, and over a store. Each engine's own KV pool is the same with and
without us, a quarter of what the last contexts hold together.

All of them take a round before any takes the next, in reverse order every second one, so that a slow minute slows all.
A round that is done is kept; a run that goes on sends the round before once more, unmeasured, to fresh engines.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from fleet_load import Load, Size, load_of
from harness import (
    RESULTS,
    Budget,
    Journal,
    end_on_sigterm,
    end_run,
    environment,
    folder_of_run,
    in_turns,
    mode_of,
    parser_of,
    write_result,
)
from restart import layout_of
from rich.console import Console
from rich.table import Table
from systems import System, Worker, WorkerFailed
from vllm_report import paired
from vllm_systems import SOURCE, Place, add_dtype, alone, new_tag, ours, sweep

MAX_TOKENS = 8
IN_FLIGHT = 2
POOL_SHARE = 0.25
POOL_LEAST = 2048
"""Tokens that an engine wants room for whatever the prompts."""
BLOCK_TOKENS = 128
"""Of vLLM on a CPU."""
DRAM, SSD = "1GiB", "16GiB"
START_S, CLOSE_S = 300.0, 120.0
WITHOUT = {"vLLM with workmem": "vLLM", "embedded with workmem": "embedded, reuse off"}
"""What each is compared with."""


class Mode(NamedTuple):
    """What fits into which time."""

    name: str
    size: Size
    budget_s: float


QUICK = Mode("quick", Size(10, 8, 400, 1100), 560.0)
FULL = Mode("full", Size(10, 20, 2400, 7602), 3400.0)
SMOKE = Mode("smoke", Size(3, 3, 150, 350), 3000.0)


class Arm(NamedTuple):
    """One engine, with or without us; started anew in each run."""

    name: str
    start: Callable[[Place], System]


class Bench:
    """All rounds over all arms."""

    def __init__(
        self, mode: Mode, arms: list[Arm], load: Load, folder: Path, journal: Journal, console: Console
    ) -> None:
        self._mode = mode
        self._arms = arms
        self._load = load
        self._folder = folder
        self._journal = journal
        self._console = console
        self._budget = Budget(mode.budget_s)
        self._workers: dict[str, Worker] = {}
        self._tags: list[str] = []
        self._slowest_s = 0.0
        self.absent: dict[str, str] = {}
        self.skipped: list[str] = []

    def run(self) -> None:
        """All rounds that the budget holds; nothing is left running."""
        left = [number for number in range(self._mode.size.rounds) if self._missing(number)]
        if not left:
            return
        try:
            for arm in self._arms:
                self._start(arm)
            if left[0]:
                self._console.log(f"round {left[0]} once more, unmeasured")
                self._round(left[0] - 1, is_kept=False)
            for number in left:
                if self._budget.left_s < 1.2 * self._slowest_s:
                    self.skipped.append(f"no time left for round {number + 1} and later ones")
                    break
                self._console.log(f"round {number + 1} ({self._budget.left_s:.0f} s left)")
                self._round(number, is_kept=True)
        finally:
            for name in list(self._workers):
                self._end(name)
            for tag in self._tags:
                sweep(tag)
                shutil.rmtree(Path(tempfile.gettempdir()) / tag, ignore_errors=True)

    def _missing(self, number: int) -> bool:
        return any(_unit(arm.name, number) not in self._journal.done for arm in self._arms)

    def _round(self, number: int, *, is_kept: bool) -> None:
        begin = time.monotonic()
        prompts = self._load.prompts(number)
        for name in in_turns(list(self._workers), number):
            if not is_kept or _unit(name, number) not in self._journal.done:
                self._take(name, number, prompts, is_kept=is_kept)
        self._slowest_s = max(self._slowest_s, time.monotonic() - begin)

    def _take(self, name: str, number: int, prompts: list[list[int]], *, is_kept: bool) -> None:
        """One round of one arm."""
        worker = self._workers[name]
        try:
            worker.resume()
            begin = time.perf_counter()
            answers = worker.ask(
                3 * self._mode.budget_s,
                do="fleet",
                prompts=prompts,
                max_tokens=MAX_TOKENS,
                in_flight=IN_FLIGHT,
            )["answers"]
            wall_s = time.perf_counter() - begin
            worker.ask(CLOSE_S, do="settle")
            worker.pause()
        except WorkerFailed as error:
            self.absent[name] = f"ended in round {number + 1}: {error}"
            self._console.log(f"{name} {self.absent[name]}")
            self._end(name)
            return
        if is_kept:
            counted = sum(map(len, prompts))
            self._journal.record(
                _unit(name, number),
                arm=name,
                round=number,
                wall_s=wall_s,
                prompt_tokens=counted,
                computed=counted - sum(answer["cached"] for answer in answers),
                sources=_added(answers),
                ttft_s=[answer["ttft_s"] for answer in answers],
                token_ids=[answer["token_ids"] for answer in answers],
            )

    def _start(self, arm: Arm) -> None:
        self._console.log(f"starting {arm.name}")
        folder = self._folder / arm.name.replace(" ", "-").replace(",", "")
        folder.mkdir(parents=True, exist_ok=True)
        tag = new_tag()
        self._tags.append(tag)
        sockets = Path(tempfile.gettempdir()) / tag
        sockets.mkdir(mode=0o700)
        try:
            worker = Worker(
                arm.start(Place(folder, sockets, tag)), self._folder / f"{folder.name}.log", START_S
            )
            self._workers[arm.name] = worker
            worker.ask(START_S, do="fleet", prompts=[WARM_UP], max_tokens=MAX_TOKENS, in_flight=1)
        except (WorkerFailed, OSError) as error:
            self.absent[arm.name] = f"did not start: {error}"
            self._console.log(f"{arm.name} {self.absent[arm.name]}")
            self._end(arm.name)
            return
        self._journal.keep_versions(arm.name, worker.versions)
        worker.pause()

    def _end(self, name: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        try:
            worker.resume()
            worker.ask(CLOSE_S, do="close")
        except (WorkerFailed, OSError) as error:
            self._console.log(f"{name} did not end by itself: {error}")
        worker.close()


WARM_UP = list(range(1000, 1064))
"""Token ids that no text of the load begins with; the first request pays for what happens once."""


def _unit(name: str, number: int) -> str:
    """Key in the journal."""
    return f"{name}|{number}"


def _added(answers: list[dict[str, Any]]) -> dict[str, int]:
    """Tokens by source of all answers that say it."""
    found: dict[str, int] = {}
    for answer in answers:
        for source, tokens in (answer["sources"] or {}).items():
            found[source] = found.get(source, 0) + tokens
    return found


def summarise(entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per arm and round."""
    rows = []
    for entry in sorted(entries.values(), key=lambda entry: (entry["round"], entry["arm"])):
        row = {
            name: entry[name] for name in ("arm", "round", "prompt_tokens", "computed", "sources", "wall_s")
        }
        rows.append(row | {"ttft_s": percentiles(entry["ttft_s"])})
    return rows


def percentiles(values: list[float]) -> dict[str, float]:
    """Of a sample, interpolated within it."""
    top = quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    return {"p50": median(values), "p95": top, "min": min(values), "max": max(values)}


def totals(entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per arm, over the rounds that all arms have taken; later rounds are those after the first."""
    by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for entry in entries.values():
        by_arm.setdefault(entry["arm"], {})[entry["round"]] = entry
    if not by_arm:
        return []
    common = sorted(set.intersection(*(set(rounds) for rounds in by_arm.values())))
    rows = []
    for arm, rounds in by_arm.items():
        found = [rounds[number] for number in common]
        if not found:
            continue
        row: dict[str, Any] = {"arm": arm, "rounds": len(common)}
        for name in ("prompt_tokens", "computed", "wall_s"):
            row[name] = sum(entry[name] for entry in found)
        later = [ttft for entry in found if entry["round"] > 0 for ttft in entry["ttft_s"]]
        row |= {"ttft_s_later": percentiles(later)} if later else {}
        other = by_arm.get(WITHOUT.get(arm, ""))
        if other is not None:
            row |= _beside(found, [other[number] for number in common])
        rows.append(row)
    return rows


def _beside(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """With us over without, request by request where that can be told."""
    pairs = [
        pair
        for a, b in zip(mine, theirs, strict=True)
        if a["round"] > 0
        for pair in zip(a["ttft_s"], b["ttft_s"], strict=True)
    ]
    same = [
        x == y
        for a, b in zip(mine, theirs, strict=True)
        for x, y in zip(a["token_ids"], b["token_ids"], strict=True)
    ]

    def over(name: str) -> float:
        return sum(entry[name] for entry in mine) / max(1e-9, sum(entry[name] for entry in theirs))

    found = {"computed_of_without": over("computed"), "wall_of_without": over("wall_s")}
    found |= {"ttft_of_without_later": paired(pairs)} if pairs else {}
    return found | {"same_answers": sum(same), "answers": len(same)}


def arms_of(arguments: argparse.Namespace, size: Size, cores: list[int]) -> list[Arm]:
    """VLLM's where its Python was given, and the embedded engine's."""
    context = size.last + 2 * MAX_TOKENS
    pool = max(int(POOL_SHARE * size.working_set), IN_FLIGHT * (context + BLOCK_TOKENS), POOL_LEAST)
    shared = {
        "model": str(arguments.model),
        "threads": len(cores),
        "max_context": context,
        "source": str(SOURCE),
    }
    found = []
    if arguments.vllm_python:
        options = shared | {
            "dtype": arguments.dtype,
            "cores": ",".join(map(str, cores)),
            "nudge": WARM_UP[:7],
        }
        options["blocks"] = -(-pool // BLOCK_TOKENS) + 1

        def vllm(name: str, start: Callable[[dict[str, Any], Place], dict[str, Any]]) -> Arm:
            return Arm(
                name,
                lambda place: System(name, arguments.vllm_python, "vllm_cached.py", start(options, place)),
            )

        found += [vllm("vLLM", alone), vllm("vLLM with workmem", lambda o, place: ours(o, place, DRAM))]
    vram = pool * layout_of(arguments.model).token_bytes
    options_of_ours = shared | {"dtype": "bf16", "vram": vram, "cache": str(arguments.cache)}
    options_of_ours |= {"dram": DRAM, "ssd_bytes": SSD}

    def embedded(name: str, *, reuse: bool) -> Arm:
        def start(place: Place) -> System:
            options = options_of_ours | {"reuse": reuse, "ssd": str(place.folder / "ssd")}
            return System(name, Path(sys.executable), "fleet_embedded.py", options)

        return Arm(name, start)

    found += [
        embedded("embedded, reuse off", reuse=False),
        embedded("embedded with workmem", reuse=True),
    ]
    return [arm for arm in found if not arguments.only or arm.name in arguments.only]


def table(rows: list[dict[str, Any]], summed: list[dict[str, Any]]) -> tuple[Table, Table]:
    """For people: by round, and all together."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    shown = Table("round", *arms, title="tokens computed, and median TTFT in ms, by round")
    for number in sorted({row["round"] for row in rows}):
        cells = {row["arm"]: row for row in rows if row["round"] == number}
        line = [
            f"{cells[arm]['computed']:,}  {cells[arm]['ttft_s']['p50'] * 1e3:.0f}" if arm in cells else "-"
            for arm in arms
        ]
        shown.add_row(str(number + 1), *line)
    whole = Table("", "prompt tokens", "computed", "wall s", "TTFT p50, later rounds", "p95", "of without")
    for row in summed:
        later = row.get("ttft_s_later")
        times = [f"{later[name] * 1e3:.0f} ms" for name in ("p50", "p95")] if later else ["-", "-"]
        ratio = row.get("ttft_of_without_later")
        said = f"{row['computed_of_without']:.2f} computed" if "computed_of_without" in row else ""
        said += f", {ratio['ratio']:.2f} TTFT" if ratio else ""
        counted = (f"{row['prompt_tokens']:,}", f"{row['computed']:,}", f"{row['wall_s']:.0f}")
        whole.add_row(row["arm"], *counted, *times, said)
    return shown, whole


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__ or "", "fleet", quick=QUICK, full=FULL, smoke=SMOKE)
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vLLM for CPU")
    add_dtype(parser, environment()["cpu_flags"])
    parser.add_argument("--folder", type=Path, help="disk the store lives on; default: the temporary one")
    parser.add_argument(
        "--cache", type=Path, default=Path("~/.cache/workmem").expanduser(), help="compiled kernels"
    )
    parser.add_argument("--only", action="append", help="only this engine; may be repeated")
    return parser.parse_args(words)


def main() -> None:
    arguments = parsed()
    mode: Mode = mode_of(arguments)
    console = Console()
    out = arguments.out or RESULTS / f"fleet-{mode.name}.json"
    end_on_sigterm()
    machine = environment()
    config = {
        "mode": arguments.mode._asdict() | {"size": mode.size._asdict()},
        "seed": arguments.seed,
        "model": arguments.model.name,
        "vllm_dtype": arguments.dtype,
        "texts": arguments.workloads.name if arguments.workloads else "of the package",
        "in_flight": IN_FLIGHT,
        "answer_tokens": MAX_TOKENS,
        "pool_share": POOL_SHARE,
        "prompt_tokens": mode.size.total,
        "only": arguments.only,
    }
    journal = Journal(out.with_suffix(".partial.jsonl"), config | {"commit": machine["commit"]})
    folder = folder_of_run(out, arguments.folder, is_new=not journal.done)
    load = load_of(mode.size, arguments.model, arguments.workloads, arguments.seed)
    arms = arms_of(arguments, mode.size, sorted(os.sched_getaffinity(0)))
    bench = Bench(mode, arms, load, folder, journal, console)
    bench.run()
    rows, summed = summarise(journal.done), totals(journal.done)
    body = {
        "bench": "fleet",
        "machine": machine | {"load_1m_end": os.getloadavg()[0]},
        "config": config,
        "systems": [arm.name for arm in arms],
        "versions": journal.versions,
        "absent": bench.absent,
        "rows": rows,
        "totals": summed,
        "skipped": bench.skipped,
        "raw": list(journal.done.values()),
    }
    write_result(out, body)
    for shown in table(rows, summed):
        console.print(shown)
    console.print(end_run(journal, out, folder, bench.skipped))


if __name__ == "__main__":
    main()
