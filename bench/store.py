r"""The store's tiers beside memory, disk and other stores, on the same bytes and in the same minutes.

    python bench/store.py --quick --redis /usr/bin/redis-server --lmdb-python VENV/bin/python \
        --mooncake-python VENV/bin/python --lmcache-python VENV/bin/python --vllm-python VENV/bin/python

Every system is a process driven by one loop (`store_peers/driver.py`), at one block size at a time: it fills its
memory (or a folder), then each operation alternates with copies of as many bytes by the same threads. Ratios are
taken between neighbouring slices of one thread, so that what the machine does beside weighs on both sides.

A second client is a second thread of the same process; for Redis and Mooncake over TCP it has the same server.
What a get moves ends in the caller's memory, what a put stores begins there. A system that cannot start is listed
as absent with its error. A run that is ended early goes on when the same command runs again.

    python bench/store.py --records

measures only what depends on how many blocks a store holds: how long it takes to open and what memory it takes, at one
million and at five, and how long a purge of a million takes and holds others up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from harness import (
    RESULTS,
    Budget,
    Journal,
    add_modes,
    end_run,
    environment,
    folder_of_run,
    in_turns,
    without_folders,
    write_result,
)
from rich.console import Console
from store_report import CHAIN_ONLY, KIB, MIB, OURS, against, behind, many_blocks, reaches, summarise, table
from systems import System, Worker, WorkerFailed

PEERS = Path(__file__).parent / "store_peers"
GIB = 1 << 30
SIZES = (64 * KIB, 360 * KIB, 2 * MIB, 8 * MIB)
OPS = ("get", "get64", "mixed", "put", "put64")
"""Reads first: what is read was written last, and no store has evicted it yet."""
START_S = 120.0
LONG_BYTES = 256 * MIB
"""A batch of more fills a slice by itself; two of them are measured."""


class Mode(NamedTuple):
    """What fits into which time."""

    name: str
    sizes: tuple[int, ...]
    clients: dict[str, tuple[int, ...]]
    """For each operation, with how many clients it is measured."""
    seconds: float
    """Of one measurement, baselines not counted."""
    slices: int
    rounds: int
    dram_bytes: int
    ring_bytes: int
    records: tuple[int, ...]
    budget_s: float


ONE, BOTH = (1,), (1, 2)
QUICK = Mode(
    "quick",
    SIZES,
    {"get": BOTH, "get64": ONE, "mixed": ONE, "put": BOTH, "put64": ONE},
    0.3,
    3,
    1,
    1 * GIB,
    128 * MIB,
    (1_000_000,),
    570.0,
)
FULL = Mode(
    "full", SIZES, dict.fromkeys(OPS, BOTH), 1.0, 5, 3, 2 * GIB, 256 * MIB, (1_000_000, 5_000_000), 3400.0
)
SMOKE = Mode(
    "smoke",
    (64 * KIB, 2 * MIB),
    {"get": BOTH, "get64": ONE, "mixed": ONE, "put": ONE, "put64": ONE},
    0.05,
    2,
    1,
    512 * MIB,
    64 * MIB,
    (20_000,),
    300.0,
)


class Unit(NamedTuple):
    """One system at one block size in one round: a process, and all its operations."""

    system: str
    size: int
    round: int

    def name(self, op: str, clients: int) -> str:
        """Key in the journal."""
        return f"{self.system}|{self.size}|{op}|{clients}|{self.round}"


class Bench:
    """Everything, within the budget."""

    def __init__(
        self, mode: Mode, systems: list[System], folder: Path, journal: Journal, console: Console
    ) -> None:
        self._mode = mode
        self._systems = {system.name: system for system in systems}
        self._folder = folder
        self._journal = journal
        self._console = console
        self._budget = Budget(mode.budget_s)
        self._kept: dict[str, Worker] = {}
        self.absent: dict[str, str] = {}
        self.skipped: list[str] = []

    def run(self) -> None:
        """Measure what the journal does not have yet."""
        self._once("disk", fio, self._folder)
        self._once("lookups", lookups, 0.5 if self._mode is not SMOKE else 0.02)
        self._once("host_latency", host_latency, 3000 if self._mode is not SMOKE else 50)
        self.count_records()
        try:
            for round_number in range(self._mode.rounds):
                for size in self._mode.sizes:
                    for name in in_turns(list(self._systems), round_number):
                        self._unit(Unit(name, size, round_number))
        finally:
            for worker in self._kept.values():
                worker.close()

    def count_records(self) -> None:
        """What depends on how many blocks a store holds."""
        for count in (CHAIN_ONLY, *self._mode.records):
            self._once(f"records|{count}", records, self._folder, count)
        self._once(f"purge|{self._mode.records[0]}", purge, self._folder, self._mode.records[0])

    def _once(self, key: str, measure: Any, *arguments: Any) -> None:
        if key in self._journal.done:
            return
        self._console.log(key)
        try:
            self._journal.record(key, found=measure(*arguments))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self._journal.record(key, skipped=without_folders(str(error)))
            self._console.log(f"{key}: {error}")

    def _unit(self, unit: Unit) -> None:
        wanted = [(op, n) for op in OPS for n in self._mode.clients[op]]
        left = [(op, n) for op, n in wanted if unit.name(op, n) not in self._journal.done]
        if not left or unit.system in self.absent:
            return
        if self._budget.left_s <= 0:
            self.skipped.append(f"{unit.system} at {unit.size}, round {unit.round}: no time left")
            return
        self._console.log(f"{unit.system}, {unit.size // KIB} KiB ({self._budget.left_s:.0f} s left)")
        folder = self._folder / "data"
        folder.mkdir(exist_ok=True)
        try:
            worker = self._started(unit.system)
        except (WorkerFailed, OSError) as error:
            system = self._systems[unit.system]
            self.absent[unit.system] = f"{system.python} {system.script}: {error}"
            self._console.log(f"{unit.system} is absent: {error}")
            return
        try:
            self._open(worker, unit)
            for op, clients in left:
                self._measure(worker, unit, op, clients)
            worker.ask(START_S, do="close")
            if worker.system.options.get("is_kept"):
                worker.pause()
                self._kept[unit.system] = worker
        except WorkerFailed as error:
            # It may be the size's own: the others are tried all the same.
            self._journal.record(
                f"{unit.system}|{unit.size}|failed|{unit.round}", skipped=without_folders(str(error))
            )
            self._console.log(f"{unit.system} at {unit.size // KIB} KiB: {error}")
        finally:
            if unit.system not in self._kept:
                worker.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _started(self, name: str) -> Worker:
        """A fresh process; or the one of the last size, of a system that takes long to start."""
        worker = self._kept.pop(name, None)
        if worker is not None:
            worker.resume()
            return worker
        system = self._systems[name]
        return Worker(system, self._folder / f"{Path(system.script).stem}.log", START_S)

    def _open(self, worker: Worker, unit: Unit) -> None:
        mode = self._mode
        on_disk = worker.system.options["medium"] == "ssd"
        # In memory the store is filled up, so that every put has to make room; filling a disk would take
        # longer than all that is measured.
        read_bytes = mode.ring_bytes // 2 if on_disk else mode.ring_bytes
        answer = worker.ask(
            START_S,
            do="open",
            size=unit.size,
            ring_bytes=mode.ring_bytes,
            read_bytes=read_bytes,
            fill_bytes=0 if on_disk else mode.dram_bytes,
        )
        self._journal.record(f"about|{unit.system}", found=answer["about"])

    def _measure(self, worker: Worker, unit: Unit, op: str, clients: int) -> None:
        mode = self._mode
        key = unit.name(op, clients)
        fields = {**unit._asdict(), "op": op, "clients": clients}
        is_long = op.endswith("64") and 64 * unit.size > LONG_BYTES
        slices = min(mode.slices, 2) if is_long else mode.slices
        try:
            found = worker.ask(
                START_S, do="measure", op=op, clients=clients, seconds=mode.seconds, slices=slices
            )
        except WorkerFailed as error:
            self._journal.record(key, **fields, skipped=without_folders(str(error)))
            self._console.log(f"{key}: {error}")
            if "no answer" in str(error) or "ended" in str(error):
                raise
            return
        self._journal.record(key, **fields, **found)


def fio(folder: Path) -> dict[str, float]:
    """The disk by a tool that nobody here wrote: O_DIRECT in requests of 2 MiB, bytes per second."""
    path = folder / "fio"
    found = {}
    for kind in ("write", "read"):
        command = [
            "fio",
            "--name=x",
            f"--filename={path}",
            "--size=512m",
            "--bs=2m",
            f"--rw={kind}",
            "--direct=1",
        ]
        command += ["--ioengine=psync", "--numjobs=1", "--end_fsync=1", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        report = json.loads(done.stdout[done.stdout.index("{") :])
        found[kind] = float(report["jobs"][0][kind]["bw_bytes"])
    path.unlink()
    return found


def lookups(seconds: float) -> dict[str, Any]:
    """Hashing, lookup and lease, within one process."""
    return _script("lookups.py", "--seconds", str(seconds))


def host_latency(rounds: int) -> list[dict[str, Any]]:
    """Lookup and lease from another process, each beside an echo over the same kind of socket."""
    return _script("../host_latency.py", "--rounds", str(rounds))["rows"]


def records(folder: Path, count: int) -> dict[str, Any]:
    """Open a store of `count` blocks three times: seconds from the start of the process to a correct lookup."""
    place = folder / "records"
    shutil.rmtree(place, ignore_errors=True)
    made = _script("records.py", "make", str(place), "--count", str(count))
    starts = []
    for _ in range(3):
        begin = time.clock_gettime(time.CLOCK_MONOTONIC)
        found = _script("records.py", "open", str(place))
        if not found["is_correct"] or found["pages"] != count:
            raise ValueError(f"the store of {count} blocks opened with {found['pages']} and a wrong prefix")
        starts.append({"seconds": found.pop("answered") - begin, **found})
    shutil.rmtree(place)
    return {**made, "starts": starts}


def purge(folder: Path, count: int) -> dict[str, Any]:
    """Purge a tenant of `count` blocks on ssd: seconds, and how long another tenant waited meanwhile."""
    place = folder / "purged"
    shutil.rmtree(place, ignore_errors=True)
    _script("records.py", "make", str(place), "--count", str(count))
    try:
        return _script("purges.py", str(place))
    finally:
        shutil.rmtree(place)


def _script(name: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(PEERS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode != 0:
        raise ValueError(f"{name} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)


def systems_of(arguments: argparse.Namespace, dram_bytes: int, folder: Path) -> list[System]:
    """Ours and every peer whose place was given."""
    own = Path(sys.executable)
    base = {"threads": 2, "folder": str(folder / "data"), "dram_bytes": dram_bytes}
    asked: list[tuple[str, Path | None, str, dict[str, Any]]] = [
        (OURS["dram"], own, "workmem_store.py", {"medium": "dram"}),
        ("workmem host", own, "workmem_store.py", {"medium": "dram", "host": True}),
        (
            "mooncake local",
            arguments.mooncake_python,
            "mooncake_store.py",
            {"medium": "dram", "path": "local"},
        ),
        ("mooncake tcp", arguments.mooncake_python, "mooncake_store.py", {"medium": "dram", "path": "tcp"}),
        ("lmcache cpu", arguments.lmcache_python, "lmcache_local.py", {"medium": "dram"}),
        (
            "redis",
            own if arguments.redis else None,
            "redis_socket.py",
            {"medium": "dram", "server": str(arguments.redis)},
        ),
        ("lmdb memory", arguments.lmdb_python, "lmdb_map.py", {"medium": "dram"}),
        (OURS["ssd"], own, "workmem_store.py", {"medium": "ssd"}),
        ("lmcache disk", arguments.lmcache_python, "lmcache_local.py", {"medium": "ssd"}),
        ("vllm fs", arguments.vllm_python, "vllm_fs.py", {"medium": "ssd", "is_kept": True}),
        ("lmdb disk", arguments.lmdb_python, "lmdb_map.py", {"medium": "ssd"}),
    ]
    chosen = arguments.only.split(",") if arguments.only else [name for name, *_ in asked]
    return [
        System(name, python, str(PEERS / script), base | options)
        for name, python, script, options in asked
        if python is not None and name in chosen
    ]


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_modes(parser, quick=QUICK, full=FULL, smoke=SMOKE)
    for name in ("mooncake", "lmcache", "vllm", "lmdb"):
        parser.add_argument(f"--{name}-python", type=Path, help=f"Python that has {name}")
    parser.add_argument("--redis", type=Path, help="redis-server")
    parser.add_argument("--only", help="names of systems, separated by commas")
    parser.add_argument(
        "--records", action="store_true", help="only starts, memory and a purge of stores of many blocks"
    )
    parser.add_argument("--folder", type=Path, help="disk to use; default: the one for temporary files")
    parser.add_argument(
        "--out",
        type=Path,
        help="result file; default bench/results/store-MODE.json, or store-records-MODE.json",
    )
    return parser.parse_args(words)


def main() -> None:
    arguments = parsed()
    mode: Mode = arguments.mode
    console = Console(width=None if sys.stdout.isatty() else 150)
    part = "store-records" if arguments.records else "store"
    out = arguments.out or RESULTS / f"{part}-{mode.name}.json"
    folder = folder_of_run(out, arguments.folder, is_new=False)
    systems = [] if arguments.records else systems_of(arguments, mode.dram_bytes, folder)
    config = {"mode": mode._asdict(), "only": "records" if arguments.records else arguments.only}
    machine = environment()
    journal = Journal(out.with_suffix(".partial.jsonl"), config | {"commit": machine["commit"]})
    bench = Bench(mode, systems, folder, journal, console)
    if arguments.records:
        bench.count_records()
    else:
        bench.run()
    rows = summarise(journal.done)
    media = {system.name: system.options["medium"] for system in systems}
    compared = against(rows, media)
    body = {
        "bench": "store",
        "machine": machine | {"load_1m_end": os.getloadavg()[0]},
        "config": config,
        "clients_are": "threads of one process",
        "systems": {
            name: {"medium": media[name], **journal.done.get(f"about|{name}", {}).get("found", {})}
            for name in media
        },
        "absent": bench.absent,
        "reaches": reaches(rows, journal.done),
        "many_blocks": many_blocks(journal.done),
        "against": compared,
        "behind": behind(compared),
        "rows": rows,
        "once": {k: v for k, v in journal.done.items() if "op" not in v},
        "skipped": bench.skipped,
        "raw": [entry for entry in journal.done.values() if "op" in entry],
    }
    write_result(out, body)
    for medium in ("dram", "ssd") if rows else ():
        console.print(table(rows, [name for name in media if media[name] == medium]))
    for line in body["many_blocks"]:
        console.print(line["said"])
    for reach in body["reaches"]:
        mark = "met   " if reach["is_met"] else "missed"
        console.print(f"{mark} {reach['what']}: {reach['measured']:.3g} (bound {reach['bound']:.3g})")
    for line in body["behind"]:
        console.print(f"not ahead of {line}")
    console.print(end_run(journal, out, folder, bench.skipped))


if __name__ == "__main__":
    main()
