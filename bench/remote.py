r"""Past one host: a Mooncake pool as the tier below dram, beside Mooncake's own client, and beside computing again.

    python bench/remote.py --quick --model MODEL

Master, memory of the pool and clients are processes of one machine; bytes go over TCP. Four parts:

- *moves*: batches of 1, 4 and 16 MiB in blocks of 64 KiB and 1 MiB, put into the pool and brought from it, by our tier and
  by Mooncake's client with one object per block, cell by cell, in reverse order every second round. The client's best
  path is its fastest size of object for that batch, whatever the blocks.
- *flood*: four times what a pool holds is written. How many writes were refused?
- *contexts*: one engine computes a context, another one, with a store of its own, brings it from the pool; then the
  same from that one's dram; then it computes another of that length. Between them Mooncake's client brings as many bytes.
- *pressure*: agents whose contexts are four times what the engine's own memory holds, round after round: with that
  memory alone, with dram and the pool below it, and, as the ceiling, with memory for all of them.

A run that is ended early, or had too little time, goes on when the same command runs again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from fleet_load import Load, Size, load_of
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
from remote_report import summarise, tables
from restart import layout_of
from rich.console import Console
from systems import System, Worker, WorkerFailed
from vllm_systems import SOURCE

from workmem.testing.mooncake import Master, Owner

KIB, MIB = 1 << 10, 1 << 20
BATCHES = (MIB, 4 * MIB, 16 * MIB)
BLOCKS = (64 * KIB, MIB)
OBJECTS = (64 * KIB, MIB, 4 * MIB, 16 * MIB)
"""Of Mooncake's client: the best of these that fit into a batch is its best path."""
OURS, THEIRS = "workmem", "Mooncake"
MOVES_PER_SAMPLE = 64 * MIB
POOL_BYTES, FLOODED_BYTES, CONTEXT_POOL_BYTES = 512 * MIB, 128 * MIB, 2048 * MIB
FLOOD_TIMES, FLOOD_OBJECT = 4, 2 * MIB
PIECE = 16 * MIB
VRAM_SHARE, DRAM_SHARE = 0.25, 0.5
"""Of the working set of *pressure*: what the engine's own memory holds, and what dram does below it."""
ANSWER_TOKENS, IN_FLIGHT = 8, 2
START_S, ANSWER_S = 120.0, 600.0
ARMS = ("vram alone", "vram, dram, pool", "vram for all")


class Mode(NamedTuple):
    """What fits into which time."""

    name: str
    rounds: int
    context_tokens: int
    pairs: int
    size: Size
    budget_s: float


QUICK = Mode("quick", 10, 4103, 5, Size(16, 4, 700, 1000), 560.0)
FULL = Mode("full", 40, 4103, 20, Size(16, 10, 1000, 2000), 3400.0)
SMOKE = Mode("smoke", 1, 600, 1, Size(3, 2, 300, 400), 3000.0)


class OutOfTime(Exception):
    """The budget would not hold for what comes next."""


class Bench:
    """All parts, one after the other."""

    def __init__(
        self,
        mode: Mode,
        arguments: argparse.Namespace,
        folder: Path,
        journal: Journal,
        console: Console,
    ) -> None:
        self._mode = mode
        self._arguments = arguments
        self._folder = folder
        self._journal = journal
        self._console = console
        self._budget = Budget(mode.budget_s)
        self._running: list[Worker | Owner | Master] = []
        self._number = 0
        self.skipped: list[str] = []

    def run(self) -> None:
        """Measure everything that fits into the budget; nothing is left running."""
        for part in (self._moves, self._flood, self._contexts, self._pressure):
            try:
                part()
            except OutOfTime as error:
                self.skipped.append(str(error))
                self._console.log(str(error))
            finally:
                self._end_all()

    # -- moves

    def _moves(self) -> None:
        left = [number for number in range(self._mode.rounds) if f"moves|{number}" not in self._journal.done]
        if not left:
            return
        movers, owner = self._movers(POOL_BYTES)
        cells = [(batch, block, OURS) for batch in BATCHES for block in BLOCKS if block <= batch]
        cells += [(batch, size, THEIRS) for batch in BATCHES for size in OBJECTS if size <= batch]
        slowest = 0.0
        for number in left:
            if self._budget.left_s < 1.5 * slowest:
                raise OutOfTime(f"no time for round {number + 1} of moves and later ones")
            begin = self._budget.left_s
            self._console.log(f"moves, round {number + 1} ({begin:.0f} s left)")
            found = []
            for at in in_turns([str(at) for at in range(len(cells))], number):
                batch, block, name = cells[int(at)]
                found += self._sample(movers[name], name, batch, block, owner)
            self._journal.record(f"moves|{number}", moves=found)
            slowest = max(slowest, begin - self._budget.left_s)

    def _sample(self, mover: Worker, name: str, batch: int, block: int, owner: Owner) -> list[dict[str, Any]]:
        """Put some batches, bring them, let them go."""
        numbers = [self._next() for _ in range(max(1, MOVES_PER_SAMPLE // batch))]
        rows = []
        for what in ("put", "get"):
            cpu = owner.cpu_s
            answers = [
                mover.ask(ANSWER_S, do=what, batch=batch, block=block, number=number) for number in numbers
            ]
            seconds = sum(answer["seconds"] for answer in answers)
            moved = batch * len(numbers)
            rows.append(
                {
                    "system": name,
                    "op": what,
                    "batch": batch,
                    "block": block,
                    "bytes_per_s": moved / seconds,
                    "short": sum(answer["short"] for answer in answers),
                    "cpu_s_per_gib": (sum(answer["cpu_s"] for answer in answers) + owner.cpu_s - cpu)
                    / (moved / 2**30),
                }
            )
        for number in numbers:
            mover.ask(ANSWER_S, do="drop", batch=batch, block=block, number=number)
        return rows

    def _movers(self, size: int) -> tuple[dict[str, Worker], Owner]:
        master, owner = self._pool(size)
        made = {}
        for name in (OURS, THEIRS):
            options = {"ours": name == OURS, "master": master.address, "capacity": size, "threads": 1}
            made[name] = self._worker(name, "pool_moves.py", options | {"source": str(SOURCE)})
        return made, owner

    # -- flood

    def _flood(self) -> None:
        if "flood" in self._journal.done:
            return
        if self._budget.left_s < 60:
            raise OutOfTime("no time for the flood")
        found = {}
        for name in (OURS, THEIRS):
            movers, _ = self._movers(FLOODED_BYTES)
            self._console.log(f"flood by {name} ({self._budget.left_s:.0f} s left)")
            found[name] = movers[name].ask(
                ANSWER_S, do="flood", bytes=FLOOD_TIMES * FLOODED_BYTES, block=FLOOD_OBJECT
            )
            self._end_all()
        self._journal.record("flood", flood=found)

    # -- contexts

    def _contexts(self) -> None:
        left = [pair for pair in range(self._mode.pairs) if f"context|{pair}" not in self._journal.done]
        if not left:
            return
        texts = Texts(self._arguments.model, self._arguments.workloads, self._arguments.seed)
        length = self._mode.context_tokens
        prompts = [(texts.prompt(length), texts.prompt(length)) for _ in range(self._mode.pairs)]
        master, _ = self._pool(CONTEXT_POOL_BYTES)
        token_bytes = layout_of(self._arguments.model).token_bytes
        # Each has room for one context in its own memory, and for two in dram.
        size = int((length + 512) * token_bytes)
        near, far = (
            self._engine(name, master, vram=size, dram=2 * size, context=length + 64)
            for name in ("near", "far")
        )
        options = {"ours": False, "master": master.address, "capacity": CONTEXT_POOL_BYTES, "threads": 1}
        client = self._worker("client", "pool_moves.py", options | {"source": str(SOURCE)})
        raw = [self._next() for _ in range(-(-length * token_bytes // PIECE))]
        for number in raw:
            client.ask(ANSWER_S, do="put", batch=PIECE, block=PIECE, number=number)
        slowest = 0.0
        for pair in left:
            if self._budget.left_s < 1.3 * slowest:
                raise OutOfTime(f"no time for context {pair + 1} and later ones")
            begin = self._budget.left_s
            self._console.log(f"context {pair + 1} ({begin:.0f} s left)")
            shared, other = prompts[pair]
            first = _ask(near, shared)
            near.ask(ANSWER_S, do="settle")
            known = near.ask(ANSWER_S, do="known")["pages"]
            until = time.monotonic() + 30
            while far.ask(ANSWER_S, do="known")["pages"] < known and time.monotonic() < until:
                time.sleep(0.1)
            near.pause()
            remote = _ask(far, shared)
            far.ask(ANSWER_S, do="settle")
            far.ask(ANSWER_S, do="drop_vram")
            dram = _ask(far, shared)
            pieces = [
                client.ask(ANSWER_S, do="get", batch=PIECE, block=PIECE, number=number) for number in raw
            ]
            computed = _ask(far, other)
            near.resume()
            self._journal.record(
                f"context|{pair}",
                remote=remote,
                dram=dram,
                computed=computed,
                same=first["token_ids"] == remote["token_ids"] == dram["token_ids"],
                bytes=remote["sources"].get("remote", 0) * token_bytes,
                raw_bytes_per_s=PIECE * len(raw) / sum(piece["seconds"] for piece in pieces),
            )
            slowest = max(slowest, begin - self._budget.left_s)

    # -- pressure

    def _pressure(self) -> None:
        size = self._mode.size
        left = [
            (number, arm)
            for number in range(size.rounds)
            for arm in ARMS
            if f"pressure|{number}|{arm}" not in self._journal.done
        ]
        if not left:
            return
        load = load_of(size, self._arguments.model, self._arguments.workloads, self._arguments.seed)
        token_bytes = layout_of(self._arguments.model).token_bytes
        working_set = size.working_set * token_bytes
        context = size.last + 2 * ANSWER_TOKENS
        least = int(IN_FLIGHT * (context + 64) * token_bytes)
        small = max(least, int(VRAM_SHARE * working_set))
        master, _ = self._pool(CONTEXT_POOL_BYTES)
        workers = {
            ARMS[0]: self._engine(ARMS[0], None, vram=small, dram=0, context=context),
            ARMS[1]: self._engine(
                ARMS[1], master, vram=small, dram=int(DRAM_SHARE * working_set), context=context
            ),
            ARMS[2]: self._engine(ARMS[2], None, vram=2 * working_set, dram=0, context=context),
        }
        for worker in workers.values():
            worker.pause()
        self._rounds(load, workers, left)

    def _rounds(self, load: Load, workers: dict[str, Worker], left: list[tuple[int, str]]) -> None:
        slowest = 0.0
        for number in range(left[0][0] - 1 if left[0][0] else 0, self._mode.size.rounds):
            if self._budget.left_s < 1.3 * slowest:
                raise OutOfTime(f"no time for round {number + 1} of the pressure and later ones")
            begin, prompts = self._budget.left_s, load.prompts(number)
            self._console.log(f"pressure, round {number + 1} ({begin:.0f} s left)")
            for arm in in_turns(ARMS, number):
                worker = workers[arm]
                worker.resume()
                start = time.perf_counter()
                answers = worker.ask(
                    ANSWER_S, do="fleet", prompts=prompts, max_tokens=ANSWER_TOKENS, in_flight=IN_FLIGHT
                )["answers"]
                wall_s = time.perf_counter() - start
                worker.ask(ANSWER_S, do="settle")
                worker.pause()
                # A run that goes on takes the round before once more, unmeasured.
                if (number, arm) in left:
                    counted = sum(map(len, prompts))
                    self._journal.record(
                        f"pressure|{number}|{arm}",
                        arm=arm,
                        round=number,
                        wall_s=wall_s,
                        requests=len(prompts),
                        prompt_tokens=counted,
                        computed=counted - sum(answer["cached"] for answer in answers),
                        token_ids=[answer["token_ids"] for answer in answers],
                    )
            slowest = max(slowest, begin - self._budget.left_s)

    # -- processes

    def _pool(self, size: int) -> tuple[Master, Owner]:
        # As early as a plain client needs it: with the default a burst of puts is refused while the master wakes up.
        # Who is stopped while others are measured is not dead.
        flags = {"eviction_high_watermark_ratio": "0.7", "eviction_ratio": "0.25", "client_ttl": 600}
        master = Master(default_kv_lease_ttl=5000, **flags)
        self._running.append(master)
        owner = Owner(master.address, size)
        self._running.append(owner)
        return master, owner

    def _engine(self, name: str, master: Master | None, *, vram: int, dram: int, context: int) -> Worker:
        options: dict[str, Any] = {
            "model": str(self._arguments.model),
            "cache": str(self._arguments.cache),
            "source": str(SOURCE),
            "dtype": "bf16",
            "vram": vram,
            "dram": dram,
            "max_context": context,
            "threads": len(os.sched_getaffinity(0)),
            "reuse": True,
            "store": master is not None,
        }
        if master is not None:
            options["pool"] = {"master": master.address, "capacity": CONTEXT_POOL_BYTES}
        worker = self._worker(name, "fleet_embedded.py", options)
        _ask(worker, list(range(1000, 1064)))
        return worker

    def _worker(self, name: str, script: str, options: dict[str, Any]) -> Worker:
        log = self._folder / f"{name.replace(' ', '-').replace(',', '')}.log"
        worker = Worker(System(name, Path(sys.executable), script, options), log, START_S)
        self._running.append(worker)
        self._journal.keep_versions(name, worker.versions)
        return worker

    def _end_all(self) -> None:
        for one in reversed(self._running):
            if isinstance(one, Worker):
                one.close()
            else:
                one.kill()
        self._running.clear()

    def _next(self) -> int:
        self._number += 1
        return self._number


def _ask(worker: Worker, prompt: list[int]) -> dict[str, Any]:
    """One answer of a few tokens."""
    (answer,) = worker.ask(ANSWER_S, do="fleet", prompts=[prompt], max_tokens=ANSWER_TOKENS, in_flight=1)[
        "answers"
    ]
    return answer


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__ or "", "remote", quick=QUICK, full=FULL, smoke=SMOKE)
    parser.add_argument(
        "--cache", type=Path, default=Path("~/.cache/workmem").expanduser(), help="compiled kernels"
    )
    return parser.parse_args(words)


def main() -> None:
    arguments = parsed()
    mode: Mode = mode_of(arguments)
    console = Console()
    out = arguments.out or RESULTS / f"remote-{mode.name}.json"
    end_on_sigterm()
    machine = environment()
    config = {
        "mode": arguments.mode._asdict() | {"size": mode.size._asdict()},
        "seed": arguments.seed,
        "model": arguments.model.name,
        "texts": arguments.workloads.name if arguments.workloads else "of the package",
        "vram_share": VRAM_SHARE,
        "dram_share": DRAM_SHARE,
        "in_flight": IN_FLIGHT,
    }
    journal = Journal(out.with_suffix(".partial.jsonl"), config | {"commit": machine["commit"]})
    folder = folder_of_run(out, is_new=True)
    bench = Bench(mode, arguments, folder, journal, console)
    absent: dict[str, str] = {}
    try:
        bench.run()
    except (WorkerFailed, OSError, RuntimeError) as error:
        absent["run"] = f"ended: {error}"
        bench.skipped.append(absent["run"])
        console.log(absent["run"])
    summed = summarise(journal.done)
    body = {
        "bench": "remote",
        "machine": machine | {"load_1m_end": os.getloadavg()[0]},
        "config": config,
        "systems": [OURS, THEIRS],
        "versions": journal.versions,
        "absent": absent,
        **summed,
        "skipped": bench.skipped,
        "raw": list(journal.done.values()),
    }
    write_result(out, body)
    for shown in tables(summed):
        console.print(shown)
    console.print(end_run(journal, out, folder, bench.skipped))


if __name__ == "__main__":
    main()
