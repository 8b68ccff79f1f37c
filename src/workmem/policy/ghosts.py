"""Ghosts: keys of blocks that left a tier, and what a bigger tier would have hit. Pure.

Ghosts lie in the order in which they left, cut into stretches: the first holds what a tier of 1.25
capacities would still have, and so on. Exact for LRU with blocks of one size; close for the orders here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from workmem.policy.order import NO_ROW
from workmem.policy.rings import Rings

SIZES = (1.25, 1.5, 2.0, 4.0)
"""Sizes of the imagined tiers, in capacities of the real one."""

REGRET_REACH = 2.0
"""Of the capacity: what comes back though a tier of this size would still have it left too early."""

GHOSTS_MAX = 1 << 14
"""Of a tier: some 2 MB, whatever its size. So many keys place hits to a few percent."""
_BLOCK_BYTES_LEAST = 64 * 1024


class Ghost(NamedTuple):
    """A block that left and is asked for."""

    size: float
    """Of the smallest imagined tier that would still have it, in capacities."""
    bytes: int
    """Its own, times the keys that this one stands for."""
    was_used: bool


def ghosts_of(capacity_bytes: int) -> Ghosts:
    """Ghosts of a tier, thinned out so that those of four capacities fit if blocks have 64 KiB or more."""
    blocks = int((SIZES[-1] - 1) * capacity_bytes / _BLOCK_BYTES_LEAST)
    return Ghosts(capacity_bytes, entries_max=GHOSTS_MAX, one_in=max(1, -(-blocks // GHOSTS_MAX)))


class Ghosts(Rings):
    """Bounded memory of what left one tier: some 130 bytes per ghost, most of it its entry in a dict.

    `entries_max` bounds the ghosts kept; one that is pushed out by that counts in `cut_short`. `one_in`
    thins them out: of all keys only those are followed whose own bits say so, one in so many, and their
    hits count so many times. Keys must be uniform in their first 8 bytes, as digests are.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        sizes: Sequence[float] = SIZES,
        entries_max: int = 1 << 16,
        one_in: int = 1,
    ) -> None:
        super().__init__(ends=len(sizes))
        self._sizes = tuple(sorted(sizes))
        edges = [int((size - 1) * capacity_bytes / one_in) for size in (1.0, *self._sizes)]
        self._room = [edge - before for before, edge in pairwise(edges)]
        """Bytes left in each stretch."""
        self._entries_max = entries_max
        self._one_in = one_in
        self._row_of: dict[int, int] = {}
        self._number = array("Q")
        self._stretch = bytearray()
        self._was_used = bytearray()
        self._free: list[int] = []
        self._hits = [0] * len(self._sizes)
        self.misses = 0
        """Blocks asked for that the tier did not have."""
        self.cut_short = 0

    def left(self, key: bytes, size: int, *, was_used: bool = False) -> None:
        """A block of `size` bytes was evicted. `was_used`: after it had come (`EvictionOrder.was_used`)."""
        number = int.from_bytes(key[:8], "little")
        if number % self._one_in:
            return
        if number in self._row_of:
            self._drop(self._row_of[number])
        row = self._free.pop() if self._free else len(self._number)
        self.insert(row, NO_ROW, size)
        self._row_of[number] = row
        self._number[row] = number
        self._was_used[row] = was_used
        self._room[0] -= size
        self._stretch[row] = 0
        for stretch in range(len(self._sizes)):
            self._spill(stretch)
        if len(self) > self._entries_max:
            self.cut_short += 1
            last = max(end for end in range(len(self._sizes)) if self._newer[end] != end)
            self._drop(self._newer[last] - self._first)

    def find(self, key: bytes) -> Ghost | None:
        """What is remembered of a block that is asked for. Look before room is made for it: that pushes ghosts on."""
        row = self._row_of.get(int.from_bytes(key[:8], "little"))
        if row is None:
            return None
        size = self._sizes[self._stretch[row]]
        return Ghost(size, self._size[row] * self._one_in, bool(self._was_used[row]))

    def count(self, key: bytes, ghost: Ghost | None) -> None:
        """A block that was not here comes in, of which `find` said `ghost` before. Once for each that comes."""
        self.misses += 1
        if ghost is None:
            return
        self._hits[self._sizes.index(ghost.size)] += self._one_in
        row = self._row_of.get(int.from_bytes(key[:8], "little"))
        if row is not None:
            self._drop(row)

    def hits(self) -> dict[float, int]:
        """By size of the imagined tier: of the `misses`, how many blocks it would have had."""
        return {size: sum(self._hits[: index + 1]) for index, size in enumerate(self._sizes)}

    def _spill(self, stretch: int) -> None:
        """Pass the oldest of a stretch on to the next, or out of the last, until it fits."""
        while self._room[stretch] < 0:
            row = self._newer[stretch] - self._first
            if stretch + 1 == len(self._sizes):
                self._drop(row)
                continue
            self._room[stretch] += self._size[row]
            self._room[stretch + 1] -= self._size[row]
            self._stretch[row] = stretch + 1
            self._renew((row,), stretch + 1)

    def _drop(self, row: int) -> None:
        self.remove(row)
        self._room[self._stretch[row]] += self._size[row]
        del self._row_of[self._number[row]]
        self._free.append(row)

    def _reach(self, row: int) -> None:
        super()._reach(row)
        missing = len(self._flags) - len(self._stretch)
        self._number.frombytes(bytes(8 * missing))
        self._stretch.extend(bytes(missing))
        self._was_used.extend(bytes(missing))
