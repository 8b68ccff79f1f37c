"""Blocks of a tier in doubly linked rings, by row: what every eviction order here is made of.

Columns of numbers, 21 bytes per block, no object per block. A block that cannot leave is taken out of its
ring when it comes up as a victim, so no pick meets it twice. Rules E1-E10: docs/internals/eviction.md.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, islice, pairwise
from operator import ne

from workmem.policy.order import NO_ROW, Loss, Prospect

PENDING_MAX = 1 << 13
"""Touched rows that may wait: taking them in costs some 5 ms, the longest that a touch may last."""

PRESENT, REUSED, PARKED, HELD, PINNED = 1, 2, 4, 8, 16
"""Flags of a row. Parked: outside its ring. Held: and waiting for `unpark`. Pinned: in the ring of its own."""

_Run = tuple[int, int, int]
"""First row, its place among those that are restored, and number of rows: each but the first is the child of the one
before it."""


class Rings:
    """Base of the orders. Each ring runs through an end (positions 0 to `ends`), so no link is ever missing.

    `_older[end]` is the newest of a ring and `_newer[end]` its oldest, the next victim. A subclass says
    what a use changes (`_use`) and, where there is more than one ring, which of them a block enters
    (`_ring_of_new`) and returns to (`_ring_of`), and in which order they give victims (`_victim_rings`).
    The last ring is that of pinned blocks, in every order.
    """

    def __init__(self, ends: int) -> None:
        self._pinned_end = ends
        self._first = ends + 1
        """Position of row 0."""
        self._older = array("i", range(ends + 1))
        self._newer = array("i", range(ends + 1))
        self._parent = array("i")
        self._children = array("I")
        self._size = array("I")
        self._flags = bytearray()
        self._pending: list[int] = []
        self._count = 0
        self._pinned = 0
        self._last = NO_ROW
        """The row inserted last, while it lies where it was put."""
        self._last_end = 0
        self.held_skips = 0

    def __len__(self) -> int:
        return self._count

    @property
    def pinned(self) -> int:
        """See `EvictionOrder.pinned`."""
        return self._pinned

    def insert(self, row: int, parent: int, size: int, *, is_back: bool = False) -> None:
        """See `EvictionOrder.insert`."""
        if self._pending:
            self._take_in()
        if row >= len(self._flags):
            self._reach(row)
        flags, children = self._flags, self._children
        if children[row]:
            self._orphan(row)
        assert not flags[row], f"row {row} is inserted twice"
        flags[row] = PRESENT
        self._parent[row] = parent
        self._size[row] = size
        self._count += 1
        if parent != NO_ROW:
            assert flags[parent], f"parent {parent} of row {row} is not in this order"
            children[parent] += 1
        end = self._ring_of_new(row, parent, is_back=is_back)
        # A chain that comes in one go lies root to leaf (E3).
        behind_parent = parent != NO_ROW and parent == self._last and end == self._last_end
        self._link(row + self._first, parent + self._first if behind_parent else end)
        self._last = row
        self._last_end = end

    def restore(self, rows: Sequence[int], parents: Sequence[int], sizes: Sequence[int]) -> None:
        """See `EvictionOrder.restore`. All of them count as never reused."""
        if self._pending:
            self._take_in()
        if not rows:
            return
        self._reach(rows[-1] if isinstance(rows, range) else max(rows))
        if self._count:
            for row in rows:
                if self._children[row]:
                    self._orphan(row)
        self._last = NO_ROW
        self._fill(rows, parents, sizes)
        self._count += len(rows)
        runs = _runs(rows, parents)
        self._count_children(runs, parents)
        self._note_restored(runs, parents)

    def _count_children(self, runs: Sequence[_Run], parents: Sequence[int]) -> None:
        flags, children = self._flags, self._children
        for row, _, count in runs:
            children[row : row + count - 1] = array("I", (1,)) * (count - 1)
        # Only now: a run may hang on a row of a later one.
        for _, index, _ in runs:
            parent = parents[index]
            if parent != NO_ROW:
                assert flags[parent], f"parent {parent} of a restored row is not in this order"
                children[parent] += 1

    def _note_restored(self, runs: Sequence[_Run], parents: Sequence[int]) -> None:
        """A hook: what a subclass keeps of each block, after blocks were restored."""

    def _fill(self, rows: Sequence[int], parents: Sequence[int], sizes: Sequence[int]) -> None:
        """Put new rows in order before all that are in their ring."""
        end, first_row = self._ring_of_restored(rows, sizes), self._first
        older, newer = self._older, self._newer
        newest = older[end]
        if isinstance(rows, range) and rows.step == 1:  # As a tier restores itself: columns, not rows.
            start, stop = rows.start, rows.stop
            assert len(parents) == len(sizes) == len(rows), (
                "restored rows, parents and sizes differ in number"
            )
            assert not any(self._flags[start:stop]), f"a row of {start} to {stop - 1} is inserted twice"
            self._flags[start:stop] = bytes((PRESENT,)) * len(rows)
            self._parent[start:stop] = array("i", parents)
            self._size[start:stop] = array("I", sizes)
            first, last = start + first_row, stop - 1 + first_row
            positions = array("i", range(first - 1, last + 2))
            older[first : last + 1] = positions[:-2]
            newer[first : last + 1] = positions[2:]
            older[first] = newest
            newer[newest] = first
            newest = last
        else:
            for row, parent, size in zip(rows, parents, sizes, strict=True):
                assert not self._flags[row], f"row {row} is inserted twice"
                self._flags[row] = PRESENT
                self._parent[row] = parent
                self._size[row] = size
                position = row + first_row
                older[position] = newest
                newer[newest] = position
                newest = position
        newer[newest] = end
        older[end] = newest

    def touch(self, rows: Sequence[int]) -> None:
        """See `EvictionOrder.touch`. Rows that are not here are passed over."""
        self._pending.extend(reversed(rows))
        if len(self._pending) > PENDING_MAX:
            self._take_in()

    def advise(
        self,
        rows: Sequence[int],
        *,
        prospect: Prospect | None = None,
        loss: Loss | None = None,  # noqa: ARG002 - for subclasses
    ) -> None:
        """See `EvictionOrder.advise`. Pins, and being done with, count in every order, the rest where a subclass says so."""
        if self._pending:
            self._take_in()
        if prospect is None:
            return
        for row in rows:
            flags = self._flags[row]
            is_pinned = prospect == Prospect.PINNED
            if not flags:
                continue
            if is_pinned != bool(flags & PINNED):
                self._pinned += 1 if is_pinned else -1
                self._flags[row] ^= PINNED
                if not flags & PARKED:
                    self._renew((row,), self._pinned_end if is_pinned else self._ring_of(row))
            if prospect == Prospect.DONE:
                self._give_up(row)
        self._last = NO_ROW

    def remove(self, row: int) -> None:
        """See `EvictionOrder.remove`."""
        if self._pending:
            self._take_in()
        flags, parents, children = self._flags, self._parent, self._children
        was = flags[row]
        assert was, f"row {row} is not in this order"
        if not was & PARKED:
            self._unlink(row + self._first)
        self._forget(row)
        if was & PINNED:
            self._pinned -= 1
        flags[row] = 0
        self._count -= 1
        if row == self._last:
            self._last = NO_ROW
        parent = parents[row]
        if parent == NO_ROW:
            return
        parents[row] = NO_ROW
        children[parent] = left = children[parent] - 1
        if not left and flags[parent] & (PARKED | HELD) == PARKED:
            self._return(parent)

    def pick(self, is_held: Callable[[int], bool]) -> int:
        """See `EvictionOrder.pick`."""
        if self._pending:
            self._take_in()
        newer, children, flags = self._newer, self._children, self._flags
        for end in self._victim_rings():
            while (position := newer[end]) != end:
                row = position - self._first
                if children[row]:
                    flags[row] |= PARKED
                elif end != self._pinned_end and self._spare(row):
                    continue
                elif is_held(row):
                    flags[row] |= PARKED | HELD
                    self.held_skips += 1
                else:
                    return row
                self._unlink(position)
                self._last = NO_ROW
        return NO_ROW

    def unpark(self, row: int) -> None:
        """See `EvictionOrder.unpark`."""
        if self._flags[row] & HELD:
            self._flags[row] &= ~HELD
            if not self._children[row]:
                self._return(row)

    def is_leaf(self, row: int) -> bool:
        """See `EvictionOrder.is_leaf`."""
        return not self._children[row]

    def was_used(self, row: int) -> bool:
        """See `EvictionOrder.was_used`."""
        return bool(self._flags[row] & REUSED)

    def regret(self, size: int, *, was_used: bool) -> None:
        """See `EvictionOrder.regret`. For orders that learn from it."""

    def _ring_of_new(self, row: int, parent: int, *, is_back: bool) -> int:  # noqa: ARG002 - for subclasses
        """The ring that a new block enters."""
        return 0

    def _ring_of_restored(self, rows: Sequence[int], sizes: Sequence[int]) -> int:  # noqa: ARG002 - as above
        """The one ring that restored blocks enter."""
        return 0

    def _ring_of(self, row: int) -> int:  # noqa: ARG002 - as above
        """The ring that a parked block returns to, as its oldest (E5)."""
        return 0

    def _victim_rings(self) -> Iterable[int]:
        """Ends of the rings in the order in which they give victims, that of pinned blocks last."""
        return range(self._pinned_end + 1)

    def _use(self, rows: Sequence[int]) -> None:
        """Used blocks, least recent first. Parked ones go back into a ring, whoever holds them (E4)."""
        raise NotImplementedError

    def _spare(self, row: int) -> bool:  # noqa: ARG002 - as above
        """Whether a victim was moved elsewhere instead of leaving."""
        return False

    def _forget(self, row: int) -> None:
        """A block leaves: take it out of whatever a subclass counts."""

    def _done(self, row: int) -> None:
        """Nobody is going to ask for a block: let go of what speaks for keeping it."""

    def _give_up(self, row: int) -> None:
        """A block is done with: it is the next to go, once nothing is in its way (E15)."""
        self._done(row)
        if not self._flags[row] & PARKED:
            self._unlink(row + self._first)
            self._return(row)

    def _renew(self, rows: Sequence[int], end: int) -> None:
        """Make blocks the newest of a ring, the last one given the newest of all.

        A prefix that is used again mostly lies in one piece, and is moved as one.
        """
        older, newer, flags, first_row = self._older, self._newer, self._flags, self._first
        at, count = 0, len(rows)
        while at < count:
            row = rows[at]
            first = last = row + first_row
            at += 1
            if flags[row] & PARKED:
                flags[row] &= ~(PARKED | HELD)
            else:
                while at < count and newer[last] == rows[at] + first_row:
                    last = newer[last]
                    at += 1
                before, after = older[first], newer[last]
                older[after] = before
                newer[before] = after
            before = older[end]
            older[end] = last
            newer[last] = end
            older[first] = before
            newer[before] = first

    def _link(self, position: int, newer: int) -> None:
        """Put a position on the older side of another."""
        olders, newers = self._older, self._newer
        older = olders[newer]
        olders[newer] = position
        newers[position] = newer
        olders[position] = older
        newers[older] = position

    def _unlink(self, position: int) -> None:
        olders, newers = self._older, self._newer
        older, newer = olders[position], newers[position]
        olders[newer] = older
        newers[older] = newer

    def _return(self, row: int) -> None:
        """A parked row may leave again: it was the oldest when it was parked (E5)."""
        self._flags[row] &= ~PARKED
        end = self._pinned_end if self._flags[row] & PINNED else self._ring_of(row)
        self._link(row + self._first, self._newer[end])
        self._last = NO_ROW

    def _take_in(self) -> None:
        """Apply the touches that waited: per prefix the root is the most recent (E4)."""
        newest_first = list(dict.fromkeys(reversed(self._pending)))
        self._pending.clear()
        self._last = NO_ROW
        flags, rows = self._flags, len(self._flags)
        used = [row for row in reversed(newest_first) if row < rows and flags[row]]
        if self._pinned:
            self._renew([row for row in used if flags[row] & PINNED], self._pinned_end)
            used = [row for row in used if not flags[row] & PINNED]
        self._use(used)

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


def _runs(rows: Sequence[int], parents: Sequence[int]) -> list[_Run]:
    """Cut into chains of rows that follow each other: a tier that restores a million blocks has some thousand."""
    if isinstance(rows, range):
        begins = list(compress(range(1, len(rows)), map(ne, islice(parents, 1, None), rows)))
    else:
        begins = [
            index
            for index in range(1, len(rows))
            if parents[index] != rows[index - 1] or rows[index] != rows[index - 1] + 1
        ]
    return [(rows[begin], begin, end - begin) for begin, end in pairwise([0, *begins, len(rows)])]
