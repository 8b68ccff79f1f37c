"""Telling a store that somebody waits for a block which it does not have: so it hears sooner of what other stores put."""

from __future__ import annotations

from collections.abc import Sequence

from workmem.core.keys import BlockKey
from workmem.policy.order import Prospect
from workmem.store.contract import Steering

SAY_S = 0.2
"""It is said again after so long, and holds for longer."""


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
