"""The demo from start to end: three servers, one load, one table."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec

from workmem.demo.phase import Load, Phase, Turn, warm_up, work
from workmem.demo.runs import AgentRun
from workmem.demo.server import running_server

VRAM = "256MiB"
"""Too small for all agents at once, so that some hits come from dram."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. `settings` go to every server as `--set`."""

    runs: tuple[AgentRun, ...]
    settings: tuple[str, ...]
    max_tokens: int = 16
    concurrency: int = 2

    @property
    def turns(self) -> int:
        """Requests of one phase."""
        return sum(len(run.turns) for run in self.runs)


PHASES: tuple[tuple[str, bool], ...] = (("reuse off", False), ("reuse on", True), ("after a restart", True))


async def run(
    plan: Plan, *, on_phase: Callable[[str], None], on_turn: Callable[[Turn], None]
) -> tuple[Phase, ...]:
    """Run all phases; the servers with reuse on share one ssd folder, which is gone afterwards."""
    phases: list[Phase] = []
    with tempfile.TemporaryDirectory(prefix="workmem-demo-") as folder:
        for name, reuse in PHASES:
            on_phase(name)
            ssd = Path(folder) / ("kept" if reuse else "unused")
            settings = (*plan.settings, f"store.ssd.path={ssd}")
            started = time.perf_counter()
            async with running_server(settings, Path(folder) / "server.log") as url:
                load = await _load(plan, url)
                await warm_up(load, url)
                start_s = time.perf_counter() - started
                turns, wall_s = await work(load, url, reuse=reuse, on_turn=on_turn)
            phases.append(Phase(name=name, start_s=start_s, wall_s=wall_s, turns=turns))
    return tuple(phases)


async def _load(plan: Plan, url: str) -> Load:
    """Ask the server what it serves: the first model it lists."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        listed = await response.json()
    return Load(
        runs=plan.runs,
        model=listed["data"][0]["id"],
        max_tokens=plan.max_tokens,
        concurrency=plan.concurrency,
    )


def settings(model: str, extra: Sequence[str]) -> tuple[str, ...]:
    """Name the servers' settings. Later ones win, so the caller's `extra` come last."""
    named = (f"engine.model={model}",) if model else ()
    return (*named, f"engine.vram_bytes={VRAM}", *extra)
