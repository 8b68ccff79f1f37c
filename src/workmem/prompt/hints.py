"""Hints that come with a request, as vLLM's `KvHintsEnvelope` or as the same object in `kv_transfer_params`. Pure.

Advice: what cannot be read is named to the client, and never an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from workmem.core.generation import Handoff
from workmem.core.hints import TEXT_MAX, Action, Kind, Outcome, Payload, Priority

ACTIONS_MAX = 16
"""Of one request."""
ROADS = ("workmem", "kv_hints")
"""Under these names `kv_transfer_params` may have an envelope."""
HANDOFF_ROAD = "workmem"
"""Under this one, a handoff beside it."""


class Hints(msgspec.Struct):
    """Of one request."""

    session: str = ""
    priority: int = 0
    """Of the request: what it says, or the highest of its actions. Higher is admitted earlier."""
    actions: list[Action] = []
    outcomes: list[Outcome] = []
    """Of those that cannot be done, from the beginning; the others join as they are done."""
    handoff: Handoff | None = None
    """Its prompt was just computed elsewhere."""


class _Said(msgspec.Struct, frozen=True):
    action_type: Kind
    action_id: Annotated[str, Meta(max_length=TEXT_MAX)] = ""
    action_version: Annotated[str, Meta(max_length=TEXT_MAX)] = "1"
    payload: Payload = Payload()


def read_hints(envelope: object, params: Mapping[str, Any] | None, session: object) -> Hints:
    """What came by all roads: vLLM's own field, `kv_transfer_params`, and the session of the request."""
    hints = Hints(session=_name(session))
    priority: int | None = None
    read_envelope(hints, "kv_hints", envelope)
    for road in ROADS:
        said = params.get(road) if params else None
        read_envelope(hints, f"kv_transfer_params.{road}", said)
        if not isinstance(said, Mapping):
            continue
        beside = cast("Mapping[str, object]", said)
        hints.session = hints.session or _name(beside.get("session_id"))
        if priority is None:
            priority = _priority(hints, f"kv_transfer_params.{road}.priority", beside.get("priority"))
        if road == HANDOFF_ROAD:
            hints.handoff = _handoff(hints, f"kv_transfer_params.{road}.handoff", beside.get("handoff"))
    of_actions = max((action.payload.priority for action in hints.actions), default=0)
    hints.priority = of_actions if priority is None else priority
    return hints


def _priority(hints: Hints, place: str, said: object) -> int | None:
    if said is None:
        return None
    try:
        return msgspec.convert(said, Priority)
    except msgspec.ValidationError as error:
        hints.outcomes.append(Outcome(place, "rejected", str(error)))
        return None


def _handoff(hints: Hints, place: str, said: object) -> Handoff | None:
    if said is None:
        return None
    try:
        found = msgspec.convert(said, Handoff)
    except msgspec.ValidationError as error:
        hints.outcomes.append(Outcome(place, "rejected", str(error)))
        return None
    if not math.isfinite(found.wait_s):
        # JSON has no such number, and parsers take it all the same.
        hints.outcomes.append(Outcome(place, "rejected", f"wait_s is {found.wait_s}; give seconds"))
        return None
    return found


def _name(said: object) -> str:
    return said if isinstance(said, str) and len(said) <= TEXT_MAX and said.isprintable() else ""


def read_envelope(hints: Hints, road: str, envelope: object) -> None:
    """Add what `envelope`, which came as `road`, asks for."""
    if envelope is None:
        return
    actions = _actions(envelope)
    if isinstance(actions, str):
        hints.outcomes.append(Outcome(road, "rejected", actions))
        return
    for index, said in enumerate(actions):
        if len(hints.actions) + len(hints.outcomes) >= ACTIONS_MAX:
            why = f"{len(actions)} actions; {ACTIONS_MAX} are read of a request"
            hints.outcomes.append(Outcome(road, "clipped", why))
            return
        read_action(hints, f"{road}.actions[{index}]", said)


def _actions(envelope: object) -> list[object] | str:
    """Or why there are none."""
    if isinstance(envelope, msgspec.Struct):
        found = getattr(envelope, "actions", None)
    elif isinstance(envelope, Mapping):
        found = cast("Mapping[str, object]", envelope).get("actions", [])
    else:
        return f"is {type(envelope).__name__}; give an object with actions"
    if not isinstance(found, list):
        return f"actions is {type(found).__name__}; give a list"
    return cast("list[object]", found)


def read_action(hints: Hints, place: str, said: object) -> None:
    """Add one action, or why it cannot be done."""
    try:
        read = msgspec.convert(said, _Said, from_attributes=True)
    except msgspec.ValidationError as error:
        hints.outcomes.append(Outcome(place, "rejected", str(error)))
        return
    name = read.action_id or place
    if not all(text.isprintable() for text in (name, read.payload.session or "", read.payload.group or "")):
        # A lone surrogate could be neither sent to the store nor answered.
        hints.outcomes.append(Outcome(place, "rejected", "a name has characters that cannot be printed"))
        return
    if read.action_version.removeprefix("v").partition(".")[0] != "1":
        why = f"action_version is {read.action_version!r}; 1 is known"
        hints.outcomes.append(Outcome(name, "rejected", why))
        return
    if read.action_type is Kind.SHARE and read.payload.group is None:
        hints.outcomes.append(Outcome(name, "rejected", "payload.group is not there; name the group"))
        return
    hints.actions.append(Action(name, read.action_type, read.payload))
