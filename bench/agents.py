r"""Agents that wait for tools, on a vLLM whose memory is a quarter of what they hold: alone, with us, with each peer.

    python bench/agents.py --quick --model MODEL --vllm-python VENV/bin/python \
        --lmcache-python VENV/bin/python --mooncake-python VENV/bin/python

Sessions have the shapes of recorded coding agents and of tau-bench conversations: first prompt, growth, cut-backs, answers
and gaps, all of them a sixteenth of what was recorded, so that an engine on a few cores is as busy as a GPU with the
originals. A turn is due a gap after the answer before it; its clock starts then. What an answer says is recorded
text too, so that every arm sees the same prompts.

Arms run one after the other, each with a fresh engine and a fresh store, in reverse order every second repetition. Two
of them are ours: with the levers that a gateway pulls (session, a pin for as long as a tool is likely to take, who comes
back from a tool before who begins), and without any, which says what comes of holding contexts and what of policy.

A run that is ended early, or had too little time, goes on when the same command runs again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from agents_load import CODING, GAP_MAX_S, SCALE, Load, Size, load_of
from agents_report import PLAIN, compare, summarise, table, typical
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
from rich.console import Console
from systems import Worker, WorkerFailed
from vllm_systems import (
    OURS,
    SOURCE,
    Kind,
    Place,
    add_dtype,
    add_pythons,
    kinds,
    new_tag,
    ours,
    sweep,
    system_of,
)

POOL_SHARE = 0.25
BLOCK_TOKENS = 32
"""The least that vLLM takes on a CPU: contexts are a sixteenth, and so are 512 tokens of a block."""
CHUNK_TOKENS = 32
"""Of LMCache, whose 256 are scaled along: a block."""
WARM_UP = list(range(1000, 1300))
"""Token ids that no text of the load begins with: who computes first pays for what happens once."""
BACK_PRIORITY = 20
"""Of a turn whose session is known: a little to compute, and an agent that waits. Others are overtaken for 20 s at most."""
START_S, ASK_S, CLOSE_S = 300.0, 300.0, 120.0


class Mode(NamedTuple):
    """What fits into which time."""

    name: str
    size: Size
    in_flight: int
    """Requests that an engine computes at a time, at most."""
    repetitions: int
    dram_gib: int
    """Of every memory tier: all contexts fit."""
    budget_s: float


QUICK = Mode("quick", Size(8, 5, 1600, 10.0), 2, 1, 2, 560.0)
FULL = Mode("full", Size(16, 7, 4000, 20.0), 3, 2, 4, 3400.0)
SMOKE = Mode("smoke", Size(4, 3, 1500, 3.0), 1, 1, 1, 3000.0)


class Bench:
    """All arms, one at a time."""

    def __init__(
        self,
        mode: Mode,
        wanted: list[Kind],
        shared: dict[str, Any],
        load: Load,
        folder: Path,
        journal: Journal,
        console: Console,
    ) -> None:
        self._mode = mode
        self._kinds = {kind.name: kind for kind in wanted if not kind.why_absent}
        self._shared = shared
        self._load = load
        self._folder = folder
        self._journal = journal
        self._console = console
        self._budget = Budget(mode.budget_s)
        self.absent: dict[str, dict[str, Any]] = {
            kind.name: {"error": kind.why_absent} for kind in wanted if kind.why_absent
        }
        self.skipped: list[str] = []

    def run(self) -> None:
        """All repetitions that the budget holds; nothing is left running."""
        for number in range(self._mode.repetitions):
            for name in in_turns(list(self._kinds), number):
                if name in self.absent or _unit(name, number) in self._journal.done:
                    continue
                if self._budget.left_s < self._expected_s(name):
                    self.skipped.append(f"no time left for repetition {number + 1} of {name}")
                    continue
                self._console.log(f"{name}, repetition {number + 1} ({self._budget.left_s:.0f} s left)")
                self._take(self._kinds[name], number)

    def _expected_s(self, name: str) -> float:
        """What a repetition took before; of a new one, half of the slowest: that is vLLM alone."""
        took = {entry["arm"]: entry["took_s"] for entry in self._journal.done.values()}
        return took.get(name, max(took.values(), default=0.0) / 2)

    def _take(self, kind: Kind, number: int) -> None:
        """One repetition of one arm, from nothing to nothing."""
        begin = time.monotonic()
        folder = self._folder / kind.name.lower().replace(" ", "-").replace(",", "")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tag = new_tag()
        place = Place(folder, Path(tempfile.gettempdir()) / tag, tag)
        place.sockets.mkdir(mode=0o700)
        worker, command = None, {}
        try:
            system = system_of(kind, self._shared, place)
            command = {
                "python": str(system.python),
                "servers": [" ".join(server["command"]) for server in system.options.get("servers", [])],
                "kv_transfer_config": system.options.get("kv_transfer_config"),
            }
            worker = Worker(system, self._folder / f"{folder.name}.log", START_S)
            self._journal.keep_versions(kind.name, worker.versions)
            self._warm(worker)
            found = worker.ask(
                3 * self._mode.budget_s, do="play", sessions=self._sessions(has_levers=kind.name == OURS)
            )
            self._keep(kind.name, number, found, time.monotonic() - begin)
            worker.ask(CLOSE_S, do="close")
        except (WorkerFailed, OSError) as error:
            self._console.log(f"{kind.name} is absent: {error}")
            self.absent[kind.name] = {"error": str(error)} | command
        finally:
            if worker is not None:
                worker.close()
            sweep(tag)
            shutil.rmtree(place.sockets, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)

    def _warm(self, worker: Worker) -> None:
        """Pay for what happens only once."""
        for _ in range(2):
            worker.ask(ASK_S, do="ask", prompt=WARM_UP, max_tokens=8)
        worker.ask(ASK_S, do="settle")
        if not worker.ask(ASK_S, do="reset")["is_empty"]:
            raise WorkerFailed("vLLM's prefix cache could not be emptied: something holds its blocks")

    def _sessions(self, *, has_levers: bool) -> list[dict[str, Any]]:
        return [
            {
                "start_s": session.start_s,
                "turns": [
                    {
                        "prompt": turn.prompt,
                        "max_tokens": turn.max_tokens,
                        "gap_s": turn.gap_s,
                        "params": said(session.name, number, pin_s(self._load)) if has_levers else None,
                    }
                    for number, turn in enumerate(session.requests)
                ],
            }
            for session in self._load.sessions
        ]

    def _keep(self, name: str, number: int, found: dict[str, Any], took_s: float) -> None:
        requests: list[dict[str, Any]] = []
        sources: Counter[str] = Counter()
        hints: Counter[str] = Counter()
        for session, answers in zip(self._load.sessions, found["sessions"], strict=True):
            for turn, (asked, answer) in enumerate(zip(session.requests, answers, strict=True)):
                sources.update(answer.pop("sources") or {})
                hints.update(outcome["outcome"] for outcome in answer.pop("hints") or ())
                known = {"session": session.name, "turn": turn, "prompt_tokens": len(asked.prompt)}
                requests.append(known | {"new": asked.new} | answer)
        first = min(request["due_s"] for request in requests)
        self._journal.record(
            _unit(name, number),
            arm=name,
            repetition=number,
            took_s=took_s,
            wall_s=max(request["end_s"] for request in requests) - first,
            sources=dict(sources),
            hints=dict(hints),
            counts=found["counts"],
            requests=requests,
        )


def _unit(name: str, number: int) -> str:
    """Key in the journal."""
    return f"{name}|{number}"


def pin_s(load: Load) -> float:
    """For how long a gateway asks: nine tools of ten have answered by then, and the turn may wait as long again."""
    return 2 * typical(load.tool_gaps_s, 0.9)


def said(session: str, turn: int, seconds: float) -> dict[str, Any]:
    """What a gateway sends with a request of an agent: it knows which sessions it has seen before."""
    pin = {"action_id": "tool", "action_type": "Pin", "action_version": "1", "payload": {"ttl_s": seconds}}
    return {
        "workmem": {"session_id": session, "priority": BACK_PRIORITY if turn else 0, "actions": [pin]},
    }


def with_levers(shared: dict[str, Any], place: Place) -> dict[str, Any]:
    """Ours, whose pins end by their time, and whose scheduler listens."""
    options = ours(shared, place)
    options["llm"] |= {"scheduler_cls": "workmem.plugins.vllm_scheduler.AgentScheduler"}
    options["kv_transfer_config"]["kv_connector_extra_config"] |= {"vllm.retention": "ttl"}
    return options


def arms_of(arguments: argparse.Namespace) -> list[Kind]:
    """VLLM alone, ours with and without levers, the peers."""
    found: list[Kind] = []
    for kind in kinds(arguments.vllm_python, arguments.lmcache_python, arguments.mooncake_python):
        found += (
            [kind._replace(start=with_levers), kind._replace(name=PLAIN)] if kind.name == OURS else [kind]
        )
    return [kind for kind in found if not arguments.only or kind.name in arguments.only]


def shared_options(arguments: argparse.Namespace, mode: Mode, load: Load) -> dict[str, Any]:
    """What all arms have in common: model, cores, and the engine's memory."""
    cores = sorted(os.sched_getaffinity(0))
    context = load.longest + 1
    pool = max(int(POOL_SHARE * load.working_set(BLOCK_TOKENS)), context + BLOCK_TOKENS)
    return {
        "model": str(arguments.model),
        "dtype": arguments.dtype,
        "threads": len(cores),
        "cores": ",".join(map(str, cores)),
        "max_context": context,
        "source": str(SOURCE),
        "nudge": WARM_UP[:7],
        # One is the null block.
        "blocks": -(-pool // BLOCK_TOKENS) + 1,
        "engine": {"block_size": BLOCK_TOKENS, "max_num_seqs": mode.in_flight},
        "dram_gib": mode.dram_gib,
        "chunk_tokens": CHUNK_TOKENS,
    }


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__ or "", "agents", quick=QUICK, full=FULL, smoke=SMOKE)
    add_pythons(parser)
    add_dtype(parser, environment()["cpu_flags"])
    parser.add_argument("--folder", type=Path, help="disk the tiers live on; default: the temporary one")
    parser.add_argument("--only", action="append", help="only this arm; may be repeated")
    return parser.parse_args(words)


def config_of(
    arguments: argparse.Namespace, mode: Mode, load: Load, shared: dict[str, Any]
) -> dict[str, Any]:
    """All that decides what is measured."""
    working_set = load.working_set(BLOCK_TOKENS)
    return {
        "mode": arguments.mode._asdict() | {"size": mode.size._asdict()},
        "seed": arguments.seed,
        "model": arguments.model.name,
        "dtype": arguments.dtype,
        "texts": arguments.workloads.name if arguments.workloads else "of the package",
        "scale": SCALE,
        "gap_max_s": GAP_MAX_S / SCALE,
        "pin_s": pin_s(load),
        "back_priority": BACK_PRIORITY,
        "coding": CODING,
        "block_tokens": BLOCK_TOKENS,
        "working_set": working_set,
        "pool_tokens": (shared["blocks"] - 1) * BLOCK_TOKENS,
        "prompt_tokens": load.prompt_tokens,
        "new_tokens": load.new_tokens,
        "only": arguments.only,
    }


def main() -> None:
    arguments = parsed()
    mode: Mode = mode_of(arguments)
    console = Console()
    out = arguments.out or RESULTS / f"agents-{mode.name}.json"
    end_on_sigterm()
    machine = environment()
    load = load_of(mode.size, arguments.model, arguments.workloads, arguments.seed)
    wanted = arms_of(arguments)
    shared = shared_options(arguments, mode, load)
    config = config_of(arguments, mode, load, shared)
    journal = Journal(out.with_suffix(".partial.jsonl"), config | {"commit": machine["commit"]})
    folder = folder_of_run(out, arguments.folder, is_new=False)
    bench = Bench(mode, wanted, shared, load, folder, journal, console)
    bench.run()
    rows = summarise(journal.done)
    compared = compare(rows)
    body = {
        "bench": "agents",
        "machine": machine | {"load_1m_end": os.getloadavg()[0]},
        "config": config,
        "systems": [kind.name for kind in wanted],
        "versions": journal.versions,
        "absent": bench.absent,
        "rows": rows,
        "compared": compared,
        "skipped": bench.skipped,
        "raw": list(journal.done.values()),
    }
    write_result(out, body)
    for shown in table(rows, compared):
        console.print(shown)
    console.print(end_run(journal, out, folder, bench.skipped))


if __name__ == "__main__":
    main()
