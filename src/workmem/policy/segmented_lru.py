"""Never-reused blocks leave first, then reused ones, each by age. Rules E1-E9: docs/internals/eviction.md.

Two doubly linked lists in columns of numbers: 21 bytes per block, no object per block. A block that cannot
leave is taken out of its list when it comes up as a victim, so no pick meets it twice.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Sequence

from workmem.policy.order import NO_ROW

PENDING_MAX = 1 << 14
"""Touched rows that may wait: taking them in costs some 5 ms, the longest that a touch may last."""

_PRESENT, _REUSED, _PARKED, _HELD = 1, 2, 4, 8
_FRESH, _REUSED_END = 0, 1
"""Positions of the two ends: each list is a ring through its end, so no link is ever missing."""
_FIRST = 2
"""Position of row 0."""


class SegmentedLru:
    """See `EvictionOrder`.

    `protected_bytes` bounds the reused segment: past it the longest unused fall back among the
    never-reused, so that a new working set can displace an old one (E6).
    """

    def __init__(self, protected_bytes: int) -> None:
        self._protected_max = protected_bytes
        self._protected_bytes = 0
        self._older = array("i", (_FRESH, _REUSED_END))
        self._newer = array("i", (_FRESH, _REUSED_END))
        self._parent = array("i")
        self._children = array("I")
        self._size = array("I")
        self._flags = bytearray()
        self._pending: list[int] = []
        self._count = 0
        self._last_fresh = NO_ROW
        self.held_skips = 0

    def __len__(self) -> int:
        return self._count

    def insert(self, row: int, parent: int, size: int) -> None:
        """See `EvictionOrder.insert`."""
        if self._pending:
            self._take_in()
        self._reach(row)
        if self._children[row]:
            self._orphan(row)
        assert not self._flags[row], f"row {row} is inserted twice"
        self._flags[row] = _PRESENT
        self._parent[row] = parent
        self._size[row] = size
        self._count += 1
        newer = _FRESH
        if parent != NO_ROW:
            assert self._flags[parent], f"parent {parent} of row {row} is not in this order"
            self._children[parent] += 1
            if parent == self._last_fresh:
                newer = parent + _FIRST  # A chain that comes in one go lies root to leaf (E3).
        self._link(row + _FIRST, newer)
        self._last_fresh = row

    def restore(self, rows: Sequence[int], parents: Sequence[int], sizes: Sequence[int]) -> None:
        """See `EvictionOrder.restore`. All of them count as never reused."""
        if self._pending:
            self._take_in()
        if not rows:
            return
        self._reach(max(rows))
        if self._count:
            for row in rows:
                if self._children[row]:
                    self._orphan(row)
        self._last_fresh = NO_ROW
        flags, parent_of, size_of, children = self._flags, self._parent, self._size, self._children
        older, newer = self._older, self._newer
        newest = older[_FRESH]
        for row, parent, size in zip(rows, parents, sizes, strict=True):
            assert not flags[row], f"row {row} is inserted twice"
            flags[row] = _PRESENT
            parent_of[row] = parent
            size_of[row] = size
            position = row + _FIRST
            older[position] = newest
            newer[newest] = position
            newest = position
        newer[newest] = _FRESH
        older[_FRESH] = newest
        self._count += len(rows)
        for parent in parents:
            if parent != NO_ROW:
                assert flags[parent], f"parent {parent} of a restored row is not in this order"
                children[parent] += 1

    def touch(self, rows: Sequence[int]) -> None:
        """See `EvictionOrder.touch`. Rows that are not here are passed over."""
        self._pending.extend(reversed(rows))
        if len(self._pending) > PENDING_MAX:
            self._take_in()

    def remove(self, row: int) -> None:
        """See `EvictionOrder.remove`."""
        if self._pending:
            self._take_in()
        flags = self._flags[row]
        assert flags, f"row {row} is not in this order"
        if not flags & _PARKED:
            self._unlink(row + _FIRST)
        if flags & _REUSED:
            self._protected_bytes -= self._size[row]
        self._flags[row] = 0
        self._count -= 1
        if row == self._last_fresh:
            self._last_fresh = NO_ROW
        parent = self._parent[row]
        if parent == NO_ROW:
            return
        self._parent[row] = NO_ROW
        left = self._children[parent] - 1
        self._children[parent] = left
        if not left and self._flags[parent] & (_PARKED | _HELD) == _PARKED:
            self._link_oldest(parent)

    def pick(self, is_held: Callable[[int], bool]) -> int:
        """See `EvictionOrder.pick`."""
        if self._pending:
            self._take_in()
        for end in (_FRESH, _REUSED_END):
            while (position := self._newer[end]) != end:
                row = position - _FIRST
                if self._children[row]:
                    self._flags[row] |= _PARKED
                elif is_held(row):
                    self._flags[row] |= _PARKED | _HELD
                    self.held_skips += 1
                else:
                    return row
                self._unlink(position)
                self._last_fresh = NO_ROW
        return NO_ROW

    def unpark(self, row: int) -> None:
        """See `EvictionOrder.unpark`."""
        if self._flags[row] & _HELD:
            self._flags[row] &= ~_HELD
            if not self._children[row]:
                self._link_oldest(row)

    def _link(self, position: int, newer: int) -> None:
        """Put a position on the older side of another."""
        older = self._older[newer]
        self._older[newer] = position
        self._newer[position] = newer
        self._older[position] = older
        self._newer[older] = position

    def _unlink(self, position: int) -> None:
        older, newer = self._older[position], self._newer[position]
        self._older[newer] = older
        self._newer[older] = newer

    def _link_oldest(self, row: int) -> None:
        """A parked row may leave again: it was the oldest when it was parked (E5)."""
        self._flags[row] &= ~_PARKED
        end = _REUSED_END if self._flags[row] & _REUSED else _FRESH
        self._link(row + _FIRST, self._newer[end])
        self._last_fresh = NO_ROW

    def _take_in(self) -> None:
        """Move the touched rows to the front: per prefix the root is the most recent (E4)."""
        newest_first = list(dict.fromkeys(reversed(self._pending)))
        self._pending.clear()
        self._last_fresh = NO_ROW
        older, newer, flags, size = self._older, self._newer, self._flags, self._size
        rows = len(flags)
        for row in reversed(newest_first):
            flag = flags[row] if row < rows else 0
            if not flag:
                continue
            position = row + _FIRST
            if not flag & _PARKED:
                before, after = older[position], newer[position]
                older[after] = before
                newer[before] = after
            if not flag & _REUSED:
                self._protected_bytes += size[row]
            flags[row] = _PRESENT | _REUSED
            before = older[_REUSED_END]
            older[_REUSED_END] = position
            newer[position] = _REUSED_END
            older[position] = before
            newer[before] = position
        while self._protected_bytes > self._protected_max and newer[_REUSED_END] != _REUSED_END:
            position = newer[_REUSED_END]
            self._unlink(position)
            flags[position - _FIRST] = _PRESENT
            self._protected_bytes -= size[position - _FIRST]
            self._link(position, _FRESH)

    def _reach(self, row: int) -> None:
        missing = row + 1 - len(self._flags)
        if missing > 0:
            zeros = bytes(4 * missing)
            for column in (self._older, self._newer, self._parent, self._children, self._size):
                column.frombytes(zeros)
            self._flags.extend(bytes(missing))

    def _orphan(self, row: int) -> None:
        """Cut the children of a block that left before them, now that its number comes back (E8)."""
        wanted = re.compile(re.escape(row.to_bytes(4, sys.byteorder)))
        start = 0
        while self._children[row] and (found := wanted.search(self._parent, start)):
            start = found.start() + 1
            if found.start() % 4 == 0 and self._flags[found.start() // 4]:
                self._parent[found.start() // 4] = NO_ROW
                self._children[row] -= 1
        assert not self._children[row], f"row {row} is said to have children that name another parent"
