"""`workmem demo`: agents at work with reuse off, on, and after a restart."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter, validators
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from workmem.cli.options import Settings
from workmem.demo import report, show
from workmem.demo.phase import Phase, Turn
from workmem.demo.runs import airline_runs, choose

TOKENS_MAX = 66_000
TOKENS_MAX_QUICK = 26_000
AGENTS_QUICK = 3

AtLeastOne = Annotated[int, Parameter(validator=validators.Number(gte=1))]


def demo(
    *,
    quick: bool = False,
    agents: AtLeastOne = 5,
    concurrency: AtLeastOne = 2,
    max_tokens: AtLeastOne = 16,
    model: str = "",
    json: Path | None = None,
    settings: Settings = (),
) -> None:
    """Let agents work over recorded airline conversations and show what reuse changes.

    Three servers are started one after the other on 127.0.0.1: with reuse off, with reuse on, and
    again over what the second left on the ssd. Each agent sends its history up to the next assistant
    message and goes on with the recorded one, so all three see the same prompts.

    Parameters
    ----------
    quick
        Fewer and shorter conversations: about a third of the time.
    agents
        Conversations going on together.
    concurrency
        Most requests in flight at a time.
    max_tokens
        Tokens generated per turn.
    model
        Model to serve; the configured one if left out.
    json
        File to write all measurements to.
    settings
        More settings for the servers, as in `serve --set section.key=value`.

    """
    runs = choose(
        airline_runs(),
        agents=min(agents, AGENTS_QUICK) if quick else agents,
        tokens_max=TOKENS_MAX_QUICK if quick else TOKENS_MAX,
    )
    plan = show.Plan(
        runs=tuple(runs),
        settings=show.settings(model, settings),
        max_tokens=max_tokens,
        concurrency=concurrency,
    )
    console = Console()
    phases = _with_progress(plan, console)
    rows = report.summarise(phases)
    title = f"{len(runs)} agents, {plan.turns} turns, recorded airline conversations (tau-bench, MIT)"
    console.print(report.table(rows, title))
    if json is not None:
        body = {"title": title, "plan": {"settings": plan.settings, "concurrency": concurrency}, "rows": rows}
        json.write_bytes(msgspec.json.format(msgspec.json.encode({**body, "phases": phases})) + b"\n")


def _with_progress(plan: show.Plan, console: Console) -> tuple[Phase, ...]:
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("turns"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, disable=not sys.stderr.isatty() and not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=plan.turns * len(show.PHASES))

        def on_phase(name: str) -> None:
            progress.update(task, description=name)

        def on_turn(turn: Turn) -> None:
            del turn
            progress.advance(task)

        return asyncio.run(show.run(plan, on_phase=on_phase, on_turn=on_turn))
