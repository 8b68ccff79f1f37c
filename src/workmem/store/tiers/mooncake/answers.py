"""Each page of a batch is answered for once, whatever goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable

from workmem.store.tiers.contract import Outcome


class Answers:
    """Stands for the caller's `done`: the first answer for a page counts."""

    def __init__(self, count: int, done: Callable[[int, Outcome], None]) -> None:
        self._done = done
        self._lock = threading.Lock()
        self._left = set(range(count))

    def __call__(self, index: int, outcome: Outcome) -> None:
        """As the caller's `done`."""
        with self._lock:
            if index not in self._left:
                return
            self._left.discard(index)
        self._done(index, outcome)

    @property
    def is_over(self) -> bool:
        """Whether somebody has answered for every page: what comes now is too late."""
        with self._lock:
            return not self._left

    def rest(self, outcome: Outcome) -> None:
        """For all that nobody answered for."""
        with self._lock:
            left = sorted(self._left)
        for index in left:
            self(index, outcome)
