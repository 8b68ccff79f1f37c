"""Blocks that could not be loaded: a load that failed once must not be promised again and again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from workmem.core.keys import BlockKey

KEYS_MAX = 4096
AWAY_S = 2.0
"""A block of which nothing is known but that it was not delivered is denied for so long: its store may be back by then."""


class Denied:
    """Keys not to offer for a while. `clock` in seconds; the oldest makes room."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: OrderedDict[BlockKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: BlockKey) -> None:
        """Deny `key` from now on."""
        self._until.pop(key, None)
        self._until[key] = self._clock() + self._seconds
        if len(self._until) > KEYS_MAX:
            self._until.popitem(last=False)

    def allowed(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys may be offered."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if not self._until:
            return len(keys)
        return next((index for index, key in enumerate(keys) if key in self._until), len(keys))
