"""Blocks that are still being copied away: the engine may have them back once they have been read, and not before."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from workmem.engines.vllm.moving import Fence, Reading


class PendingSaves:
    """Which copies are under way from each block. Saves only read: several of one block may overlap."""

    def __init__(self) -> None:
        self._readings: dict[int, list[Reading]] = {}
        self._change = threading.Condition()
        self.is_over = False
        """Nobody waits for copies any more: the engine may write to any block while it is read."""
        self.waits = 0
        """Times that the engine had to wait, because it wanted a block back at once."""

    def __len__(self) -> int:
        return len(self._readings)

    def begin(self, block: int, reading: Reading) -> None:
        """A copy of `block` is asked for."""
        with self._change:
            self._readings.setdefault(block, []).append(reading)

    def issued(self) -> None:
        """A copy that was asked for before has got its fence."""
        with self._change:
            self._change.notify_all()

    def end(self, block: int, reading: Reading) -> None:
        """It was made, or given up: it reads no more."""
        with self._change:
            left = self._readings[block]
            left.remove(reading)
            if not left:
                del self._readings[block]
                self._change.notify_all()

    def wait_for(self, blocks: Iterable[int], timeout_s: float) -> list[Fence] | None:
        """Return once each copy made from any of `blocks` is over or has a fence: those fences. None on timeout."""
        # Read without the lock: only the thread that asks here begins copies.
        if not self._readings:
            return []
        with self._change:
            wanted = self._readings.keys() & set(blocks)
            if self._open(wanted):
                self.waits += 1
                if not self._change.wait_for(lambda: not self._open(wanted), timeout_s):
                    return None
            return [
                reading.fence
                for block in wanted
                for reading in self._readings.get(block, ())
                if reading.fence is not None
            ]

    def drain(self, timeout_s: float) -> bool:
        """Return once nothing is under way. False on timeout."""
        with self._change:
            return self._change.wait_for(lambda: not self._readings, timeout_s)

    def _open(self, blocks: Iterable[int]) -> bool:
        return any(reading.fence is None for block in blocks for reading in self._readings.get(block, ()))
