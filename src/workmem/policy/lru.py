"""The block that was used longest ago leaves first: what the other orders are measured against."""

from __future__ import annotations

from collections.abc import Sequence

from workmem.policy.rings import Rings


class Lru(Rings):
    """See `EvictionOrder`. Leaves only, like every order; a scan flushes it."""

    def __init__(self) -> None:
        super().__init__(ends=1)

    def _use(self, rows: Sequence[int]) -> None:
        self._renew(rows, 0)
