"""Values that change, out of the instructions and behind what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workmem.prompt.canonical.instructions import instructions
from workmem.prompt.canonical.rule import Applied, Rule
from workmem.prompt.dialects.places import Dialect, TextPlace
from workmem.prompt.volatile import VolatileKind, find_volatile

_NAME = "volatile_to_tail"
_OF_REQUEST = frozenset({"time"})
"""Kinds that change from one request to the next. All others last for a session."""
_HEAD = "<current_values>"


def _apply(body: dict[str, Any], dialect: Dialect) -> Applied | None:
    places = list(dialect.texts(body))
    users = [place for place in places if place.role == "user" and place.kind == "text"]
    stable = list(instructions(body, dialect))
    if not users or not stable:
        return None
    counts: dict[VolatileKind, int] = {}
    moved: list[tuple[VolatileKind, str, str]] = []
    paths: list[str] = []
    for place in stable:
        now = _without(place.text, counts, moved)
        if now != place.text:
            place.write(now)
            paths.append(place.path)
    if not moved:
        return None
    # What lasts for a session goes behind the instructions; a clock goes to the newest words, for all that follows
    # it is computed anew each time.
    if len(users) == 1:
        _say(users[0], moved, lambda _: True)
    else:
        _say(users[0], moved, lambda kind: kind not in _OF_REQUEST)
        _say(users[-1], moved, lambda kind: kind in _OF_REQUEST)
    return Applied(_NAME, tuple(paths))


def _without(text: str, counts: dict[VolatileKind, int], moved: list[tuple[VolatileKind, str, str]]) -> str:
    # What one value hid, the next round finds.
    while values := find_volatile(text):
        out: list[str] = []
        at = 0
        for value in values:
            counts[value.kind] = counts.get(value.kind, 0) + 1
            name = f"{value.kind}_{counts[value.kind]}"
            moved.append((value.kind, name, value.of(text)))
            out += [text[at : value.start], f"(see {name} in current_values)"]
            at = value.end
        text = "".join(out) + text[at:]
    return text


def _say(
    place: TextPlace, moved: list[tuple[VolatileKind, str, str]], wanted: Callable[[VolatileKind], bool]
) -> None:
    lines = [f"{name}: {value}" for kind, name, value in moved if wanted(kind)]
    if lines:
        place.write("\n".join([_HEAD, *lines, "</current_values>", "", place.text]))


VOLATILE_TO_TAIL = Rule(
    name=_NAME,
    kind="model_visible",
    default=False,
    what=(
        "Takes times, dates, ids, working directories, git status and versions out of the instructions, leaves `(see "
        "time_1 in current_values)` where they stood, and says them in a block: clocks before the newest words of the "
        "user, all else before the first ones. Without a user's message nothing is moved."
    ),
    why=(
        "A clock, an id or a directory in the first lines of a prompt makes every tool and instruction behind it a "
        "miss: each request, each day, each session."
    ),
    fix="Put what changes into the newest message, or behind everything that stays.",
    apply=_apply,
)
