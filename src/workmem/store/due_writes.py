"""The order in which pages go to the tier below dram."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

_FRESH_IN_A_ROW = 8
Due = tuple[int, int]
"""Row and stamp of a block."""


class DueWrites:
    """What was just saved goes first, in the order it was: somebody may wait for it on another host.

    Behind it goes what is queued again, after an outage or a refusal: all that dram holds, perhaps. One of those goes for
    every few of the others, or none ever would while engines save as fast as the tier takes. Its owner locks.
    """

    def __init__(self) -> None:
        self._fresh: deque[Due] = deque()
        self._again: deque[Due] = deque()
        self._in_a_row = 0
        """Fresh ones taken since one of the others was."""

    def __len__(self) -> int:
        return len(self._fresh) + len(self._again)

    def __iter__(self) -> Iterator[Due]:
        yield from self._fresh
        yield from self._again

    def add(self, due: Due) -> None:
        """It was just saved."""
        self._fresh.append(due)

    def add_again(self, due: Due) -> None:
        """It was saved before, and is not below yet."""
        self._again.append(due)

    def put_back(self, due: Due) -> None:
        """It was taken, and is to be the next."""
        self._fresh.appendleft(due)

    @property
    def first(self) -> Due:
        """The next one. Raises IndexError where there is none."""
        return self._next[0]

    def take_first(self) -> Due:
        """See `first`."""
        queue = self._next
        self._in_a_row = self._in_a_row + 1 if queue is self._fresh else 0
        return queue.popleft()

    @property
    def _next(self) -> deque[Due]:
        if self._again and self._in_a_row >= _FRESH_IN_A_ROW:
            return self._again
        return self._fresh or self._again

    def take_last(self) -> Due:
        """The one that goes last."""
        return (self._again or self._fresh).pop()

    def clear(self) -> None:
        """Nothing goes."""
        self._fresh.clear()
        self._again.clear()
