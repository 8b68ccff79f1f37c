"""S3-FIFO: a small queue in which new blocks prove themselves, a main queue, and ghosts of those that left.

After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), with leaves as the only
candidates. The ghost queue is kept by the tier (`policy.ghosts`), which knows keys; it says `is_back`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workmem.policy.rings import HELD, PARKED, Rings

SMALL_SHARE = 0.1
"""Of the tier that the small queue may fill before victims come from it, as published."""
USES_TO_STAY = 2
"""Uses in the small queue that move a block to the main queue, as published."""
USES_MAX = 3
"""Further uses are not counted, as published."""

_SMALL, _MAIN = 0, 1
_IS_MAIN = 1 << 7
"""In the flags of a row."""


class S3Fifo(Rings):
    """See `EvictionOrder`. `capacity_bytes` is that of the tier."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(ends=2)
        self._small_max = int(capacity_bytes * SMALL_SHARE)
        self._small_bytes = 0
        self._uses = bytearray()

    def _ring_of_new(self, row: int, parent: int, *, is_back: bool) -> int:  # noqa: ARG002 - a hook
        self._uses[row] = 0
        if is_back:
            self._flags[row] |= _IS_MAIN
            return _MAIN
        self._small_bytes += self._size[row]
        return _SMALL

    def _ring_of_restored(self, rows: Sequence[int], sizes: Sequence[int]) -> int:
        for row in rows:
            self._uses[row] = 0
        self._small_bytes += sum(sizes)
        return _SMALL

    def _ring_of(self, row: int) -> int:
        return _MAIN if self._flags[row] & _IS_MAIN else _SMALL

    def _victim_rings(self) -> Iterable[int]:
        # Main comes after small in any case: blocks may have moved there on the way.
        rings = (_SMALL, _MAIN) if self._small_bytes > self._small_max else (_MAIN, _SMALL, _MAIN)
        return (*rings, self._pinned_end)

    def _use(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._uses[row] = min(USES_MAX, self._uses[row] + 1)
            if self._flags[row] & PARKED:
                self._flags[row] &= ~(PARKED | HELD)
                self._link(row + self._first, self._ring_of(row))

    def _spare(self, row: int) -> bool:
        uses, is_main = self._uses[row], self._flags[row] & _IS_MAIN
        if uses < (1 if is_main else USES_TO_STAY):
            return False
        if is_main:
            self._uses[row] = uses - 1
        else:
            self._forget(row)
            self._flags[row] |= _IS_MAIN
            self._uses[row] = 0
        self._renew((row,), _MAIN)
        return True

    def _done(self, row: int) -> None:
        self._uses[row] = 0
        if self._flags[row] & _IS_MAIN:
            self._flags[row] &= ~_IS_MAIN
            self._small_bytes += self._size[row]

    def _forget(self, row: int) -> None:
        if not self._flags[row] & _IS_MAIN:
            self._small_bytes -= self._size[row]

    def _reach(self, row: int) -> None:
        super()._reach(row)
        self._uses.extend(bytes(len(self._flags) - len(self._uses)))
