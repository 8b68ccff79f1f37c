"""Clocks in the instructions rounded down to the day."""

from __future__ import annotations

import re
from typing import Any

from workmem.prompt.canonical.instructions import instructions
from workmem.prompt.canonical.rule import Applied, Rule
from workmem.prompt.dialects.places import Dialect
from workmem.prompt.volatile import find_volatile

_NAME = "date_rounding"
_ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def rounded(text: str) -> str:
    """`text` with dates in place of dates with a time of day, as ISO 8601 has them."""
    out: list[str] = []
    at = 0
    for value in find_volatile(text):
        if value.form == "iso_datetime":
            found = _ISO_DATE.match(value.of(text))
            assert found is not None
            out += [text[at : value.start], found[0]]
            at = value.end
    return "".join(out) + text[at:]


def _apply(body: dict[str, Any], dialect: Dialect) -> Applied | None:
    paths: list[str] = []
    for place in instructions(body, dialect):
        now = rounded(place.text)
        if now != place.text:
            place.write(now)
            paths.append(place.path)
    return Applied(_NAME, tuple(paths)) if paths else None


DATE_ROUNDING = Rule(
    name=_NAME,
    kind="model_visible",
    default=False,
    what="Writes the date alone for an ISO date with a time (`2026-11-29T10:15:03Z`) in the instructions.",
    why="A clock in the instructions makes all that follows a miss each minute or second.",
    fix="Give the date alone, or the time in the newest message.",
    apply=_apply,
)
