"""The keys of messages, of their parts and of their calls in one order."""

from __future__ import annotations

from typing import Any

from workmem.prompt.canonical.rule import Applied, Rule
from workmem.prompt.dialects.places import Dialect, objects_in

_NAME = "message_key_order"
_FIRST = ("type", "role", "id", "name", "content", "text")
_INNER = ("content", "output", "tool_calls", "function", "summary")
"""Under which messages hold parts and calls. Input of calls is the model's own, and keeps its order."""
_DEPTH_MAX = 6
_RANK = {key: rank for rank, key in enumerate(_FIRST)}


def _order(key: str) -> tuple[int, str]:
    return _RANK.get(key, len(_FIRST)), key


def _reorder(held: dict[str, Any], depth: int) -> bool:
    """Put the keys of `held` and of what it holds in order, in place; whether that changed anything."""
    keys = list(held)
    wanted = sorted(keys, key=_order)
    is_changed = keys != wanted
    if is_changed:
        for key in wanted:
            held[key] = held.pop(key)
    if depth < _DEPTH_MAX:
        for key in _INNER:
            inner = held.get(key)
            if isinstance(inner, dict):
                is_changed |= _reorder(inner, depth + 1)
            for _, one in objects_in(inner):
                is_changed |= _reorder(one, depth + 1)
    return is_changed


def _apply(body: dict[str, Any], dialect: Dialect) -> Applied | None:
    paths: list[str] = []
    for field in ("system", dialect.history_key):
        for number, one in objects_in(body.get(field)):
            if _reorder(one, 0):
                paths.append(f"{field}[{number}]")
    return Applied(_NAME, tuple(paths)) if paths else None


MESSAGE_KEY_ORDER = Rule(
    name=_NAME,
    kind="lossless",
    default=True,
    what=(
        "Writes the keys of messages, of the parts of their content and of calls in one order. The arguments of a "
        "call keep theirs."
    ),
    why="A template that prints a call as JSON (Mistral's do) prints its keys in the order in which they came.",
    fix="Build messages with their keys in one order.",
    apply=_apply,
)
