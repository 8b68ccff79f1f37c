"""`workmem doctor URL`: what a running server does with prompts that come again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter, validators
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from workmem.cli.main import FAILED, MISCONFIGURED
from workmem.cli.store_folder import console_out
from workmem.gateway.key_file import key_to_send
from workmem.probing.examine import Examined, Target, examine, is_sound, look
from workmem.probing.findings import Verdict
from workmem.probing.probe import Plan
from workmem.probing.server import Server

_STYLES = {
    Verdict.OK: "green",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.UNKNOWN: "dim",
}


def doctor(
    url: str,
    /,
    *,
    model: str = "",
    key_file: Path | None = None,
    tokens: Annotated[int, Parameter(validator=validators.Number(gte=200, lte=100_000))] = 1200,
    timeout: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 120.0,
    yes: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Probe a running server with some thirty small requests. Exit code 1 where something has to be mended.

    It says which APIs the server has, whether it reports cached tokens, whether growing conversations hit,
    its block size and minimum, where its template puts tools, and whether thinking, tools' order and a salt
    change what is reused. The requests cost tokens: what they cost at most is said first, and asked.

    Parameters
    ----------
    url
        The server, such as http://127.0.0.1:8000.
    model
        Which of its models; the first one that it lists if left out.
    key_file
        File whose first line is the API key, where the server asks for one.
    tokens
        Length of the longest prompt. More finds larger blocks and minimums.
    timeout
        Seconds that an answer may take.
    yes
        Do not ask whether to go on.
    json
        Print JSON. Needs --yes.
    """
    key = "" if key_file is None else key_to_send(key_file, "--key-file")
    target = look(Server(url, key=key, timeout_s=timeout), model)
    plan = Plan(long_tokens=tokens)
    notes = Console(stderr=True, highlight=False)
    notes.print(_cost(target, plan), soft_wrap=True)
    if not yes and not (sys.stdin.isatty() and not json and _agreed(notes)):
        notes.print("nothing was asked; --yes goes on without a question")
        return MISCONFIGURED
    with notes.status("asking ...") as status:
        examined = examine(target, plan, on_step=lambda name: status.update(f"asking: {escape(name)} ..."))
    if json:
        body = {"url": target.server.url, "model": target.model, "kind": target.kind} | examined._asdict()
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(body)).decode() + "\n")
    else:
        _show(examined)
    return 0 if is_sound(examined.findings) else FAILED


def _cost(target: Target, plan: Plan) -> str:
    return (
        f"{escape(target.server.url)} is {escape(target.kind)}. Probing its model {escape(target.model)} takes at most "
        f"{plan.requests_max} requests, {plan.prompt_tokens:,} prompt tokens and {plan.generated_tokens:,} "
        "generated ones; half of that as a rule."
    )


def _agreed(notes: Console) -> bool:
    return notes.input("Go on? [y/N] ").strip().lower() in ("y", "yes")


def _show(examined: Examined) -> None:
    console = console_out()
    table = Table("check", "", "seen, and what to do", box=None, pad_edge=False)
    for finding in examined.findings:
        table.add_row(
            finding.check, f"[{_STYLES[finding.verdict]}]{finding.verdict}[/]", escape(finding.seen)
        )
        if finding.advice:
            table.add_row("", "", f"[bold]->[/] {escape(finding.advice)}")
    console.print(table)
    counts = {verdict: sum(one.verdict is verdict for one in examined.findings) for verdict in Verdict}
    console.print(
        f"{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}; {examined.requests} requests, "
        f"{examined.prompt_tokens:,} prompt tokens, {examined.generated_tokens:,} generated"
    )
