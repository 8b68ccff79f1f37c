"""Ids of calls by their number in the history."""

from __future__ import annotations

from typing import Any

from workmem.prompt.canonical.rule import Applied, Rule
from workmem.prompt.dialects.places import Dialect

_NAME = "call_ids"
_ELSEWHERE = ("previous_response_id", "conversation", "thread")
"""Fields by which part of the history, and of its ids, lies on the server."""


def _apply(body: dict[str, Any], dialect: Dialect) -> Applied | None:
    if any(body.get(field) is not None for field in _ELSEWHERE):
        return None
    calls, results = list(dialect.calls(body)), list(dialect.results(body))
    names: dict[str, str] = {}
    for call in calls:
        was = call.ids.get(call.id_key)
        if isinstance(was, str) and was:
            # Nine letters and digits, as Mistral's templates want them.
            names.setdefault(was, f"c{len(names) + 1:08d}")
    known = set(names.values())
    if any(_id(place.holder, place.id_key) in known - names.keys() for place in results):
        # A result of no call would become one of the first call.
        return None
    paths: list[str] = []
    for holder, key, path in [
        *((call.ids, call.id_key, f"{call.path.removesuffix('.function')}.{call.id_key}") for call in calls),
        *((place.holder, place.id_key, f"{place.path}.{place.id_key}") for place in results),
    ]:
        was = _id(holder, key)
        now = names.get(was, was)
        if now != was:
            holder[key] = now
            paths.append(path)
    return Applied(_NAME, tuple(paths)) if paths else None


def _id(holder: dict[str, Any], key: str) -> str:
    found = holder.get(key)
    return found if isinstance(found, str) else ""


CALL_IDS = Rule(
    name=_NAME,
    kind="lossless",
    default=False,
    what=(
        "Renames the ids of calls in the history, and of their results, to `c00000001`, `c00000002` and so on. Ids of "
        "new calls are not renamed. Not where part of the history lies on the server."
    ),
    why=(
        "Some clients give a call another id each time they send it. Few templates print ids (Mistral's do); with "
        "those, all that follows the first one is computed anew. Where none is printed there is nothing to gain, so "
        "it is off."
    ),
    fix="Send ids of calls back as they came.",
    apply=_apply,
)
