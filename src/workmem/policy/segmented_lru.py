"""Never-reused blocks leave first, then reused ones, each by age. Holds out against scans."""

from __future__ import annotations

from collections.abc import Sequence

from workmem.policy.order import NO_ROW
from workmem.policy.rings import REUSED, Rings

_FRESH, _REUSED = 0, 1


class SegmentedLru(Rings):
    """See `EvictionOrder`.

    `protected_bytes` bounds the reused segment: past it the longest unused fall back among the
    never-reused, so that a new working set can displace an old one (E6).
    """

    def __init__(self, protected_bytes: int) -> None:
        super().__init__(ends=2)
        self._protected_max = protected_bytes
        self._protected_bytes = 0

    def _ring_of_new(self, row: int, parent: int, *, is_back: bool) -> int:  # noqa: ARG002 - a hook
        if not is_back:
            return _FRESH
        # It was used again, if only after it had left.
        self._flags[row] |= REUSED
        self._protected_bytes += self._size[row]
        self._keep_bound()
        return _REUSED

    def _ring_of(self, row: int) -> int:
        return _REUSED if self._flags[row] & REUSED else _FRESH

    def _use(self, rows: Sequence[int]) -> None:
        flags = self._flags
        for row in rows:
            if not flags[row] & REUSED:
                flags[row] |= REUSED
                self._protected_bytes += self._size[row]
        self._renew(rows, _REUSED)
        self._keep_bound()

    def _keep_bound(self) -> None:
        while self._protected_bytes > self._protected_max and self._newer[_REUSED] != _REUSED:
            oldest = self._newer[_REUSED]
            self._unlink(oldest)
            self._forget(oldest - self._first)
            self._link(oldest, _FRESH)
            self._last = NO_ROW

    def _done(self, row: int) -> None:
        self._forget(row)

    def _forget(self, row: int) -> None:
        if self._flags[row] & REUSED:
            self._flags[row] &= ~REUSED
            self._protected_bytes -= self._size[row]
