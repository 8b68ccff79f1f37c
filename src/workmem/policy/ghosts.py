"""Ghosts: keys of blocks that left a tier, and what a bigger tier would have hit. Pure.

Ghosts lie in the order in which they left, cut into stretches: the first holds what a tier of 1.25
capacities would still have, and so on. Exact for LRU with blocks of one size; close for the orders here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

SIZES = (1.25, 1.5, 2.0, 4.0)
"""Sizes of the imagined tiers, in capacities of the real one."""

REGRET_REACH = 2.0
"""Of the capacity: what comes back though a tier of this size would still have it left too early."""

GHOSTS_MAX = 1 << 14
"""Of a tier: some 3 MB, whatever its size. So many keys place hits to a few percent."""
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


class Ghosts:
    """Bounded memory of what left one tier: some 180 bytes per ghost.

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
        self._sizes = tuple(sorted(sizes))
        edges = [int((size - 1) * capacity_bytes / one_in) for size in (1.0, *self._sizes)]
        self._room = [edge - before for before, edge in pairwise(edges)]
        """Bytes left in each stretch."""
        self._stretches = [OrderedDict[int, int]() for _ in self._sizes]
        """Twice the size of a block, and one more if it was used, by the number that stands for its key."""
        self._entries_max = entries_max
        self._one_in = one_in
        self._hits = [0] * len(self._sizes)
        self.misses = 0
        """Blocks asked for that the tier did not have."""
        self.cut_short = 0

    def __len__(self) -> int:
        return sum(map(len, self._stretches))

    def left(self, key: bytes, size: int, *, was_used: bool = False) -> None:
        """A block of `size` bytes was evicted. `was_used`: after it had come (`EvictionOrder.was_used`)."""
        number = int.from_bytes(key[:8], "little")
        if number % self._one_in:
            return
        self._drop(number)
        self._stretches[0][number] = 2 * size + was_used
        self._room[0] -= size
        if self._room[0] < 0:
            self._spill()
        if len(self) > self._entries_max:
            self.cut_short += 1
            last = max(index for index, stretch in enumerate(self._stretches) if stretch)
            self._room[last] += self._stretches[last].popitem(last=False)[1] // 2

    def find(self, key: bytes) -> Ghost | None:
        """What is remembered of a block that is asked for. Look before room is made for it: that pushes ghosts on."""
        number = int.from_bytes(key[:8], "little")
        if number % self._one_in:
            return None
        for index, stretch in enumerate(self._stretches):
            if number in stretch:
                known = stretch[number]
                return Ghost(self._sizes[index], known // 2 * self._one_in, bool(known % 2))
        return None

    def count(self, key: bytes, ghost: Ghost | None) -> None:
        """A block that was not here comes in, of which `find` said `ghost` before. Once for each that comes."""
        self.misses += 1
        if ghost is None:
            return
        self._hits[self._sizes.index(ghost.size)] += self._one_in
        self._drop(int.from_bytes(key[:8], "little"))

    def hits(self) -> dict[float, int]:
        """By size of the imagined tier: of the `misses`, how many blocks it would have had."""
        return {size: sum(self._hits[: index + 1]) for index, size in enumerate(self._sizes)}

    def _spill(self) -> None:
        """Pass the oldest of a stretch on to the next, and of the last out, until each fits."""
        room = self._room
        for index, stretch in enumerate(self._stretches):
            while room[index] < 0:
                number, known = stretch.popitem(last=False)
                room[index] += known // 2
                if index + 1 < len(room):
                    self._stretches[index + 1][number] = known
                    room[index + 1] -= known // 2

    def _drop(self, number: int) -> None:
        for index, stretch in enumerate(self._stretches):
            if number in stretch:
                self._room[index] += stretch.pop(number) // 2
                return
