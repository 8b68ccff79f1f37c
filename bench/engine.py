"""Prefill and decode speed of the embedded engine beside others, on the same prompts, threads and minute.

    python bench/engine.py --quick --model MODEL --vllm-python VENV/bin/python

Every unit is one run of one system at one shape. Its prefill speed counts the prompts' tokens until the last
prompt has its first token; its decode speed the tokens from that moment to the one when the first prompt ends.
Rounds repeat all units, with the systems in reverse order every second time. Prefix caching is off everywhere.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from harness import (
    RESULTS,
    Budget,
    Journal,
    Texts,
    environment,
    in_turns,
    mode_of,
    parser_of,
    spread,
    write_result,
)
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from systems import System, Worker, WorkerFailed

OURS = "workmem bf16"
DECODE_TOKENS = 32
PIECE_TOKENS = 224
"""Prefill pieces of chunking schedulers: prompts finish one after the other, so decode runs are longer."""
WARM_UP_TOKENS = 256
START_S = 420.0
"""A system that compiles its model takes minutes where others use the cores too."""


class Mode(NamedTuple):
    """What fits into which time."""

    name: str
    prompt_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    rounds: int
    budget_s: float
    """Of measuring; starting the systems comes on top, half a minute each."""
    unit_s: float
    """A unit that would take longer is left out, and said."""


QUICK = Mode("quick", (1024, 4096), (1, 4), 2, 480.0, 100.0)
FULL = Mode("full", (1024, 4096), (1, 4, 16), 3, 3300.0, 2400.0)
SMOKE = Mode("smoke", (64, 128), (1, 2), 2, 120.0, 30.0)


class Unit(NamedTuple):
    """One measurement: how long the prompts are, how many at once."""

    prompt_tokens: int
    batch: int

    @property
    def max_tokens(self) -> int:
        """Tokens each prompt generates: more where prompts get their first tokens one after the other."""
        pieces = -(-self.prompt_tokens * self.batch // PIECE_TOKENS)
        return DECODE_TOKENS + 1 + (pieces if self.batch > 1 else 0)

    def name(self, system: str, round_number: int) -> str:
        """Key in the journal."""
        return f"{system}|{self.prompt_tokens}|{self.batch}|{round_number}"


class Speed(NamedTuple):
    """Tokens per second of one run."""

    prefill: float
    decode: float


def speed(unit: Unit, events: list[tuple[float, int, int]]) -> Speed:
    """What the events of a run say. Raises WorkerFailed where they cannot tell."""
    firsts: dict[int, float] = {}
    lasts: dict[int, float] = {}
    for seconds, index, _ in events:
        firsts.setdefault(index, seconds)
        lasts[index] = seconds
    if len(firsts) != unit.batch:
        raise WorkerFailed(f"{len(firsts)} of {unit.batch} prompts got a token")
    begin, end = max(firsts.values()), min(lasts.values())
    if end <= begin:
        raise WorkerFailed("the first prompt ended before the last one began to decode")
    decoded = sum(tokens for seconds, _, tokens in events if begin < seconds <= end)
    return Speed(unit.batch * unit.prompt_tokens / begin, decoded / (end - begin))


class Pace:
    """What a system has shown so far; foretells what a unit will take."""

    def __init__(self) -> None:
        self._slowest: Speed | None = None

    def learn(self, shown: Speed) -> None:
        """Keep the slowest rates: longer prompts are never faster."""
        before = self._slowest or shown
        self._slowest = Speed(min(shown.prefill, before.prefill), min(shown.decode, before.decode))

    def forecast_s(self, unit: Unit) -> float:
        """Seconds, with room for the longer context. Only after the warm-up."""
        assert self._slowest is not None
        seconds = 1.2 * unit.batch * unit.prompt_tokens / self._slowest.prefill
        return seconds + (unit.max_tokens - 1) / self._slowest.decode * unit.batch**0.5


class Bench:
    """All systems, all units, all rounds, within the budget."""

    def __init__(
        self, mode: Mode, systems: list[System], texts: Texts, journal: Journal, console: Console
    ) -> None:
        self._mode = mode
        self._systems = {system.name: system for system in systems}
        self._journal = journal
        self._console = console
        self._budget = Budget(mode.budget_s)
        self._workers: dict[str, Worker] = {}
        self._paces: dict[str, Pace] = {}
        self.absent: dict[str, str] = {}
        # Cheap ones first: should time run out, what is missing are the few long ones.
        self._units = sorted(
            (Unit(n, b) for n in mode.prompt_tokens for b in mode.batches),
            key=lambda unit: unit.prompt_tokens * unit.batch,
        )
        self._prompts = {
            unit: [texts.prompt(unit.prompt_tokens) for _ in range(unit.batch)] for unit in self._units
        }
        self._warm_up = texts.prompt(WARM_UP_TOKENS)

    def run(self) -> None:
        """Measure everything that fits; leave the workers closed whatever happens."""
        columns = (TextColumn("{task.description}"), TimeElapsedColumn())
        try:
            with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as progress:
                task = progress.add_task("starting")
                with tempfile.TemporaryDirectory(prefix="bench-engine-") as logs:
                    self._start_all(Path(logs))
                    self._budget = Budget(self._mode.budget_s)
                    for round_number in range(self._mode.rounds):
                        for unit in self._units:
                            for name in in_turns(list(self._workers), round_number):
                                left = f"{self._budget.left_s:.0f} s left"
                                progress.update(task, description=f"{unit.name(name, round_number)} ({left})")
                                self._measure(name, unit, round_number)
        finally:
            for worker in self._workers.values():
                worker.close()

    def _start_all(self, logs: Path) -> None:
        for name, system in self._systems.items():
            self._console.log(f"starting {name}")
            try:
                worker = Worker(system, logs / f"{system.script}-{len(self._workers)}.log", START_S)
            except (WorkerFailed, OSError) as error:
                self.absent[name] = str(error)
                self._console.log(f"{name} is absent: {error}")
                continue
            self._workers[name] = worker
            self._journal.keep_versions(name, worker.versions)
            self._warm(name, worker)
            worker.pause()

    def _warm(self, name: str, worker: Worker) -> None:
        """Twice the same: the first pays for kernels and buffers, the second sets the pace."""
        pace = self._paces[name] = Pace()
        for _ in range(2):
            events = worker.run([self._warm_up], 9, 120.0)
        pace.learn(speed(Unit(WARM_UP_TOKENS, 1), events))

    def _measure(self, name: str, unit: Unit, round_number: int) -> None:
        key = unit.name(name, round_number)
        pace = self._paces[name]
        done = self._journal.done.get(key, {})
        if "prefill" in done:
            pace.learn(Speed(done["prefill"], done["decode"]))
            return
        if done.get("skipped", "").startswith("would take"):
            return
        fields = {"system": name, **unit._asdict(), "round": round_number}
        forecast = pace.forecast_s(unit)
        if forecast > self._mode.unit_s:
            reason = f"would take about {forecast:.0f} s, the limit of a unit is {self._mode.unit_s:.0f} s"
        elif forecast > self._budget.left_s:
            reason = f"no time left: about {forecast:.0f} s needed, {self._budget.left_s:.0f} s left"
        else:
            self._measure_now(name, unit, key, fields)
            return
        self._journal.record(key, **fields, skipped=reason)

    def _measure_now(self, name: str, unit: Unit, key: str, fields: dict[str, Any]) -> None:
        worker = self._workers[name]
        worker.resume()
        try:
            events = worker.run(self._prompts[unit], unit.max_tokens, 3 * self._mode.unit_s)
            shown = speed(unit, events)
        except WorkerFailed as error:
            self._journal.record(key, **fields, skipped=f"failed: {error}")
            self._console.log(f"{key} failed: {error}")
            worker.close()
            # Whatever it still computes would disturb the others.
            del self._workers[name]
            self.absent[name] = f"ended in {key}: {error}"
            return
        worker.pause()
        self._paces[name].learn(shown)
        self._journal.record(key, **fields, **shown._asdict())


def summarise(entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per kind of speed, shape and system: median and spread over the rounds, or the reasons for none."""
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in entries.values():
        for kind in Speed._fields:
            key = (kind, entry["prompt_tokens"], entry["batch"], entry["system"])
            grouped.setdefault(key, []).append(entry)
    rows = []
    for (kind, prompt_tokens, batch, system), found in sorted(grouped.items()):
        row = {"kind": kind, "prompt_tokens": prompt_tokens, "batch": batch, "system": system}
        values = [entry[kind] for entry in found if kind in entry]
        if values:
            row |= {"tokens_per_s": spread(values)}
        row |= {"skipped": sorted({entry["skipped"] for entry in found if "skipped" in entry})}
        rows.append(row)
    return rows


def ratios(entries: dict[str, dict[str, Any]], ours: str) -> list[dict[str, Any]]:
    """Ours over each other system, paired within the round and then summarised."""
    rates: dict[tuple[Any, ...], float] = {
        (kind, e["prompt_tokens"], e["batch"], e["round"], e["system"]): e[kind]
        for e in entries.values()
        for kind in Speed._fields
        if kind in e
    }
    paired: dict[tuple[Any, ...], list[float]] = {}
    for (*shape, round_number, system), value in rates.items():
        mine = rates.get((*shape, round_number, ours))
        if system != ours and mine is not None:
            paired.setdefault((*shape, system), []).append(mine / value)
    return [
        {"kind": kind, "prompt_tokens": n, "batch": b, "against": system, "ratio": spread(values)}
        for (kind, n, b, system), values in sorted(paired.items())
    ]


def table(rows: list[dict[str, Any]], names: list[str]) -> Table:
    """Systems side by side."""
    shown = Table("unit", *names, title="tokens per second, median of the rounds")
    by_unit: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        cell = f"{row['tokens_per_s']['median']:.1f}" if "tokens_per_s" in row else "skipped"
        by_unit.setdefault((row["kind"], row["prompt_tokens"], row["batch"]), {})[row["system"]] = cell
    for (kind, prompt_tokens, batch), cells in by_unit.items():
        shown.add_row(f"{kind} {prompt_tokens} x {batch}", *(cells.get(name, "-") for name in names))
    return shown


def systems_of(arguments: argparse.Namespace, cores: list[int]) -> list[System]:
    """Those whose Python was given; the peers first."""
    model, threads = str(arguments.model), len(cores)
    shared = {"model": model, "threads": threads, "max_context": 8192, "cores": f"{cores[0]}-{cores[-1]}"}
    systems = []
    if arguments.vllm_python:
        systems += [
            System(
                f"vLLM {dtype}",
                arguments.vllm_python,
                "vllm_cpu.py",
                shared | {"dtype": dtype, "compile": not arguments.vllm_eager},
            )
            for dtype in ("bf16", "fp32")
        ]
    ours = shared | {"dtype": "bf16", "vram": "2GiB", "cache": str(arguments.cache)}
    systems.append(System(OURS, Path(sys.executable), "workmem_embedded.py", ours))
    for dtype in ("bf16", "fp32"):
        options = shared | {"dtype": dtype}
        systems.append(
            System(f"transformers {dtype}", Path(sys.executable), "plain_transformers.py", options)
        )
    if arguments.llama_python and arguments.gguf:
        options = shared | {"model": str(arguments.gguf)}
        systems.append(
            System(
                f"llama.cpp {_quantisation(arguments.gguf)}",
                arguments.llama_python,
                "llama_cpp_cpu.py",
                options,
            )
        )
    return [system for system in systems if not arguments.only or system.name in arguments.only]


def _quantisation(gguf: Path) -> str:
    return gguf.stem.rpartition(".")[2] or gguf.stem


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, "engine", quick=QUICK, full=FULL, smoke=SMOKE)
    parser.add_argument(
        "--vllm-eager", action="store_true", help="vLLM without its compiler: starts in 25 s, not 90"
    )
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vLLM for CPU")
    parser.add_argument("--llama-python", type=Path, help="Python of an environment with llama-cpp-python")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument(
        "--cache", type=Path, default=Path("~/.cache/workmem").expanduser(), help="compiled kernels"
    )
    parser.add_argument(
        "--only", action="append", help="measure only the system of this name; may be repeated"
    )
    return parser.parse_args(words)


def main() -> None:
    arguments = parsed()
    mode: Mode = mode_of(arguments)
    console = Console()
    out = arguments.out or RESULTS / f"engine-{mode.name}.json"
    cores = sorted(os.sched_getaffinity(0))
    systems = systems_of(arguments, cores)
    config = {
        "mode": arguments.mode._asdict(),
        "seed": arguments.seed,
        "model": arguments.model.name,
        "decode_tokens": DECODE_TOKENS,
    }
    machine = environment()
    journal = Journal(out.with_suffix(".partial.jsonl"), config | {"commit": machine["commit"]})
    bench = Bench(
        mode, systems, Texts(arguments.model, arguments.workloads, arguments.seed), journal, console
    )
    bench.run()
    rows = summarise(journal.done)
    body = {
        "bench": "engine",
        "machine": machine | {"load_1m_end": os.getloadavg()[0]},
        "config": config,
        "systems": {
            system.name: {
                k: v for k, v in system.options.items() if k in {"dtype", "threads", "vram", "compile"}
            }
            for system in systems
        },
        "versions": journal.versions,
        "absent": bench.absent,
        "rows": rows,
        "ratios": ratios(journal.done, OURS),
        "raw": list(journal.done.values()),
    }
    write_result(out, body)
    if not any("no time left" in str(row["skipped"]) for row in rows):
        journal.close()
    console.print(table(rows, [system.name for system in systems]))
    console.print(f"written to {out}; run the same command again to fill what time left out")


if __name__ == "__main__":
    main()
