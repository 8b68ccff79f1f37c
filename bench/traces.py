"""Requests as lists of block numbers: recorded traces, and a generator of agent sessions.

A block number stands for a whole prefix, so two requests share one exactly as far as their lists agree.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_TOKENS = 512
"""Of every trace here: coarse, so that a replay takes seconds."""


class Request(NamedTuple):
    """One request."""

    blocks: list[int]
    goes_on: bool = False
    """It ended in a tool call, so the same session is going to ask again; known when the request ends."""
    is_last: bool = False
    """Its session ends here."""


class Trace(NamedTuple):
    """A workload."""

    name: str
    about: str
    requests: list[Request]


class _Numbers:
    """Dense numbers for prefixes."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Hashable], int] = {}

    def prefix(self, names: Iterable[Hashable]) -> list[int]:
        parent, numbers = -1, []
        for name in names:
            parent = self._known.setdefault((parent, name), len(self._known))
            numbers.append(parent)
        return numbers


def generated(seed: int, sessions: int) -> Trace:
    """Agents with tools, one-shot calls beside them, and now and then a long document that is read once."""
    chance = random.Random(seed)
    prompts = [(f"system {kind}", chance.randint(8, 28)) for kind in range(6)]
    timed: list[tuple[float, list[Hashable], bool, bool]] = []
    began_s = 0.0
    for number in range(sessions):
        began_s += chance.expovariate(1 / 20)
        name, length = chance.choice(prompts)
        path: list[Hashable] = [(name, block) for block in range(length)]
        now_s, turns = began_s, 1 + int(chance.expovariate(1 / 15))
        for turn in range(turns):
            path += [(number, turn, block) for block in range(chance.randint(1, 6))]
            goes_on = chance.random() < 0.8
            timed.append((now_s, list(path), goes_on and turn + 1 < turns, turn + 1 == turns))
            # A tool answers in seconds, a person in minutes.
            now_s += 5 + chance.lognormvariate(2.5, 1.0) if goes_on else 5 + chance.expovariate(1 / 300)
    for number in range(sessions * 8):
        name, length = prompts[number % 2]
        path = [(name, block) for block in range(length)]
        path += [("call", number, block) for block in range(chance.randint(1, 4))]
        timed.append((chance.random() * began_s, path, False, True))
    for number in range(sessions // 2):
        path = [("document", number, block) for block in range(chance.randint(40, 120))]
        timed.append((chance.random() * began_s, path, False, True))
    timed.sort(key=lambda entry: entry[0])
    numbers = _Numbers()
    requests = [Request(numbers.prefix(path), goes_on, is_last) for _, path, goes_on, is_last in timed]
    return Trace("agents", f"generated, {sessions} sessions, seed {seed}", requests)


def recorded(folder: Path, seed: int, blocks_max: int) -> Iterator[Trace]:
    """Every trace in `folder` that has block ids; nothing for files of other shapes."""
    for path in sorted(folder.rglob("*.jsonl*")):
        lines = _lines(path)
        first = next(iter(lines), {})
        if "hash_ids" in first:
            yield _request_per_line(path, blocks_max)
        elif isinstance(first.get("requests"), list) and first.get("block_size"):
            yield _session_per_line(path, seed, blocks_max)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def _name(path: Path) -> str:
    return path.name.split(".")[0]


def _request_per_line(path: Path, blocks_max: int) -> Trace:
    numbers, requests, blocks = _Numbers(), [], 0
    for entry in _lines(path):
        blocks += len(entry["hash_ids"])
        if blocks > blocks_max:
            break
        requests.append(Request(numbers.prefix(entry["hash_ids"])))
    return Trace(_name(path), f"first {len(requests)} requests, no session ids", requests)


def _session_per_line(path: Path, seed: int, blocks_max: int) -> Trace:
    """Sessions with ids of their own: they share nothing here, and their starts are drawn at random."""
    chance, numbers = random.Random(seed), _Numbers()
    timed: list[tuple[float, Request]] = []
    sessions, blocks, began_s = 0, 0, 0.0
    for session in _lines(path):
        calls = [call for call in session["requests"] if call.get("hash_runs")]
        if not calls:
            continue
        sessions += 1
        began_s += chance.expovariate(1 / 120)
        step = max(1, BLOCK_TOKENS // session["block_size"])
        for call in calls:
            ids = [first + at for first, length in call["hash_runs"] for at in range(length)]
            blocks += len(ids) // step
            names = [(sessions, number) for number in ids[step - 1 :: step]]
            goes_on, is_last = call.get("stop") == "tool_use", call is calls[-1]
            request = Request(numbers.prefix(names), goes_on and not is_last, is_last)
            timed.append((began_s + call["t"], request))
        if blocks >= blocks_max:
            break
    timed.sort(key=lambda entry: entry[0])
    about = f"{sessions} sessions, one started every 2 minutes on average, nothing shared between them"
    return Trace(_name(path), about, [request for _, request in timed])
