"""`workmem cluster doctor`: what operators get wrong, checked."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.markup import escape
from rich.table import Table

from workmem.cli.main import FAILED
from workmem.cli.options import ConfigFile, Settings
from workmem.cli.store_folder import console_out
from workmem.cluster.doctor import case_of, examine
from workmem.cluster.findings import Verdict
from workmem.config import load

AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")]
_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.WRONG: "bold red"}


def doctor(*, json: AsJson = False, config: ConfigFile = None, sets: Settings = ()) -> int:
    """Check this host and the pool it is set to. Exit code 1 where something is wrong.

    Masters' flags are seen on the hosts that they run on: run it there as well.
    """
    settings = load(config, sets=sets).config
    findings = examine(case_of(settings.cluster, settings.store.below))
    is_wrong = any(finding.verdict is Verdict.WRONG for finding in findings)
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode({"findings": findings})).decode() + "\n")
        return FAILED if is_wrong else 0
    console = console_out()
    table = Table("check", "", "found, and what to do", box=None, pad_edge=False)
    for finding in findings:
        style = _STYLES[finding.verdict]
        table.add_row(finding.check, f"[{style}]{finding.verdict}[/]", escape(finding.found))
        if finding.advice:
            table.add_row("", "", f"[bold]->[/] {escape(finding.advice)}")
    console.print(table)
    counts = {verdict: sum(finding.verdict is verdict for finding in findings) for verdict in Verdict}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return FAILED if is_wrong else 0
