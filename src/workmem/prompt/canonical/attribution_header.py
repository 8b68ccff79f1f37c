"""The line that tells a vendor who is to be billed, in front of everything that the model is told."""

from __future__ import annotations

import re
from typing import Any

from workmem.prompt.canonical.rule import Applied, Rule, moved_back
from workmem.prompt.dialects.places import Dialect, TextPlace

_NAME = "attribution_header"
_LINES = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n+|\Z))+")


def _apply(body: dict[str, Any], dialect: Dialect) -> Applied | None:
    paths: list[str] = []
    moved: dict[str, str] = {}
    while (place := next(iter(dialect.texts(body)), None)) is not None:
        # A user's text begins with such a line only where it is about such lines.
        found = (
            _LINES.match(place.text) if place.role == "system" and _is_first(body, dialect, place) else None
        )
        if found is None:
            break
        path = moved_back(place.path, moved)
        if found.end() < len(place.text):
            place.write(place.text[found.end() :])
        else:
            gone = _drop(body, dialect, place)
            if gone is None:
                break
            moved |= {here: moved_back(there, moved) for here, there in gone.items()}
        paths.append(path)
    return Applied(_NAME, tuple(paths), moved) if paths else None


def _is_first(body: dict[str, Any], dialect: Dialect, place: TextPlace) -> bool:
    """Whether nothing that is no text stands before it, such as an image."""
    if place.holder is body:
        return True
    if place.turn < 0:
        return body["system"][0] is place.holder
    if place.turn > 0:
        return False
    first = body[dialect.history_key][0]
    content = first.get("content")
    if isinstance(content, list) and content:
        return content[0] is place.holder
    return place.holder is first and place.key == "content"


def _drop(body: dict[str, Any], dialect: Dialect, place: TextPlace) -> dict[str, str] | None:
    """Take out what holds nothing but the line: a part, or a whole message. None where nothing would be left."""
    if place.holder is body:
        del body[str(place.key)]
        return {}
    if place.turn < 0:
        del body["system"][0]
        left = len(body["system"])
        if not left:
            del body["system"]
        return {f"system[{number}]": f"system[{number + 1}]" for number in range(left)}
    field = dialect.history_key
    history: list[Any] = body[field]
    content = history[0].get("content")
    if isinstance(content, list) and len(content) > 1:
        del content[0]
        return {}
    if len(history) == 1:
        return None
    del history[0]
    return {f"{field}[{number}]": f"{field}[{number + 1}]" for number in range(len(history))}


ATTRIBUTION_HEADER = Rule(
    name=_NAME,
    kind="lossless",
    default=True,
    what=(
        "Takes the line `x-anthropic-billing-header: ...` out where the instructions begin with it. Anywhere else, "
        "and in what a user says, it stays."
    ),
    why=(
        "Claude Code writes its version and a number that changes with each request or agent into the first line of "
        "the instructions. It is for the vendor's accounts, and makes all that follows a miss."
    ),
    fix="Set CLAUDE_CODE_ATTRIBUTION_HEADER=0 where Claude Code runs.",
    apply=_apply,
)
