"""Stretches of bytes, kept apart from each other, that say what of a window was written."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Spans:
    """A set of byte offsets, as stretches in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def touches(self, start: int, size: int) -> bool:
        """Whether any byte of it is in the set."""
        at = bisect_right(self._ends, start)
        return at < len(self._starts) and self._starts[at] < start + size

    def covers(self, start: int, size: int) -> bool:
        """Whether all of its bytes are."""
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and self._ends[at] >= start + size

    def add(self, start: int, size: int) -> None:
        """Stretches that meet become one."""
        end = start + size
        low, high = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high], self._ends[low:high] = [start], [end]
