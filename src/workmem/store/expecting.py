"""Waiting for blocks that a store does not have yet: looking for them, and telling it so that it hears sooner of others' pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workmem.core.keys import BlockKey
from workmem.core.outcomes import Lookup
from workmem.policy.order import Prospect
from workmem.store.contract import Steering

SAY_S = 0.2
"""It is said again after so long, and holds for longer."""
WINDOW = 64
"""Keys of one question: most looks find nothing new, and a long context has thousands."""


def news(lookup: Callable[[Sequence[BlockKey]], Lookup], keys: Sequence[BlockKey]) -> Lookup:
    """As `lookup` of all keys, asked window by window as long as all of one is there."""
    found = Lookup()
    for at in range(0, len(keys), WINDOW):
        part = keys[at : at + WINDOW]
        more = lookup(part)
        found = Lookup(found.tiers + more.tiers, more.reason)
        if more.blocks < len(part):
            break
    return found


class Expecting:
    """Of all who wait in one engine together: a store that looks sooner does so for all. Times in seconds of one clock."""

    def __init__(self, store: Steering) -> None:
        self._store = store
        self._say_at = 0.0

    def expect(self, root: bytes, keys: Sequence[BlockKey], now: float) -> None:
        """Somebody waits for `keys`, of which none was there a moment ago."""
        if keys and now >= self._say_at:
            self._say_at = now + SAY_S
            self._store.announce(root, keys, Prospect.EXPECTED)
