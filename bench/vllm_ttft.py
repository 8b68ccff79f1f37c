r"""Time to first token on vLLM: computed, or from its own prefix cache, our dram, our ssd, or a peer's tiers.

    python bench/vllm_ttft.py --quick --model MODEL --vllm-python VENV/bin/python \
        --lmcache-python VENV/bin/python --mooncake-python VENV/bin/python

Each system is vLLM in a process of its own (CPU, in process, eager) with the servers its connector needs beside it.
Every prompt goes through all of them, cell by cell, in reverse order every second pair: cold; again, a hit in vLLM's
own cache; again after that was emptied, a hit in the memory tier. When all pairs are through, engines and servers end,
the page cache lets go of their files, and after a new start each prompt is sent once more: a hit on the disk.

A sample that did not come whole from where it should is listed as impure and not counted. Ratios are of samples of the
same prompt; their upper bound is one-sided, 95%, by a paired t test on the logarithms. A system that cannot run is
listed as absent, with its command and its error.

A run that is ended early, or had too little time, goes on when the same command runs again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from harness import (
    RESULTS,
    Budget,
    Journal,
    Texts,
    end_on_sigterm,
    end_run,
    environment,
    folder_of_run,
    in_turns,
    mode_of,
    parser_of,
    write_result,
)
from rich.console import Console
from systems import Worker, WorkerFailed
from vllm_report import Sample, differing, ratios, summarise, table
from vllm_systems import (
    DRAM_GIB,
    SOURCE,
    Kind,
    Place,
    add_dtype,
    add_pythons,
    drop_page_cache,
    kinds,
    new_tag,
    sweep,
    system_of,
)

BEYOND_TOKENS = 7
"""Behind whole blocks and whole chunks of every system, so that all of them compute the same rest of a prompt."""
COLD_TOKENS, HIT_TOKENS = 25, 8
START_S, ANSWER_S, CLOSE_S = 300.0, 300.0, 120.0
TRIES = 5
"""Saving runs behind the answers: a hit in the memory tier is waited for."""
IDLE_MAX_S = 3.0
WARM_UP_TOKENS = 300


class Mode(NamedTuple):
    """What fits into which time."""

    name: str
    prompt_tokens: tuple[int, ...]
    pairs: int
    budget_s: float


SIZES = (1024 + BEYOND_TOKENS, 4096 + BEYOND_TOKENS)
QUICK = Mode("quick", SIZES, 5, 560.0)
FULL = Mode("full", SIZES, 24, 3400.0)
SMOKE = Mode("smoke", (512 + BEYOND_TOKENS,), 1, 3000.0)


class OutOfTime(Exception):
    """The budget would not hold for what comes next."""


class Bench:
    """All pairs over engines that run side by side, then all of them again over new ones."""

    def __init__(
        self,
        mode: Mode,
        wanted: list[Kind],
        shared: dict[str, Any],
        texts: Texts,
        folder: Path,
        journal: Journal,
        console: Console,
    ) -> None:
        self._mode = mode
        self._kinds = {kind.name: kind for kind in wanted if not kind.why_absent}
        self._folder = folder
        self._journal = journal
        self._console = console
        self._budget = Budget(mode.budget_s)
        self._workers: dict[str, Worker] = {}
        self._tags: dict[str, str] = {}
        self._prompts = {(n, k): texts.prompt(n) for k in range(mode.pairs) for n in mode.prompt_tokens}
        self._warm_up = texts.prompt(WARM_UP_TOKENS)
        self._shared = shared | {"nudge": texts.prompt(BEYOND_TOKENS)}
        self._asked: set[tuple[str, int, int]] = set()
        """Prompts that this process's engines have in their caches."""
        self._block_tokens: dict[str, int] = {}
        self._start_s = self._pair_s = 0.0
        self.absent: dict[str, dict[str, Any]] = {
            kind.name: {"error": kind.why_absent} for kind in wanted if kind.why_absent
        }
        self.skipped: list[str] = []

    @property
    def samples(self) -> list[Sample]:
        """All so far, those of earlier runs too."""
        return [
            Sample(*(entry[field] for field in Sample._fields))
            for entry in self._journal.done.values()
            if "ttft_s" in entry
        ]

    def run(self) -> None:
        """Measure everything that fits into the budget; nothing is left running."""
        try:
            self._pairs()
            self._disks()
        except OutOfTime as error:
            self.skipped.append(str(error))
            self._console.log(str(error))
        finally:
            self._end_all()

    # -- the two halves

    def _pairs(self) -> None:
        left = [(n, k) for n, k in self._prompts if self._missing(n, k, ("cold", "own", "dram"))]
        if not left:
            return
        self._start_all()
        for n, k in left:
            begin = self._budget.left_s
            # The disks come last and must not be what is missing.
            if self._budget.left_s <= self._start_s + (1 + self._mode.pairs / 10) * self._pair_s:
                raise OutOfTime(f"no time for pair {k + 1} of {self._mode.pairs} and later ones")
            self._console.log(f"pair {k + 1}, {n} tokens ({begin:.0f} s left)")
            for source in ("cold", "own", "dram"):
                for name in in_turns(list(self._workers), k):
                    self._in_memory(name, source, n, k)
            self._pair_s = max(self._pair_s, begin - self._budget.left_s)

    def _disks(self) -> None:
        names = [name for name, kind in self._kinds.items() if "ssd" in kind.tiers]
        left = [(n, k) for n, k in self._prompts if self._missing(n, k, ("ssd",)) and self._is_warm(n, k)]
        if not left:
            return
        self._console.log("starting all of them anew")
        self._end_all()
        for name in names:
            if name in self._kinds:
                drop_page_cache(self._place(name).folder)
        self._start_all(names)
        for n, k in left:
            for name in in_turns([name for name in names if name in self._workers], k):
                if not self._has(name, "ssd", n, k):
                    self._sample(name, "ssd", n, k)
            if self._budget.left_s <= 0:
                raise OutOfTime(f"no time for disk hits behind pair {k + 1}")

    def _missing(self, n: int, k: int, sources: tuple[str, ...]) -> bool:
        return any(
            not self._has(name, source, n, k)
            for name, kind in self._kinds.items()
            for source in sources
            if source in ("cold", "own", *kind.tiers)
        )

    def _is_warm(self, n: int, k: int) -> bool:
        return any(self._has(name, "cold", n, k) for name in self._kinds)

    def _has(self, name: str, source: str, n: int, k: int) -> bool:
        return _unit(name, source, n, k) in self._journal.done

    # -- one sample

    def _in_memory(self, name: str, source: str, n: int, k: int) -> None:
        """One of cold, own and dram, after what has to lie before it."""
        if name not in self._workers or self._has(name, source, n, k):
            return
        if source == "dram" and "dram" not in self._kinds[name].tiers:
            return
        if source != "cold" and (name, n, k) not in self._asked:
            # A run that goes on: the engine that knew it has ended.
            self._sample(name, source, n, k, keep=False)
        if source != "dram":
            self._sample(name, source, n, k)
            return
        for last in range(TRIES):
            # Where saving was late, what is measured next is what this very request left.
            if self._sample(name, source, n, k, before=("settle", "reset"), keep=last == TRIES - 1):
                return

    def _sample(
        self, name: str, source: str, n: int, k: int, *, before: tuple[str, ...] = (), keep: bool = True
    ) -> bool:
        """Ask once; keep it in the journal if it is pure, or if told to. Returns whether it is pure."""
        worker = self._workers.get(name)
        if worker is None:
            return True
        is_paused = self._kinds[name].is_paused
        tokens = COLD_TOKENS if source == "cold" else HIT_TOKENS
        try:
            if is_paused:
                worker.resume()
            for what in before:
                worker.ask(ANSWER_S, do=what)
            answer = worker.ask(ANSWER_S, do="ask", prompt=self._prompts[n, k], max_tokens=tokens)
            # Behind every one: nothing of it may run while others are measured.
            saved_s = None
            if source == "cold":
                saved_s = worker.ask(ANSWER_S, do="settle")["saved_s"]
                worker.wait_until_idle(IDLE_MAX_S)
            if is_paused:
                worker.pause()
        except WorkerFailed as error:
            self._lose(name, f"in {_unit(name, source, n, k)}: {error}")
            return True
        self._asked.add((name, n, k))
        block = self._block_tokens[name]
        sample = Sample(
            name,
            source,
            n,
            k,
            answer["ttft_s"],
            answer["tpot_s"] if source == "cold" else None,
            answer["cached"],
            0 if source == "cold" else (n - 1) // block * block,
            answer["sources"],
            answer["token_ids"],
            saved_s,
        )
        is_wanted = keep or (sample.is_pure and bool(before))
        if is_wanted:
            self._journal.record(_unit(name, source, n, k), **sample._asdict())
        return sample.is_pure

    # -- processes

    def _start_all(self, names: list[str] | None = None) -> None:
        begin = self._budget.left_s
        for name in list(self._kinds) if names is None else names:
            if name in self._kinds:
                self._start(name)
        self._start_s = max(self._start_s, begin - self._budget.left_s)

    def _start(self, name: str) -> None:
        kind = self._kinds[name]
        self._console.log(f"starting {name}")
        place = self._place(name, new_tag())
        system = None
        self._tags[name] = place.tag
        try:
            system = system_of(kind, self._shared, place)
            worker = Worker(system, self._folder / f"{place.folder.name}.log", START_S)
            self._workers[name] = worker
            self._warm(worker)
        except (WorkerFailed, OSError) as error:
            self._lose(name, f"at its start: {error}")
            if system is not None:
                started = [" ".join(server["command"]) for server in system.options.get("servers", [])]
                given = {"servers": started, "kv_transfer_config": system.options.get("kv_transfer_config")}
                self.absent[name] |= {"python": str(system.python), **given}
            return
        self._journal.keep_versions(name, worker.versions)
        self._block_tokens[name] = worker.versions["block_tokens"]
        if kind.is_paused:
            worker.pause()

    def _warm(self, worker: Worker) -> None:
        """Pay for what happens only once. Raises WorkerFailed where a hit in memory could not be measured."""
        for _ in range(2):
            worker.ask(ANSWER_S, do="ask", prompt=self._warm_up, max_tokens=HIT_TOKENS)
        worker.ask(ANSWER_S, do="settle")
        if not worker.ask(ANSWER_S, do="reset")["is_empty"]:
            raise WorkerFailed("vLLM's prefix cache could not be emptied: something holds its blocks")

    def _place(self, name: str, tag: str = "") -> Place:
        folder = self._folder / name.lower().replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        sockets = Path(tempfile.gettempdir()) / tag if tag else folder
        if tag:
            sockets.mkdir(mode=0o700)
        return Place(folder, sockets, tag)

    def _lose(self, name: str, why: str) -> None:
        """It is out for the rest of the run."""
        self._console.log(f"{name} is absent {why}")
        self.absent[name] = {"error": why}
        self._kinds.pop(name, None)
        self._end(name)

    def _end_all(self) -> None:
        for name in list(self._workers):
            try:
                self._workers[name].resume()
                self._workers[name].ask(CLOSE_S, do="close")
            except (WorkerFailed, OSError) as error:
                self._console.log(f"{name} did not end by itself: {error}")
            self._end(name)
        self._asked.clear()

    def _end(self, name: str) -> None:
        if (worker := self._workers.pop(name, None)) is not None:
            worker.close()
        if tag := self._tags.pop(name, ""):
            sweep(tag)
            shutil.rmtree(Path(tempfile.gettempdir()) / tag, ignore_errors=True)


def _unit(name: str, source: str, n: int, k: int) -> str:
    """Key in the journal."""
    return f"{name}|{source}|{n}|{k}"


def shared_options(arguments: argparse.Namespace, max_context: int) -> dict[str, Any]:
    """What all systems have in common: the model, and every core."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "model": str(arguments.model),
        "dtype": arguments.dtype,
        "threads": len(cores),
        "cores": ",".join(map(str, cores)),
        "max_context": max_context,
        "source": str(SOURCE),
    }


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__ or "", "vllm-ttft", quick=QUICK, full=FULL, smoke=SMOKE)
    add_pythons(parser)
    add_dtype(parser, environment()["cpu_flags"])
    parser.add_argument("--folder", type=Path, help="disk the tiers live on; default: the temporary one")
    parser.add_argument(
        "--only", action="append", help="measure only the system of this name; may be repeated"
    )
    return parser.parse_args(words)


def main() -> None:
    arguments = parsed()
    mode: Mode = mode_of(arguments)
    console = Console()
    out = arguments.out or RESULTS / f"vllm-ttft-{mode.name}.json"
    end_on_sigterm()
    machine = environment()
    wanted = kinds(
        arguments.vllm_python, arguments.lmcache_python, arguments.mooncake_python, arguments.only or ()
    )
    config = {
        "mode": arguments.mode._asdict(),
        "seed": arguments.seed,
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "dram_gib": DRAM_GIB,
        "cold_tokens": COLD_TOKENS,
        "only": arguments.only,
    }
    journal = Journal(out.with_suffix(".partial.jsonl"), config | {"commit": machine["commit"]})
    is_new = not any("ttft_s" in entry for entry in journal.done.values())
    folder = folder_of_run(out, arguments.folder, is_new=is_new)
    shared = shared_options(arguments, max(mode.prompt_tokens) + 2 * COLD_TOKENS)
    texts = Texts(arguments.model, arguments.workloads, arguments.seed)
    bench = Bench(mode, wanted, shared, texts, folder, journal, console)
    bench.run()
    samples = bench.samples
    rows, compared, differ = summarise(samples), ratios(samples), differing(samples)
    body = {
        "bench": "vllm-ttft",
        "machine": machine | {"load_1m_end": os.getloadavg()[0]},
        "config": config,
        "threads": shared["cores"],
        "systems": [kind.name for kind in wanted],
        "versions": journal.versions,
        "absent": bench.absent,
        "rows": rows,
        "ratios": compared,
        "tokens_differ": differ,
        "impure": [sample._asdict() for sample in samples if not sample.is_pure],
        "skipped": bench.skipped,
        "raw": [sample._asdict() for sample in samples],
    }
    write_result(out, body)
    for shown in table(rows, compared):
        console.print(shown)
    console.print(f"answers that differ from vLLM's own: {len(differ)}")
    console.print(end_run(journal, out, folder, bench.skipped))


if __name__ == "__main__":
    main()
