"""Times one store inside its own process. Standard library and numpy only: runs in any peer's Python.

Speaks JSON lines (`serve`). Every store is driven by the same loop, in slices that alternate with copies of the
same bytes in the same threads, so that a slow second of the machine slows both sides of a ratio.

Block number b always holds `source[b % rows]` of the caller's memory; what arrived is compared after the clock stopped.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

try:
    import xxhash
except ImportError:
    xxhash = None

BATCH = 64
READ, FILLERS, NEWS = 0, 1 << 32, 2 << 32
"""First block numbers: what is read, what fills the store before, what is written against the clock."""
GETS_OF_MIXED = 0.8
_PR_SET_PDEATHSIG = 1
_READS = {"get", "get64"}


class Memory:
    """What the caller reads into and writes from: rings of rows of one block each, larger than any cache."""

    def __init__(self, size: int, ring_bytes: int) -> None:
        self.size = size
        self.rows = max(BATCH, ring_bytes // size // BATCH * BATCH)
        # Whole pages, so that O_DIRECT takes the rows as they are.
        self._maps = [mmap.mmap(-1, self.rows * size) for _ in range(2)]
        self.source, self.target = (
            np.frombuffer(area, dtype=np.uint8).reshape(self.rows, size) for area in self._maps
        )
        self.source[:] = np.frombuffer(random.Random(size).randbytes(size), dtype=np.uint8)
        # Rows differ in every 4 KiB: a block in another's place is seen.
        self.source.reshape(self.rows, -1, 4096)[:, :, :8] = (
            np.arange(self.rows, dtype=np.uint64).view(np.uint8).reshape(self.rows, 1, 8)
        )
        self.target[:] = 0


def key_of(block: int) -> bytes:
    """32 bytes, spread like a digest."""
    return (block * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big") * 4


class Client(Protocol):
    """One caller. Each call returns how many blocks it moved; fewer than asked are misses or refusals."""

    def read(self, blocks: range, row: int) -> int:
        """One block, or 64 in one go, into the rows from `target[row]` on."""
        ...

    def write(self, blocks: range) -> int:
        """Store one new block, or 64, each the child of the one before it.

        Returns when they can be read; where the store is durable, when they are durable.
        """
        ...


class Store:
    """A system under test."""

    reads_once = False
    """A block read once is cached by the store, and so no sample of the medium any more."""

    def __init__(self, *, checks: str = "none", durable: bool = False, version: str) -> None:
        self.about: dict[str, Any] = {"version": version, "checks": checks, "durable": durable}
        """For the result file."""
        self.pids: list[int] = []
        """Other processes whose CPU time is its own."""

    def open(self, memory: Memory) -> None:
        """Start empty. Called again after `close` where the controller keeps the process."""
        raise NotImplementedError

    def client(self) -> Client:
        """One more caller of the open store."""
        raise NotImplementedError

    def renew(self) -> None:
        """Before a measurement: forget what is cached above the medium that is measured."""

    def baselines(self, op: str, clients: int) -> dict[str, Callable[[int], Callable[[], int]]]:
        """More baselines by name: from the number of a thread to what moves some bytes and returns how many."""
        del op, clients
        return {}

    def close(self) -> None:
        """End what was started, remove what was written."""


class Slice:
    """What one thread did in one slice."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.blocks = 0
        self.short = 0
        self.started = 0.0
        self.ended = 0.0
        self.exhausted = False


class Bench:
    """One store at one block size."""

    def __init__(self, store: Store, request: dict[str, Any]) -> None:
        self.memory = Memory(request["size"], request["ring_bytes"])
        self.store = store
        size = self.memory.size
        self._chains = max(1, request["read_bytes"] // (BATCH * size))
        self._news = itertools.count(NEWS, BATCH)
        self._random = random.Random(1)
        store.open(self.memory)
        client = store.client()
        for first in range(FILLERS, FILLERS + request["fill_bytes"] // size, BATCH):
            client.write(range(first, first + BATCH))
        for first in range(READ, READ + self._chains * BATCH, BATCH):
            client.write(range(first, first + BATCH))

    def measure(self, op: str, clients: int, seconds: float, slices: int) -> dict[str, Any]:
        """Alternate slices of the operation with slices of each baseline."""
        self.store.renew()
        steps = [self._step(op, number, clients) for number in range(clients)]
        is_renewed = True
        baselines = self._baselines(op, clients)
        rates: dict[str, list[float]] = {name: [] for name in ("", *baselines)}
        done: list[Slice] = []
        wall_s = cpu_s = 0.0
        with ThreadPoolExecutor(clients) as threads:
            for number in range(slices + 1):
                # The first one warms up and is not counted.
                slice_s = seconds / slices if number else min(0.05, seconds / slices)
                for name, movers in baselines.items():
                    part = _run(threads, movers, slice_s / 2)
                    rates[name].append(sum(s.blocks for s in part) / _wall(part))
                if self.store.reads_once and not is_renewed:
                    self.store.renew()
                    steps = [self._step(op, number, clients) for number in range(clients)]
                is_renewed = False
                cpu = _cpu_s(self.store.pids)
                part = _run(threads, steps, slice_s)
                moved = sum(s.blocks for s in part)
                if number:
                    cpu_s += _cpu_s(self.store.pids) - cpu
                    wall_s += _wall(part)
                    done += part
                rates[""].append(moved * self.memory.size / _wall(part))
        ours = rates.pop("")
        if not done or not sum(s.blocks for s in done):
            raise RuntimeError(f"{op} moved nothing: {sum(s.short for s in done)} of its blocks missed")
        return self._report(done, wall_s, cpu_s) | {
            "baselines": {name: values[1:] for name, values in rates.items()},
            "rates": ours[1:],
        }

    def verify(self, op: str) -> None:
        """Once more, slowly: what arrives is what was stored. Raises RuntimeError."""
        if op not in _READS:
            return
        self.store.renew()
        client, memory = self.store.client(), self.memory
        first, count = READ, 1 if op == "get" else BATCH
        memory.target[:count] = 255
        moved = client.read(range(first, first + count), 0)
        right = 0
        for i in range(count):
            row = memory.target[i]
            if np.array_equal(row, memory.source[(first + i) % memory.rows]):
                right += 1
            elif (row != 255).any():
                raise RuntimeError(f"{op}: block {i} is not what was stored")
        if right != moved:
            raise RuntimeError(f"{op}: {moved} blocks were said to have arrived, {right} did")

    def _step(self, op: str, number: int, clients: int) -> Callable[[Slice], bool]:
        """One operation of client `number`; False when there is nothing left to read."""
        client, rows = self.store.client(), self.memory.rows
        batched = op.endswith("64")
        unit = BATCH if batched else 1
        first, count = READ, self._chains if batched else self._chains * BATCH
        turn = number
        row = number * unit % rows

        def read(out: Slice, which: int) -> bool:
            nonlocal row
            start = time.perf_counter()
            moved = client.read(range(first + which * unit, first + (which + 1) * unit), row)
            out.times.append(time.perf_counter() - start)
            out.blocks += moved
            out.short += unit - moved
            row = (row + clients * unit) % rows
            return True

        def read_next(out: Slice) -> bool:
            nonlocal turn
            if turn >= count:
                if self.store.reads_once:
                    out.exhausted = True
                    return False
                turn = number % count
            which, turn = turn, turn + clients
            return read(out, which)

        def write(out: Slice) -> bool:
            block = next(self._news)
            start = time.perf_counter()
            moved = client.write(range(block, block + unit))
            out.times.append(time.perf_counter() - start)
            out.blocks += moved
            out.short += unit - moved
            return True

        def mix(out: Slice) -> bool:
            if self._random.random() < GETS_OF_MIXED:
                return read_next(out) if self.store.reads_once else read(out, self._random.randrange(count))
            return write(out)

        return mix if op == "mixed" else read_next if op in _READS else write

    def _baselines(self, op: str, clients: int) -> dict[str, list[Callable[[Slice], bool]]]:
        memory = self.memory
        count = BATCH if op.endswith("64") else 1

        def copying(number: int, *, check: bool) -> Callable[[], int]:
            row = number * count % memory.rows

            def move() -> int:
                nonlocal row
                for i in range(row, row + count):
                    np.copyto(memory.target[i], memory.source[i])
                    if check:
                        xxhash.xxh3_64_intdigest(memory.target[i])
                row = (row + clients * count) % memory.rows
                return count * memory.size

            return move

        found: dict[str, Callable[[int], Callable[[], int]]] = {"memcpy": lambda n: copying(n, check=False)}
        if xxhash is not None:
            found["memcpy_xxh3"] = lambda n: copying(n, check=True)
        found |= self.store.baselines(op, clients)
        return {name: [_mover(make(n)) for n in range(clients)] for name, make in found.items()}

    def _report(self, done: list[Slice], wall_s: float, cpu_s: float) -> dict[str, Any]:
        times = np.sort(np.concatenate([s.times for s in done]))
        blocks = sum(s.blocks for s in done)
        return {
            "seconds": wall_s,
            "ops": len(times),
            "blocks": blocks,
            "short": sum(s.short for s in done),
            "bytes_per_s": blocks * self.memory.size / wall_s,
            "ops_per_s": len(times) / wall_s,
            "p50_us": float(times[len(times) // 2]) * 1e6,
            "p99_us": float(times[min(len(times) - 1, int(len(times) * 0.99))]) * 1e6,
            "cpu_s_per_gb": cpu_s / (blocks * self.memory.size / 1e9),
        }


def _mover(move: Callable[[], int]) -> Callable[[Slice], bool]:
    def step(out: Slice) -> bool:
        start = time.perf_counter()
        out.blocks += move()
        out.times.append(time.perf_counter() - start)
        return True

    return step


def _run(threads: ThreadPoolExecutor, steps: list[Callable[[Slice], bool]], seconds: float) -> list[Slice]:
    """Every step over and over in its own thread, at least once; a lone one in this thread."""
    slices = [Slice() for _ in steps]

    def one(step: Callable[[Slice], bool], out: Slice) -> None:
        out.started = time.perf_counter()
        until = out.started + seconds
        while step(out) and time.perf_counter() < until:
            pass
        out.ended = time.perf_counter()

    if len(steps) == 1:
        one(steps[0], slices[0])
    else:
        list(threads.map(one, steps, slices))
    return slices


def _wall(part: list[Slice]) -> float:
    return max(s.ended for s in part) - min(s.started for s in part)


def _cpu_s(pids: list[int]) -> float:
    """User and system time of this process and of `pids`, all their threads."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def serve(load: Callable[[dict[str, Any]], Store]) -> None:
    """Load with the options of the command line (JSON), say what was loaded, answer until stdin ends."""
    # A stopped process does not see its stdin end: the kernel ends it with its controller.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Libraries print to stdout whatever we want; the controller gets a channel of its own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    store = load(json.loads(sys.argv[1]))
    bench: Bench | None = None
    say({"ready": store.about})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "open":
                bench = Bench(store, request)
                say({"done": {"about": store.about}})
            elif request["do"] == "measure":
                assert bench is not None
                measured = bench.measure(
                    request["op"], request["clients"], request["seconds"], request["slices"]
                )
                bench.verify(request["op"])
                say({"done": measured})
            else:
                bench = None
                store.close()
                say({"done": {}})
        except Exception as error:  # noqa: BLE001 - boundary to foreign code: the controller records it
            say({"error": f"{type(error).__name__}: {error}"})
