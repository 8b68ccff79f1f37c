"""A long scan of blocks that nobody asks for again, beside blocks that were used again: what is left of those.

What each order keeps is measured; the default must keep what the best of the others does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest

from workmem.policy.choose import EvictionName, make_order
from workmem.policy.order import NO_ROW, EvictionOrder

CAPACITY = 400
CHAIN = 10
ORDERS: dict[str, Callable[[], EvictionOrder]] = {
    name: partial(make_order, name, CAPACITY) for name in get_args(EvictionName)
}


class Tier:
    """Blocks of one byte, taken in chain by chain."""

    def __init__(self, order: EvictionOrder) -> None:
        self.order = order
        self.free = list(range(CAPACITY))
        self.here: set[int] = set()

    def take(self, length: int, *, is_back: bool = False) -> list[int]:
        rows: list[int] = []
        for _ in range(length):
            row = self.free.pop() if self.free else self._evict(rows)
            self.order.insert(row, rows[-1] if rows else NO_ROW, 1, is_back=is_back)
            self.here.add(row)
            rows.append(row)
        for row in rows:
            self.order.unpark(row)
        return rows

    def _evict(self, held: list[int]) -> int:
        row = self.order.pick(held.__contains__)
        self.order.remove(row)
        self.here.discard(row)
        self.left(row)
        return row

    def left(self, row: int) -> None:
        """For those who watch."""


class Watched(Tier):
    """Remembers which of `own` left; their numbers come back for other blocks."""

    def __init__(self, order: EvictionOrder) -> None:
        super().__init__(order)
        self.own: set[int] = set()

    def left(self, row: int) -> None:
        self.own.discard(row)


def kept(order: EvictionOrder, share: float, *, uses: int = 1, noise: float = 0.0) -> float:
    """How much of a working set of `share` of the tier is left after a scan of 4 times the tier.

    `noise`: of the tier, filled with blocks that are never used before the set comes.
    """
    tier = Watched(order)
    for _ in range(int(CAPACITY * noise) // CHAIN):
        tier.take(CHAIN)
    chains = [tier.take(CHAIN) for _ in range(int(CAPACITY * share) // CHAIN)]
    for _ in range(uses):
        for chain in chains:
            order.touch(chain)
            # Uses that wait together count once (E4): the next decision takes them in.
            order.pick(lambda _: False)
    tier.own = {row for chain in chains for row in chain}
    before = len(tier.own)
    for _ in range(4 * CAPACITY // CHAIN):
        tier.take(CHAIN)
    return len(tier.own) / before


CASES = [(share, uses, noise) for share in (0.2, 0.5, 0.8) for uses in (1, 3) for noise in (0.0, 2.0)]


@pytest.mark.parametrize(("share", "uses", "noise"), CASES)
def test_value_keeps_of_a_reused_set_what_the_best_of_the_others_keeps(share, uses, noise):
    left = {name: kept(make(), share, uses=uses, noise=noise) for name, make in ORDERS.items()}
    assert left["value"] >= max(left.values()), left
    assert left["lru"] == 0
