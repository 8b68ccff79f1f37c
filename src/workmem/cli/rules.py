"""`workmem rules`: the rules by which prompts get one form."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from workmem.prompt.canonical.rules import RULES

_HEAD = """\
# Canonical rules

Written by `make docs` from the rules in the code; do not edit.

Prompts that mean the same get one form before they are rendered, or passed on to another server, by these rules in this
order. A *lossless* rule keeps the meaning of the JSON, though token ids may change; a *model-visible* one changes words
that the model reads, and is off unless it is put on. [Stable prompts](../guides/prompts.md) says how to choose.
"""


def rules(
    *,
    json: Annotated[
        bool, Parameter(negative=(), help="As JSON, with everything that is known of each.")
    ] = False,
    markdown: Annotated[bool, Parameter(negative=(), help="As the reference page.")] = False,
) -> None:
    """List the rules by which prompts that mean the same get one form."""
    if json:
        told = [
            {"name": rule.name, "kind": rule.kind, "default": rule.default}
            | {"what": rule.what, "why": rule.why, "fix": rule.fix}
            for rule in RULES
        ]
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(told), indent=2).decode() + "\n")
    elif markdown:
        sys.stdout.write(rules_page())
    else:
        table = Table("rule", "kind", "default", "what it does", show_lines=True)
        for rule in RULES:
            table.add_row(rule.name, rule.kind.replace("_", "-"), "on" if rule.default else "off", rule.what)
        Console().print(table, markup=False)


def rules_page() -> str:
    """Markdown of every rule."""
    parts = [_HEAD]
    for rule in RULES:
        kind = rule.kind.replace("_", "-")
        parts.append(
            f"## `{rule.name}`\n\n{kind}, {'on' if rule.default else 'off'} by default\n\n"
            f"- **What it does.** {rule.what}\n- **Why.** {rule.why}\n- **What you can do.** {rule.fix}\n"
        )
    return "\n".join(parts)
