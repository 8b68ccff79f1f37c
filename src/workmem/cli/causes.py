"""Causes of misses on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def show_causes(console: Console, explanation: dict[str, Any]) -> None:
    """What broke the prefix of a request, where, what it cost and what to do; then what else is different."""
    causes: list[dict[str, Any]] = explanation.get("causes") or []
    for number, one in enumerate(causes):
        where = f" at [cyan]{escape(one['path'])}[/]" if one["path"] else ""
        if number == 0:
            console.print(f"[bold yellow]{one['name']}[/]{where}: {escape(one['what'])}.", soft_wrap=True)
            if cost := cost_of(explanation.get("cost")):
                console.print(f"  cost: {cost}")
            console.print(f"  fix: {escape(one['fix'])}", soft_wrap=True)
        else:
            console.print(f"  also {one['name']}{where}: {escape(one['what'])}.", soft_wrap=True)
        if one["rule"]:
            console.print(f"  rule: {one['rule']}")


def show_worst(console: Console, found: dict[str, Any]) -> None:
    """The causes that lost most, then the requests."""
    table = Table("cause", "requests", "tokens lost", "time", "first at", box=None, pad_edge=False)
    for column in (1, 2, 3):
        table.columns[column].justify = "right"
    for row in found["by_cause"]:
        cost = row["cost"]
        table.add_row(
            f"[yellow]{row['cause']}[/]",
            str(row["requests"]),
            str(cost["tokens"]),
            _time(cost),
            escape(row["path"]),
        )
    console.print(table)
    for row in found["by_cause"]:
        if row["fix"]:
            console.print(f"[yellow]{row['cause']}[/]: {escape(row['fix'])}", soft_wrap=True)
    console.print()
    table = Table("request", "prompt", "lost", "cause", "at", box=None, pad_edge=False)
    for column in (1, 2):
        table.columns[column].justify = "right"
    for row in found["data"]:
        numbers = (str(row["prompt_tokens"]), str(row["cost"]["tokens"]))
        table.add_row(escape(row["id"]), *numbers, row["cause"], escape(row["path"]))
    console.print(table)


def cost_of(cost: dict[str, Any] | None) -> str:
    """Tokens and time in words; empty where nothing is known or lost."""
    if not cost or not cost["tokens"]:
        return ""
    time = _time(cost)
    return f"{cost['tokens']} tokens computed again" + (f", about {time}" if time else "")


def _time(cost: dict[str, Any]) -> str:
    milliseconds = cost.get("milliseconds")
    if milliseconds is None:
        return ""
    return f"{milliseconds:.0f} ms" if milliseconds < 10_000 else f"{milliseconds / 1000:.1f} s"
