r"""What prompts lose on their way to an engine, whether it is named, what canonical prompts bring back, and what that costs.

    python bench/prompt.py --quick --model MODEL --vllm-python VENV/bin/python --kvlint-python VENV/bin/python \
        --cachelint-python VENV/bin/python --prefixguard-python VENV/bin/python --promptcachelint-python VENV/bin/python \
        --vllm-router-python VENV/bin/python --smg-python VENV/bin/python

Seven parts:

- *traps*: 13 pairs of requests that ought to share a prefix and do not, and a healthy pair. What do we, and linters that
  others have written, say of each? And what would an engine find of the second request, as it came and canonical?
- *clients*: which share of turn n+1 is in the turns before it, by client, as it came, with each rule, and with all.
- *mcp*: tool lists of real servers, shuffled, and in their next versions. Only with `--workloads`.
- *latency*: what our gateway adds to the time of a first byte, a 75 kB request before a server that answers at once.
- *streams*: 1,000 streams at once.
- *rates*: requests a second through each gateway before the same server.
- *ttft*: a turn with its keys shuffled over one without, on the embedded engine, and on vLLM behind us.

A peer that cannot run is in `absent`, with its command and its error. A run that is ended early, or had too little time,
goes on when the same command runs again.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import prompt_hits
import prompt_load
import prompt_mcp
import prompt_peers
import prompt_report
import prompt_ttft
from harness import (
    RESULTS,
    Budget,
    Journal,
    end_on_sigterm,
    end_run,
    environment,
    folder_of_run,
    mode_of,
    parser_of,
    write_result,
)
from prompt_load import Load
from prompt_traps import traps
from prompt_ttft import Turns
from rich.console import Console
from vllm_systems import fastest_dtype

from workmem.core.errors import EngineError
from workmem.prompt.dialects.chat import CHAT

EXCERPTS = Path(__file__).parents[1] / "tests" / "data" / "clients"
"""Requests of clients, cut short: shapes are theirs, shares of so little text say less."""
SYSTEMS = ("embedded", "vLLM")
LEAST_S = 20.0
"""Of time, to begin with another part."""


class Mode(NamedTuple):
    """What fits into which time."""

    name: str
    load: Load
    turns: Turns
    budget_s: float


QUICK = Mode("quick", Load(200, 1000, 20, 0.25, 4.0, 3, 16), Turns(6, 4), 570.0)
FULL = Mode("full", Load(2000, 1000, 40, 0.25, 10.0, 10, 16), Turns(24, 6), 3400.0)
SMOKE = Mode("smoke", Load(5, 20, 4, 0.05, 0.5, 1, 4), Turns(1, 1), 3000.0)


class OutOfTime(Exception):
    """The budget would not hold for what comes next."""


class Bench:
    """All parts, one after the other."""

    def __init__(
        self, mode: Mode, arguments: argparse.Namespace, folder: Path, journal: Journal, console: Console
    ) -> None:
        self._mode = mode
        self._arguments = arguments
        self._folder = folder
        self._journal = journal
        self._console = console
        self._budget = Budget(mode.budget_s)
        self._traps = traps(arguments.seed)
        self._prompts: prompt_hits.Prompts | None = None
        self.skipped: list[str] = []

    def run(self) -> None:
        """Measure everything that fits into the budget; nothing is left running."""
        parts: list[tuple[str, Callable[[], None]]] = [
            ("traps", self._said),
            ("hits", self._hits),
            ("clients", self._clients),
            ("mcp", self._mcp),
            ("latency", self._latency),
            ("streams", self._streams),
            *((f"ttft|{system}", lambda system=system: self._ttft(system)) for system in SYSTEMS),
            ("rates", self._rates),
            *((f"said|{peer.name}", lambda peer=peer: self._peer(peer)) for peer in self.peers()),
        ]
        for name, part in parts:
            if name in self._journal.done:
                continue
            if self._budget.left_s < LEAST_S:
                self._skip(f"no time for {name}")
                continue
            self._console.log(f"{name} ({self._budget.left_s:.0f} s left)")
            try:
                part()
            except OutOfTime as error:
                self._skip(str(error))

    def _skip(self, why: str) -> None:
        self.skipped.append(why)
        self._console.log(why)

    # -- what is said of traps, and what an engine would find

    def _said(self) -> None:
        self._journal.record("traps", said=prompt_peers.ours(self._traps, CHAT))

    def peers(self) -> list[prompt_peers.Peer]:
        """Linters whose Python is given."""
        named = {name: getattr(self._arguments, f"{name}_python") for name in prompt_peers.NAMING}
        return [prompt_peers.Peer(name, python) for name, python in named.items() if python is not None]

    def _peer(self, peer: prompt_peers.Peer) -> None:
        try:
            version, said = prompt_peers.of_peer(peer, self._traps, self._folder, self._arguments.model)
        except (OSError, ValueError) as error:
            command = prompt_peers.command_of(peer, Path("PAIRS"), Path("TOKENIZER"))
            self._journal.record(
                f"said|{peer.name}", absent={"command": " ".join(command), "error": str(error)}
            )
        else:
            self._journal.keep_versions(peer.name, {peer.name: version})
            self._journal.record(f"said|{peer.name}", said=said)

    def _tokens(self) -> prompt_hits.Prompts:
        if self._prompts is None:
            self._prompts = prompt_hits.Prompts(self._arguments.model)
        return self._prompts

    def _hits(self) -> None:
        self._journal.record("hits", rows=prompt_hits.hits_of_traps(self._tokens(), self._traps, CHAT))

    def _clients(self) -> None:
        folder = self._arguments.workloads
        clients = prompt_hits.recorded(folder / "clients" if folder else EXCERPTS)
        rows = prompt_hits.hits_of_clients(self._tokens(), clients)
        self._journal.record("clients", rows=rows, excerpts=folder is None)

    def _mcp(self) -> None:
        if self._arguments.workloads is None:
            self._journal.record("mcp", absent={"error": "no folder of tool lists was given (--workloads)"})
            return
        lists = prompt_mcp.lists_in(self._arguments.workloads / "mcp")
        seed = self._arguments.seed
        self._journal.record(
            "mcp",
            lists=prompt_mcp.stable_lists(self._tokens(), lists, CHAT, seed),
            upgrades=prompt_mcp.upgrades(self._tokens(), lists, CHAT, seed),
        )

    # -- what the gateway adds

    def _latency(self) -> None:
        pairs = asyncio.run(prompt_load.added_latency(self._mode.load, self._arguments.seed, self._folder))
        self._journal.record("latency", pairs=pairs)

    def _streams(self) -> None:
        found = asyncio.run(prompt_load.many_streams(self._mode.load, self._arguments.seed, self._folder))
        self._journal.record("streams", found=found)

    def _rates(self) -> None:
        given = self._arguments
        others = prompt_load.routers(given.vllm_router_python, given.sglang_router_python, given.smg_python)
        rows, absent = asyncio.run(prompt_load.rates(self._mode.load, given.seed, self._folder, others))
        self._journal.record("rates", rows=rows, absent=absent)

    # -- time to first token

    def _ttft(self, system: str) -> None:
        if system == "vLLM" and self._arguments.vllm_python is None:
            error = "no environment with vLLM was given (--vllm-python)"
            self._journal.record(f"ttft|{system}", absent={"error": error})
            return
        try:
            asyncio.run(self._pairs(system))
        except (OSError, EngineError) as error:
            command = "workmem serve"
            if system == "vLLM":
                words = prompt_ttft.vllm_command(
                    self._arguments.model, self._arguments.vllm_python, 0, self._dtype
                )
                command = " ".join(words)
            self._journal.record(f"ttft|{system}", absent={"command": command, "error": str(error)[-400:]})

    @property
    def _dtype(self) -> str:
        return fastest_dtype(environment()["cpu_flags"])

    async def _pairs(self, system: str) -> None:
        turns, model = self._mode.turns, self._arguments.model
        left = [n for n in range(turns.pairs) if f"ttft|{system}|{n}" not in self._journal.done]
        running = (
            prompt_ttft.embedded(model, self._folder / "embedded.log")
            if system == "embedded"
            else prompt_ttft.before_vllm(model, self._arguments.vllm_python, self._folder, self._dtype)
        )
        async with running as url:
            slowest, begin = 0.0, self._budget.left_s
            async for pair in prompt_ttft.measure(url, turns, self._arguments.seed, left):
                self._journal.record(f"ttft|{system}|{pair['pair']}", **pair)
                slowest, begin = max(slowest, begin - self._budget.left_s), self._budget.left_s
                if self._budget.left_s < 1.3 * slowest and pair["pair"] != left[-1]:
                    raise OutOfTime(f"no time for more pairs of ttft on {system}")
        self._journal.record(f"ttft|{system}", pairs=turns.pairs)


def main() -> None:
    """See the module."""
    end_on_sigterm()
    parser = parser_of(__doc__ or "", "prompt", quick=QUICK, full=FULL, smoke=SMOKE)
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vLLM for CPU")
    for name in prompt_peers.NAMING:
        parser.add_argument(f"--{name}-python", type=Path, help=f"Python of an environment with {name}")
    for name in ("vllm-router", "sglang-router", "smg"):
        parser.add_argument(f"--{name}-python", type=Path, help=f"Python of an environment with {name}")
    arguments = parser.parse_args()
    mode: Mode = mode_of(arguments)
    out: Path = arguments.out or RESULTS / f"prompt-{mode.name}.json"
    console = Console(stderr=True)
    config = {
        "mode": mode.name,
        "load": mode.load._asdict(),
        "turns": mode.turns._asdict(),
        "seed": arguments.seed,
        "model": arguments.model.name,
        "workloads": arguments.workloads is not None,
    }
    journal = Journal(out.with_suffix(".journal"), config)
    folder = folder_of_run(out, is_new=not journal.done)
    machine = environment()
    bench = Bench(mode, arguments, folder, journal, console)
    bench.run()
    found = prompt_report.summarise(journal.done)
    absent = prompt_report.absent(journal.done, given=[peer.name for peer in bench.peers()])
    body = {
        "bench": "prompt",
        "config": config,
        "machine": machine,
        "peers": journal.versions,
        **found,
        "absent": absent,
        "skipped": bench.skipped,
        "raw": [
            entry for unit, entry in journal.done.items() if unit.startswith(("ttft|", "latency", "rates"))
        ],
    }
    write_result(out, body)
    for table in prompt_report.tables(found):
        console.print(table)
    console.print(end_run(journal, out, folder, bench.skipped))


if __name__ == "__main__":
    main()
