"""Which eviction order keeps what agents ask for again: block traces replayed through all of them.

    python bench/policy.py --quick [--workloads FOLDER]

Without a folder it replays generated agent sessions; with one, every trace with block ids in it as well. A
request hits the leading blocks that are resident and brings in the rest. The oracle knows the future
(evicts what is used last, never admits what is not used again): no order can have a higher hit rate. Every parameter of
the orders is a constant of the product, fixed before any trace was replayed.

Hit rate: blocks hit / blocks asked. Cost saved: the same, each block weighted with its cost to compute at
its depth. `value+hints` is also told when a session ended in a tool call and when it is over.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness import RESULTS, Journal, environment, write_result
from rich.console import Console
from rich.table import Table
from traces import BLOCK_TOKENS, Request, Trace, generated, recorded

from workmem.policy.ghosts import REGRET_REACH, Ghosts
from workmem.policy.lru import Lru
from workmem.policy.order import NO_ROW, EvictionOrder, Prospect
from workmem.policy.s3fifo import S3Fifo
from workmem.policy.segmented_lru import SegmentedLru
from workmem.policy.value import EVEN_DEPTH, ValueOrder

EVEN = EVEN_DEPTH * 16 // BLOCK_TOKENS
"""The depth at which attention costs as much as the layers, in blocks of the traces."""
TOLD = "value+hints"
ORDERS: dict[str, Callable[[int], EvictionOrder]] = {
    "lru": lambda _: Lru(),
    "segmented_lru": lambda capacity: SegmentedLru(int(capacity * 0.8)),
    "s3fifo": S3Fifo,
    "value": lambda _: ValueOrder(even_depth=EVEN),
    TOLD: lambda _: ValueOrder(even_depth=EVEN),
}


class Mode(NamedTuple):
    """What fits into which time."""

    name: str
    shares: tuple[float, ...]
    """Capacities, as shares of the trace's distinct blocks."""
    blocks_max: int
    """Of a recorded trace, counted in every request."""
    sessions: int


QUICK = Mode("quick", (0.05, 0.2), 200_000, 150)
FULL = Mode("full", (0.02, 0.05, 0.1, 0.2, 0.4), 2_000_000, 1_000)
SMOKE = Mode("smoke", (0.2,), 2_000, 5)


class Outcome(NamedTuple):
    """What one replay gave."""

    hit_rate: float
    cost_saved: float
    evictions: int
    bigger: dict[float, float]
    """What ghosts say of the hit rate in bigger tiers, by size in capacities."""


class Tier:
    """A tier of `capacity` blocks of one byte under an eviction order."""

    def __init__(self, order: EvictionOrder, capacity: int, *, hints: bool) -> None:
        self._order = order
        self._hints = hints
        self._row_of: dict[int, int] = {}
        self._block = [NO_ROW] * capacity
        self._free = list(range(capacity))
        self._sessions: Counter[int] = Counter()
        self.ghosts = Ghosts(capacity, entries_max=1 << 20)
        self.evictions = 0

    def serve(self, request: Request) -> int:
        """Leading blocks that were here."""
        blocks, row_of = request.blocks, self._row_of
        rows: list[int] = []
        for block in blocks:
            row = row_of.get(block, NO_ROW)
            if row == NO_ROW:
                break
            rows.append(row)
        hits = len(rows)
        self._order.touch(rows)
        held = set(rows)
        for block in blocks[hits:]:
            key = block.to_bytes(8, "little")
            ghost = self.ghosts.find(key)
            row = self._room(held)
            if row == NO_ROW:
                break
            self.ghosts.count(key, ghost)
            is_back = ghost is not None and ghost.size <= REGRET_REACH
            if ghost is not None and is_back:
                self._order.regret(ghost.bytes, was_used=ghost.was_used)
            self._order.insert(row, rows[-1] if rows else NO_ROW, 1, is_back=is_back)
            self._block[row] = block
            row_of[block] = row
            rows.append(row)
            held.add(row)
        for row in rows:
            self._order.unpark(row)
        if self._hints:
            self._advise(request, rows)
        return hits

    def _room(self, held: set[int]) -> int:
        if self._free:
            return self._free.pop()
        row = self._order.pick(held.__contains__)
        if row != NO_ROW:
            was_used = self._order.was_used(row)
            self._order.remove(row)
            block = self._block[row]
            del self._row_of[block]
            self.ghosts.left(block.to_bytes(8, "little"), 1, was_used=was_used)
            self.evictions += 1
        return row

    def _advise(self, request: Request, rows: list[int]) -> None:
        if request.goes_on:
            self._order.advise(rows, prospect=Prospect.EXPECTED)
        if request.is_last:
            # What other sessions used as well is not done with: those are its leading blocks.
            own = [row for row in rows if self._sessions[self._block[row]] == 0]
            self._order.advise(own, prospect=Prospect.DONE)
            self._sessions.update(request.blocks)


def replay(trace: Trace, name: str, capacity: int) -> Outcome:
    """All requests in turn."""
    tier = Tier(ORDERS[name](capacity), capacity, hints=name == TOLD)
    hits = [tier.serve(request) for request in trace.requests]
    asked = sum(len(request.blocks) for request in trace.requests)
    bigger = {size: (sum(hits) + more) / asked for size, more in tier.ghosts.hits().items()}
    return Outcome(sum(hits) / asked, _saved(trace, hits), tier.evictions, bigger)


def oracle(trace: Trace, capacity: int) -> Outcome:
    """Belady's order with the choice not to admit, over blocks of one size."""
    never = len(trace.requests)
    following: list[list[int]] = [[] for _ in trace.requests]
    last: dict[int, int] = {}
    for at in range(never - 1, -1, -1):
        blocks = trace.requests[at].blocks
        following[at] = [last.get(block, never) for block in blocks]
        last.update(dict.fromkeys(blocks, at))
    use: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    hits, evictions = [], 0
    for request, nexts in zip(trace.requests, following, strict=True):
        hit = 0
        while hit < len(nexts) and request.blocks[hit] in use:
            hit += 1
        hits.append(hit)
        for depth, (block, then) in enumerate(zip(request.blocks, nexts, strict=True)):
            if block not in use:
                while len(use) >= capacity and use.get(heap[0][2]) != -heap[0][0]:
                    heapq.heappop(heap)
                if then == never or (len(use) >= capacity and -heap[0][0] <= then):
                    break
                if len(use) >= capacity:
                    del use[heapq.heappop(heap)[2]]
                    evictions += 1
            use[block] = then
            heapq.heappush(heap, (-then, -depth, block))
    asked = sum(len(request.blocks) for request in trace.requests)
    return Outcome(sum(hits) / asked, _saved(trace, hits), evictions, {})


def _cost(blocks: int) -> float:
    """To compute that many leading blocks."""
    return blocks + blocks * (blocks - 1) / 2 / EVEN


def _saved(trace: Trace, hits: list[int]) -> float:
    whole = sum(_cost(len(request.blocks)) for request in trace.requests)
    return sum(map(_cost, hits)) / whole


def _names(trace: Trace) -> list[str]:
    """Orders that differ on this trace: without sessions there is nothing to be told."""
    has_sessions = any(request.goes_on or request.is_last for request in trace.requests)
    return [*(name for name in ORDERS if name != TOLD or has_sessions), "oracle"]


def measure(traces: list[Trace], mode: Mode, journal: Journal, console: Console) -> list[dict[str, Any]]:
    """Every trace, capacity and order."""
    rows: list[dict[str, Any]] = []
    for trace in traces:
        distinct = len({block for request in trace.requests for block in request.blocks})
        for share in mode.shares:
            capacity = max(1, int(distinct * share))
            for name in _names(trace):
                unit = f"{trace.name}/{share}/{name}"
                if unit not in journal.done:
                    console.print(f"[dim]{unit}[/]", highlight=False)
                    began = time.perf_counter()
                    got = oracle(trace, capacity) if name == "oracle" else replay(trace, name, capacity)
                    journal.record(
                        unit,
                        trace=trace.name,
                        share=share,
                        capacity_blocks=capacity,
                        order=name,
                        seconds=time.perf_counter() - began,
                        **got._asdict(),
                    )
                rows.append(journal.done[unit])
    return rows


def table(trace: Trace, rows: list[dict[str, Any]], mode: Mode) -> Table:
    asked = sum(len(request.blocks) for request in trace.requests)
    shown = Table(title=f"{trace.name}: {len(trace.requests)} requests, {asked} blocks ({trace.about})")
    shown.add_column("order")
    for share in mode.shares:
        shown.add_column(f"{share:.0%} of blocks", justify="right")
    by_place = {(row["order"], row["share"]): row for row in rows if row["trace"] == trace.name}
    untold = [name for name in ORDERS if name != TOLD]
    best = {share: max(by_place[name, share]["hit_rate"] for name in untold) for share in mode.shares}
    for name in _names(trace):
        cells = []
        for share in mode.shares:
            row = by_place[name, share]
            cell = f"{row['hit_rate']:.3f} [dim]({row['cost_saved']:.3f})[/]"
            is_best = name in untold and row["hit_rate"] == best[share]
            cells.append(f"[bold]{cell}[/]" if is_best else cell)
        shown.add_row(name, *cells)
    return shown


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    for mode, text in ((QUICK, "at most 3 minutes"), (FULL, "all of it (default)"), (SMOKE, "does it run?")):
        which.add_argument(f"--{mode.name}", dest="mode", action="store_const", const=mode, help=text)
    parser.add_argument("--workloads", type=Path, help="folder of traces with block ids")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--out", type=Path, help="result file; default bench/results/policy-MODE.json")
    parser.set_defaults(mode=FULL)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    mode: Mode = arguments.mode
    out = arguments.out or RESULTS / f"policy-{mode.name}.json"
    machine = environment()
    traces = [generated(arguments.seed, mode.sessions)]
    if arguments.workloads:
        traces += recorded(arguments.workloads, arguments.seed, mode.blocks_max)
    config = {
        "mode": mode._asdict(),
        "seed": arguments.seed,
        "even_depth_blocks": EVEN,
        "traces": {trace.name: [trace.about, len(trace.requests)] for trace in traces},
    }
    journal = Journal(out.with_suffix(".partial.jsonl"), config | {"commit": machine["commit"]})
    console = Console()
    rows = measure(traces, mode, journal, console)
    write_result(out, {"bench": "policy", "machine": machine, "config": config, "rows": rows})
    journal.close()
    for trace in traces:
        console.print(table(trace, rows, mode))
    console.print("hit rate (cost saved); bold: best order that is told nothing")
    console.print(f"written to {out}")


if __name__ == "__main__":
    main()
