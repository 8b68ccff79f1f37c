"""Blocks that are still being copied away: the engine may have them back once that is done, and not before."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class PendingSaves:
    """How many copies are under way from each block. Saves only read: several of one block may overlap."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._change = threading.Condition()
        self.is_over = False
        """Nobody waits for copies any more: the engine may write to any block while it is read."""
        self.waits = 0
        """Times that the engine had to wait, because it wanted a block back at once."""

    def __len__(self) -> int:
        return len(self._counts)

    def begin(self, block: int) -> None:
        """A copy of `block` is asked for."""
        with self._change:
            self._counts[block] = self._counts.get(block, 0) + 1

    def end(self, block: int) -> None:
        """One was made, or given up: it reads no more."""
        with self._change:
            left = self._counts[block] - 1
            if left:
                self._counts[block] = left
            else:
                del self._counts[block]
                self._change.notify_all()

    def wait_for(self, blocks: Iterable[int], timeout_s: float) -> bool:
        """Return once no copy is made from any of `blocks`. False on timeout."""
        # Read without the lock: only the thread that asks here begins copies.
        if not self._counts:
            return True
        wanted = self._counts.keys() & set(blocks)
        if not wanted:
            return True
        with self._change:
            self.waits += 1
            return self._change.wait_for(lambda: self._counts.keys().isdisjoint(wanted), timeout_s)
