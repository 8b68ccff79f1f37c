"""How long an engine keeps the blocks of a turn that has ended, and which kept ones give way first. Pure."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that has ended. Whoever learns more of it (what tool it waits for, how long) adds a field."""

    session: str
    """Whose turn it was; empty where nobody said."""
    asked_s: float | None = None
    """For how long the client wants its blocks kept; None where it said nothing."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that are kept: what decides about them."""

    since_s: float
    ends_s: float
    priority: int = 0
    """Higher stays longer, whatever the times say."""


class Retention(Protocol):
    """Decides. What it says is a wish: a cap, and requests that need the room, come first."""

    def keep_s(self, turn: Turn) -> float:
        """Seconds to keep the blocks of `turn`; 0 lets them go."""
        ...

    def rank(self, kept: Kept) -> tuple[float, ...]:
        """The lowest gives way first."""
        ...


class Lru:
    """Keeps what is asked for and nothing else; what was kept first goes first."""

    def keep_s(self, turn: Turn) -> float:
        """As asked."""
        return turn.asked_s or 0.0

    def rank(self, kept: Kept) -> tuple[float, ...]:
        """The oldest."""
        return kept.priority, kept.since_s


class Ttl:
    """Keeps every turn of a session for `default_s`, or as long as is asked; what ends first goes first."""

    def __init__(self, default_s: float) -> None:
        self._default_s = default_s

    def keep_s(self, turn: Turn) -> float:
        """As asked, or the default where a session may go on."""
        if turn.asked_s is not None:
            return turn.asked_s
        return self._default_s if turn.session else 0.0

    def rank(self, kept: Kept) -> tuple[float, ...]:
        """The one with the least time left."""
        return kept.priority, kept.ends_s
