"""Applying the chosen rules to a body, in the order of the registry."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from workmem.prompt.canonical.rule import Applied, Canonical, moved_back
from workmem.prompt.canonical.rules import DEFAULT_RULES, RULES
from workmem.prompt.dialects.places import Dialect


def canonicalise(
    body: dict[str, Any], dialect: Dialect, chosen: Collection[str] = DEFAULT_RULES
) -> Canonical:
    """`body` in its canonical form. It is owned: whoever needs the client's words keeps their bytes.

    A second time changes nothing, whatever the order in which the client wrote what has no order.
    """
    applied: list[Applied] = []
    moved: Mapping[str, str] = {}
    for rule in RULES:
        if rule.name not in chosen:
            continue
        found = rule.apply(body, dialect)
        if found is None:
            continue
        paths = tuple(moved_back(path, moved) for path in found.paths)
        applied.append(Applied(rule.name, paths, found.moved))
        if found.moved:
            # An entry that this rule left alone may have been moved by one before it.
            moved = {**moved, **{here: moved_back(there, moved) for here, there in found.moved.items()}}
    return Canonical(body, tuple(applied), moved)
