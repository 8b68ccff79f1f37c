"""Tools in the order of their names."""

from __future__ import annotations

from typing import Any

from workmem.prompt.canonical.rule import Applied, Rule
from workmem.prompt.dialects.places import Dialect, ToolPlace

_NAME = "tool_order"
_MARK = "cache_control"


def _apply(body: dict[str, Any], dialect: Dialect) -> Applied | None:
    places = list(dialect.tools(body))
    if not places or not all(_is_sound(place) for place in places):
        # What is wrong with one is told with its number, which is then still the client's.
        return None
    tools: list[Any] = body["tools"]
    own = sorted(places, key=lambda place: place.name)
    numbers = [place.number for place in own]
    taken = set(numbers)
    # What the server itself brings has no place in the order of names, and comes behind, as it came.
    numbers += [number for number in range(len(tools)) if number not in taken]
    moved = {f"tools[{here}]": f"tools[{there}]" for here, there in enumerate(numbers) if here != there}
    if not moved:
        return None
    marks = [place.tool.pop(_MARK, None) for place in places]
    if any(mark is not None for mark in marks):
        # A mark says up to where the prompt is to be kept: it is of the place, and not of the tool.
        by_number = {place.number: mark for place, mark in zip(places, marks, strict=True)}
        for here, number in enumerate(numbers):
            mark = by_number.get(here)
            if mark is not None and isinstance(tools[number], dict):
                tools[number][_MARK] = mark
    tools[:] = [tools[number] for number in numbers]
    return Applied(_NAME, tuple(moved.values()), moved)


def _is_sound(place: ToolPlace) -> bool:
    function = place.function
    return (
        bool(place.name)
        and isinstance(function.get("description"), (str, type(None)))
        and isinstance(function.get(place.schema_key), (dict, type(None)))
        and isinstance(function.get("strict"), (bool, type(None)))
    )


TOOL_ORDER = Rule(
    name=_NAME,
    kind="lossless",
    default=True,
    what=(
        "Sorts tools by name; those of one name keep their order, and tools that the server brings itself come "
        "behind them. A list with an ill-formed tool stays as it is."
    ),
    why=(
        "Tools are a set, and a choice names one by its name. Clients gather them from maps, and from servers that "
        "connect in any order: everything behind the first tool that moved is computed anew."
    ),
    fix="Sort the tools by name before sending them.",
    apply=_apply,
)
