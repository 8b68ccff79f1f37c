"""What callers care for: pinned blocks, and blocks that live and die together. As the pool sees it.

No lock here: the pool's is held by the caller (R1). Rules P1-P3: docs/internals/eviction.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from workmem.core.keys import BlockKey
from workmem.core.outcomes import TierName
from workmem.policy.groups import LifeGroups
from workmem.policy.order import EvictionOrder, Prospect
from workmem.policy.pins import PinTable
from workmem.store.catalog import Catalog

PinnedBlock = tuple[bytes, BlockKey]
"""Root and key: a pin outlasts the row."""
LifeGroup = tuple[str, str]
"""Tenant and name: nobody's blocks hang on those of another tenant."""


class Care:
    """Pins and life groups. Costs one test per step until the first of them."""

    def __init__(self, catalog: Catalog, budget_bytes: int) -> None:
        self._catalog = catalog
        self.budget_bytes = budget_bytes
        self.pins: PinTable[PinnedBlock] = PinTable(budget_bytes)
        self.group_of: dict[int, LifeGroup] = {}
        """By row, for as long as any tier holds the block."""
        self._groups: dict[TierName, LifeGroups[LifeGroup, int]] = {
            TierName.DRAM: LifeGroups(),
            TierName.SSD: LifeGroups(),
        }
        self.is_used = False

    def is_pinned(self, row: int) -> bool:
        """Whether any pin names the block."""
        catalog = self._catalog
        return self.pins.is_pinned((catalog.space[row].root, catalog.key[row]))

    def entered(self, row: int, tier: TierName, order: EvictionOrder) -> None:
        """A block is in the order of a tier now."""
        if self.is_pinned(row):
            order.advise((row,), prospect=Prospect.PINNED)
        group = self.group_of.get(row)
        if group is not None:
            self._groups[tier].join(group, row)

    def left(self, row: int, tier: TierName) -> list[int]:
        """A block left a tier. Returns the rest of its group there, which is to follow."""
        return self._groups[tier].leave(row)

    def gone(self, row: int) -> None:
        """No tier holds the block any more."""
        self.group_of.pop(row, None)

    def bind(self, row: int, group: LifeGroup, tiers: Sequence[TierName]) -> None:
        """A block that lies in `tiers` joins a group, unless it is in one."""
        if row in self.group_of:
            return
        self.group_of[row] = group
        for tier in tiers:
            self._groups[tier].join(group, row)

    def group_size(self, group: LifeGroup) -> int:
        """Blocks of a group in the tier that has most of them."""
        return max(groups.size(group) for groups in self._groups.values())

    def used_with(self, rows: Sequence[int], tier: TierName) -> Sequence[int]:
        """What a use of `rows` is a use of."""
        return self._groups[tier].used_with(rows) if self.group_of else rows

    @property
    def group_count(self) -> int:
        """Groups with a block in dram."""
        return len(self._groups[TierName.DRAM])
