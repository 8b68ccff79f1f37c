"""The eviction orders by name, as a tier's setting says it."""

from __future__ import annotations

from typing import Literal, assert_never

from workmem.policy.lru import Lru
from workmem.policy.order import EvictionOrder
from workmem.policy.s3fifo import S3Fifo
from workmem.policy.segmented_lru import SegmentedLru
from workmem.policy.value import ValueOrder

EvictionName = Literal["value", "segmented_lru", "s3fifo", "lru"]

PROTECTED_SHARE = 0.8
"""Of a tier that reused blocks may fill under segmented LRU: the rest is where new blocks prove themselves (R8)."""


def make_order(name: EvictionName, capacity_bytes: int) -> EvictionOrder:
    """An empty order for a tier of `capacity_bytes`."""
    match name:
        case "value":
            return ValueOrder()
        case "segmented_lru":
            return SegmentedLru(int(capacity_bytes * PROTECTED_SHARE))
        case "s3fifo":
            return S3Fifo(capacity_bytes)
        case "lru":
            return Lru()
        case _:
            assert_never(name)
