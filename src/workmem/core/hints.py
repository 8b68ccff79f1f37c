"""What callers may say of the memory that a request's context takes: advice, that costs time at most. Shared, so here."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

TEXT_MAX = 256
"""Characters of a session, a group or an id."""

Name = Annotated[str, Meta(min_length=1, max_length=TEXT_MAX)]
Priority = Annotated[int, Meta(ge=-100, le=100)]


class Kind(StrEnum):
    """What is asked for."""

    PIN = "Pin"
    """Keep the request's blocks in the engine's memory and in the store."""
    RETAIN = "Retain"
    """Keep them in the store: in each tier they leave after all that nobody keeps."""
    PREFETCH = "Prefetch"
    """Bring what the store has of a session to dram."""
    DEMOTE = "Demote"
    """The session's blocks are not wanted for now: whoever needs the room takes theirs first."""
    SHARE = "Share"
    """As Retain, for all of a group: whoever of it comes next renews it."""


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """What an action may say more. Other fields are ignored: they may be of a newer version."""

    ttl_s: Annotated[float, Meta(gt=0)] | None = None
    priority: Priority = 0
    """Higher stays longer."""
    tokens: Annotated[int, Meta(ge=1)] | None = None
    """Only so many from the beginning."""
    session: Name | None = None
    """Of the request where nothing is said."""
    group: Name | None = None


class Action(msgspec.Struct, frozen=True):
    """One that can be done."""

    id: str
    kind: Kind
    payload: Payload


class Outcome(msgspec.Struct, frozen=True):
    """What became of an action, for the response."""

    id: str
    outcome: str
    """accepted, clipped (by a bound), missing (there is nothing of that name), rejected."""
    why: str = ""

    def told(self) -> dict[str, str]:
        """As the client reads it."""
        told = {"id": self.id, "outcome": self.outcome}
        return {**told, "why": self.why} if self.why else told
