"""What the store knows of pages, told to a tier that acts on it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

from workmem.policy.order import Prospect
from workmem.store.pool import Pool
from workmem.store.ssd_index import SsdIndex
from workmem.store.tiers.contract import AdvisedTier, PageFacts, PageName

log = logging.getLogger(__name__)

EXPECTED_S = 600.0
"""For so long an announced use is waited for: whoever announces does not say how long it takes."""


class Advice:
    """Made for one open tier, in the place of the one before. Every method is called with the pool's lock held (R1)."""

    def __init__(self, pool: Pool, tier: AdvisedTier, index: SsdIndex) -> None:
        self._state = pool.state
        self._clock = pool.clock
        self._tier = tier
        self._index = index
        pool.state.advise_ssd = self.advise

    def facts_of(self, row: int) -> PageFacts:
        """Of a page that is to be put: its life group, else its workflow, and how long it is pinned."""
        care, catalog = self._state.care, self._state.catalog
        space = catalog.space[row]
        group = care.group_of.get(row)
        if group is None and catalog.workflow[row]:
            group = (space.namespace.tenant_salt, f"workflow {catalog.workflow_of(row)}")
        wanted_s = self._pinned_s(row) if care.is_used else 0.0
        return PageFacts(_digest(*group) if group else "", wanted_s)

    def advise(self, rows: Sequence[int], prospect: Prospect) -> None:
        """In the place of the index's own, which hears of it first."""
        self._index.advise(rows, prospect)
        catalog = self._state.catalog
        by_time: dict[float, list[PageName]] = {}
        for row in rows:
            # Also of what is still on its way there.
            name = PageName(catalog.space[row].root, bytes(catalog.key[row]))
            by_time.setdefault(self._wanted_s(row, prospect), []).append(name)
        for wanted_s, names in by_time.items():
            try:
                self._tier.advise(names, PageFacts(wanted_s=wanted_s))
            except Exception:  # plugin boundary: a tier is other people's code, and this is only advice
                log.exception("a tier raised instead of taking advice")

    def _wanted_s(self, row: int, prospect: Prospect) -> float:
        if prospect is Prospect.EXPECTED:
            return EXPECTED_S
        return self._pinned_s(row) if prospect is Prospect.PINNED else 0.0

    def _pinned_s(self, row: int) -> float:
        catalog = self._state.catalog
        ends_s = self._state.care.pins.ends_s((catalog.space[row].root, catalog.key[row]))
        return 0.0 if ends_s is None else max(0.0, round(ends_s - self._clock.monotonic(), 3))


def _digest(tenant: str, name: str) -> str:
    """Tells groups apart, and says nothing of tenants."""
    body = f"{len(tenant)} {tenant} {name}".encode()
    return hashlib.sha256(b"workmem.group.1\0" + body).hexdigest()[:32]
