"""Quotas of one tier: which group a block belongs to, what the groups hold, and whose block leaves next.

A tier has one only where a quota is set: without, age or value alone decides and nothing here costs time.
Rules Q1-Q4: docs/internals/eviction.md. No lock here: the pool's is held by the caller (R1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from workmem.policy.ghosts import REGRET_REACH, Ghost, Ghosts
from workmem.policy.grouped import GroupedOrder
from workmem.policy.order import NO_ROW, EvictionOrder
from workmem.policy.quotas import NO_QUOTA, Quota, QuotaLedger
from workmem.store.catalog import Catalog


class TierShares:
    """Groups are named as quotas are: a tenant (the salt of a namespace) or "tenant/workflow".

    Blocks that no quota names are one group together, named "".
    """

    def __init__(self, catalog: Catalog, capacity_bytes: int, make: Callable[[], EvictionOrder]) -> None:
        self._catalog = catalog
        self._make = make
        self._capacity = capacity_bytes
        self._quotas: dict[str, Quota] = {}
        self.ledger = QuotaLedger(capacity_bytes)
        self.order = GroupedOrder(make)

    @property
    def quotas(self) -> dict[str, Quota]:
        """All quotas, by group."""
        return dict(self._quotas)

    def set_quota(self, group: str, quota: Quota) -> bool:
        """True when blocks change groups: `regroup` is due. Raises ValueError when it cannot be kept."""
        self.ledger.set_quota(group, quota)
        was_known = group in self._quotas
        if quota == NO_QUOTA:
            self._quotas.pop(group, None)
            return was_known
        self._quotas[group] = quota
        return not was_known

    def group(self, tenant: str, workflow: str) -> str:
        """The quota that a block counts for: that of its workflow, else of its tenant, else of all others."""
        if workflow and "/" not in tenant and (name := f"{tenant}/{workflow}") in self._quotas:
            return name
        return tenant if "/" not in tenant and tenant in self._quotas else ""

    def group_of(self, row: int) -> str:
        """As `group`, of a block that has a row."""
        catalog = self._catalog
        return self.group(catalog.space[row].namespace.tenant_salt, catalog.workflow_of(row))

    def insert(self, row: int, parent: int, size: int, *, is_back: bool) -> None:
        """See `EvictionOrder.insert`. What the group holds is charged apart, when room is taken."""
        self.order.insert(row, parent, size, is_back=is_back, group=self.group_of(row))

    def victim(
        self, group: str | None, size: int, is_held: Callable[[int], bool], bytes_of: Callable[[int], int]
    ) -> int:
        """Whose block leaves for `size` bytes of `group` (or of anybody); -1 where nobody is to give one."""
        ledger = self.ledger
        for name in ledger.sources(group, size):
            row = self.order.pick(is_held, group=name)
            if row == NO_ROW:
                continue
            if name != group and ledger.used(name) - bytes_of(row) < ledger.quota(name).floor_bytes:
                continue
            return row
        return NO_ROW

    def regroup(
        self,
        old: EvictionOrder,
        rows: Iterable[int],
        size_of: Callable[[int], int],
        is_here: Callable[[int], bool],
    ) -> None:
        """Take over all `rows` of an order, the next to leave first, and charge what they hold.

        What the old order had learned is lost. Takes time for every block of the tier, under the pool's lock:
        set quotas before the start where that is too long.
        """
        line = list(_drained(old))
        drained = set(line)
        line += [row for row in rows if row not in drained]
        self.order, self.ledger = GroupedOrder(self._make), QuotaLedger(self._capacity)
        for name, quota in self._quotas.items():
            self.ledger.set_quota(name, quota)
        by_group: dict[str, list[int]] = {}
        for row in line:
            by_group.setdefault(self.group_of(row), []).append(row)
        for name, mine in by_group.items():
            sizes = [size_of(row) for row in mine]
            self.order.restore(mine, [self._parent(row, is_here) for row in mine], sizes, group=name)
            self.ledger.charge(name, sum(sizes))

    def restore(self, rows: Sequence[int], parents: Sequence[int], sizes: Sequence[int]) -> None:
        """Blocks of one namespace that a start brought back: of a tenant, whatever the workflow was."""
        if not rows:
            return
        name = self.group_of(rows[0])
        self.order.restore(rows, parents, sizes, group=name)
        self.ledger.charge(name, sum(sizes))

    def _parent(self, row: int, is_here: Callable[[int], bool]) -> int:
        parent = self._catalog.parent_row(row)
        return parent if parent != NO_ROW and is_here(parent) else NO_ROW


def _drained(order: EvictionOrder) -> Iterable[int]:
    while (row := order.pick(lambda _: False)) != NO_ROW:
        order.remove(row)
        yield row


def note_missed(
    ghosts: Ghosts, ghost: Ghost | None, key: bytes, order: EvictionOrder | GroupedOrder, group: str
) -> None:
    """A block that a tier did not have has room there now; `ghost` is what `Ghosts.find` said before that.

    Once for each that comes: who waits for room asks more than once. `group` is the one it counts for, under quotas.
    """
    ghosts.count(key, ghost)
    if ghost is None or ghost.size > REGRET_REACH:
        return
    if isinstance(order, GroupedOrder):
        order.regret(ghost.bytes, was_used=ghost.was_used, group=group)
    else:
        order.regret(ghost.bytes, was_used=ghost.was_used)
