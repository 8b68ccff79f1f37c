"""Bullet points in a tool's description by the alphabet."""

from __future__ import annotations

import re
from typing import Any

from workmem.prompt.canonical.rule import Applied, Rule
from workmem.prompt.dialects.places import Dialect

_NAME = "description_line_order"
_BULLET = re.compile(r"^([ \t]*)[-*•][ \t]+\S")


def sorted_bullets(text: str) -> str:
    """`text` with each run of bullet points of one depth sorted; lines below a point stay with it."""
    out: list[str] = []
    points: list[list[str]] = []
    indent = ""
    for line in text.split("\n"):
        found = _BULLET.match(line)
        is_below = bool(points) and line.startswith((indent + " ", indent + "\t"))
        if is_below and (found is None or len(found[1]) > len(indent)):
            points[-1].append(line)
            continue
        if found is None or (points and found[1] != indent):
            out += _sorted(points)
            points = []
        if found is None:
            out.append(line)
        else:
            indent = found[1]
            points.append([line])
    return "\n".join(out + _sorted(points))


def _sorted(points: list[list[str]]) -> list[str]:
    return [line for point in sorted(points) for line in point]


def _apply(body: dict[str, Any], dialect: Dialect) -> Applied | None:
    paths: list[str] = []
    for place in dialect.tools(body):
        text = place.function.get("description")
        if isinstance(text, str) and (now := sorted_bullets(text)) != text:
            place.function["description"] = now
            paths.append(f"{place.function_path}.description")
    return Applied(_NAME, tuple(paths)) if paths else None


DESCRIPTION_LINE_ORDER = Rule(
    name=_NAME,
    kind="model_visible",
    default=False,
    what=(
        "Sorts bullet points (`- `, `* `) in the descriptions of tools; numbered lines, and lines below a point, stay "
        "where they are."
    ),
    why=(
        "A tool that lists what there is, such as sub-agents, lists it in another order after a restart, and it "
        "stands in front of everything."
    ),
    fix="Sort what a description lists before it is written.",
    apply=_apply,
)
