"""What a running store says of its tiers: which order, whose quotas and pins, and what more room would have hit.

Taken from its readings (`readings`), by their names: those travel to whoever asks, and so nothing else has to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

_QUOTA = re.compile(r"store_(?P<tier>[a-z]+)_quota_(?P<group>.+)_used_bytes")
_OWNER = re.compile(r"store_pins_owner_(?P<owner>.+)_count")
_GHOST = re.compile(r"store_(?P<tier>[a-z]+)_would_hit_at_(?P<percent>\d+)_percent_total")
_ORDER = re.compile(r"store_(?P<tier>[a-z]+)_eviction_(?P<order>.+)")


class QuotaStat(msgspec.Struct, frozen=True, kw_only=True):
    """A group with a quota, by the digests of tenant and workflow."""

    group: str
    used_bytes: int
    floor_bytes: int
    ceiling_bytes: int | None


class TierStat(msgspec.Struct, frozen=True, kw_only=True):
    """A tier as it is now."""

    tier: str
    state: str
    """`ok`; `error` while it is left alone for a pause; `rebuilding` while it is away and to be opened anew."""
    eviction: str
    capacity_bytes: int
    used_bytes: int
    pages: int
    pinned_pages: int
    missed_blocks: int
    would_hit: dict[int, int]
    """Of these, how many a tier of so many percent of the size would have had."""
    quotas: list[QuotaStat]


class OwnerStat(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever has pins, by digest."""

    owner: str
    pins: int
    bytes: int


class RunningStat(msgspec.Struct, frozen=True, kw_only=True):
    """A store that runs."""

    tiers: list[TierStat]
    pins: int
    pinned_bytes: int
    """That pins name, here or not; a block that two owners pin counts for both."""
    owners: int
    largest_owners: list[OwnerStat]


def running_stat(gauges: Mapping[str, float]) -> RunningStat:
    """What `gauges` of a store say."""
    of_tier = [match["tier"] for name in gauges if (match := _ORDER.fullmatch(name))]
    owners = [match["owner"] for name in gauges if (match := _OWNER.fullmatch(name))]
    return RunningStat(
        tiers=[_tier(gauges, tier) for tier in of_tier],
        pins=int(gauges.get("store_pins", 0)),
        pinned_bytes=int(gauges.get("store_pins_bytes", 0)),
        owners=int(gauges.get("store_pins_owners", 0)),
        largest_owners=[
            OwnerStat(
                owner=owner,
                pins=int(gauges[f"store_pins_owner_{owner}_count"]),
                bytes=int(gauges[f"store_pins_owner_{owner}_bytes"]),
            )
            for owner in owners
        ],
    )


def _tier(gauges: Mapping[str, float], tier: str) -> TierStat:
    def read(name: str) -> int:
        return int(gauges[f"store_{tier}_{name}"])

    eviction = next(m["order"] for name in gauges if (m := _ORDER.fullmatch(name)) and m["tier"] == tier)
    would_hit = {
        int(match["percent"]): int(hits)
        for name, hits in gauges.items()
        if (match := _GHOST.fullmatch(name)) and match["tier"] == tier
    }
    groups = [
        match["group"] for name in gauges if (match := _QUOTA.fullmatch(name)) and match["tier"] == tier
    ]
    state = "error" if gauges.get(f"store_{tier}_error") else "ok"
    return TierStat(
        tier=tier,
        state="rebuilding" if gauges.get(f"store_{tier}_away") else state,
        eviction=eviction,
        capacity_bytes=read("capacity_bytes"),
        used_bytes=read("used_bytes"),
        pages=read("pages"),
        pinned_pages=read("pinned_pages"),
        missed_blocks=read("missed_blocks_total"),
        would_hit=would_hit,
        quotas=[_quota(gauges, tier, group) for group in groups],
    )


def _quota(gauges: Mapping[str, float], tier: str, group: str) -> QuotaStat:
    name = f"store_{tier}_quota_{group}"
    ceiling = gauges.get(f"{name}_ceiling_bytes")
    return QuotaStat(
        group=group.replace("_", "/"),
        used_bytes=int(gauges[f"{name}_used_bytes"]),
        floor_bytes=int(gauges[f"{name}_floor_bytes"]),
        ceiling_bytes=None if ceiling is None else int(ceiling),
    )
