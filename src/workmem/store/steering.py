"""What callers say about blocks, made advice to the eviction orders: see `store.contract.Steering`.

Every public method takes the pool's lock (R1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from workmem.core.clock import Clock
from workmem.core.errors import ClientError, ConfigError
from workmem.core.events import BoundReached
from workmem.core.keys import BlockKey
from workmem.core.outcomes import TierName
from workmem.core.units import parse_bytes
from workmem.policy.ghosts import Ghosts
from workmem.policy.order import Prospect
from workmem.policy.pins import PinChange
from workmem.policy.quotas import NO_QUOTA, Quota
from workmem.store.care import PinnedBlock
from workmem.store.catalog import NO_SEGMENT, Space
from workmem.store.config import QuotaConfig
from workmem.store.contract import PinResult
from workmem.store.residents import Residents
from workmem.store.selector import shown_digest
from workmem.store.ssd_index import SsdIndex

PINS_MAX = 4096
"""Of all owners together: each costs an entry, however few blocks it names."""
OWNERS_TOLD_MAX = 16
"""Owners whose pins have readings of their own, those that name most; the others are in the sums."""
GROUP_MAX = 4096
"""Blocks of a group, in each tier: they leave, and are used, under one hold of the lock."""


class PinDesk:
    """Pins, announced uses and life groups of a store."""

    def __init__(self, state: Residents, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._roots: dict[tuple[str, str], bytes] = {}
        """Root of each pin, by owner and name."""

    def __len__(self) -> int:
        return len(self._roots)

    def pin(self, space: Space, keys: Sequence[BlockKey], owner: str, name: str, ttl_s: float) -> PinResult:
        """See `Steering.pin`."""
        if not ttl_s > 0:
            raise ClientError(f"ttl_s of a pin is {ttl_s}; give a number above 0", param="ttl_s")
        state, care = self._state, self._state.care
        with state.outbox:
            known = (owner, name) in self._roots
            if not known and len(self._roots) >= PINS_MAX:
                detail = f"{owner!r} wanted one more"
                state.outbox.tell(BoundReached(name="store.pins.count", limit=PINS_MAX, detail=detail))
                return PinResult(blocks=0, demoted=(name,))
            care.is_used = True
            blocks: dict[PinnedBlock, int] = {(space.root, key): space.frame_bytes for key in keys}
            self._roots[owner, name] = space.root
            now = self._clock.monotonic()
            change = care.pins.pin(owner, name, blocks, now_s=now, ttl_s=ttl_s)
            self._apply(change)
            here = sum(key in space.rows for key in keys)
            return PinResult(blocks=here, demoted=tuple(demoted for _, demoted in change.demoted))

    def unpin(self, owner: str, name: str) -> bool:
        """See `Steering.unpin`."""
        with self._state.outbox:
            return self._unpin(owner, name)

    def expire(self) -> None:
        """End the pins whose time is over."""
        if not self._roots:
            return
        with self._state.outbox:
            change = self._state.care.pins.expire(self._clock.monotonic())
            self._state.counts["pins_expired"] += len(change.expired)
            self._apply(change)

    def gauges(self) -> dict[str, float]:
        """How many pins there are, the bytes that they name (a block of two owners counts for both), and whose."""
        owners = self._state.care.pins.owners()
        readings: dict[str, float] = {
            "store_pins": len(self),
            "store_pins_bytes": sum(size for _, _, size in owners),
            "store_pins_owners": len(owners),
        }
        for owner, pins, size in owners[:OWNERS_TOLD_MAX]:
            name = f"store_pins_owner_{shown_digest(owner) or 'nobody'}"
            readings |= {f"{name}_count": pins, f"{name}_bytes": size}
        return readings

    def purged(self, root: bytes) -> None:
        """A namespace is gone for good: so are its pins."""
        with self._state.outbox:
            for owner, name in [pin for pin, of in self._roots.items() if of == root]:
                self._unpin(owner, name)

    def announce(self, space: Space, keys: Sequence[BlockKey], prospect: Prospect) -> int:
        """See `Steering.announce`."""
        if prospect not in {Prospect.EXPECTED, Prospect.DONE}:
            raise ClientError(f"prospect is {prospect!r}; announce EXPECTED or DONE", param="prospect")
        state, care = self._state, self._state.care
        with state.outbox:
            rows = [row for row in map(space.rows.get, keys) if row is not None]
            count = len(rows)
            if care.is_used:
                rows = [row for row in rows if not care.is_pinned(row)]
            self._advise(rows, prospect)
            return count

    def bind(self, space: Space, keys: Sequence[BlockKey], group: str) -> int:
        """See `Steering.bind`."""
        if len(keys) > GROUP_MAX:
            raise ClientError(
                f"{len(keys)} blocks are to live and die together; {GROUP_MAX} may", param="keys"
            )
        state, care = self._state, self._state.care
        own = (space.namespace.tenant_salt, group)
        with state.outbox:
            care.is_used = True
            rows = [row for row in map(space.rows.get, keys) if row is not None]
            size = care.group_size(own) + sum(row not in care.group_of for row in rows)
            if size > GROUP_MAX:
                raise ClientError(
                    f"group {group[:64]!r} would have {size} blocks; {GROUP_MAX} may live and die together",
                    param="group",
                )
            for row in rows:
                in_tiers = ((TierName.DRAM, state.is_in_order(row)), (TierName.SSD, self._is_on_ssd(row)))
                care.bind(row, own, [tier for tier, is_there in in_tiers if is_there])
            return sum(care.group_of[row] == own for row in rows)

    # -- the lock is held

    def _unpin(self, owner: str, name: str) -> bool:
        if self._roots.pop((owner, name), None) is None:
            return False
        self._apply(self._state.care.pins.unpin(owner, name))
        return True

    def _apply(self, change: PinChange[PinnedBlock]) -> None:
        for pin in (*change.demoted, *change.expired):
            self._roots.pop(pin, None)
        if change.demoted:
            detail = ", ".join(f"pin {name!r} of {owner!r} ended" for owner, name in change.demoted[:8])
            limit = self._state.care.budget_bytes
            self._state.counts["pins_demoted"] += len(change.demoted)
            self._state.outbox.tell(BoundReached(name="store.pins.budget", limit=limit, detail=detail))
        self._advise(self._rows(change.pinned), Prospect.PINNED)
        self._advise(self._rows(change.unpinned), Prospect.UNKNOWN)

    def _rows(self, blocks: Iterable[PinnedBlock]) -> list[int]:
        spaces = self._state.spaces
        found = (spaces[root].rows.get(key) for root, key in blocks if root in spaces)
        return [row for row in found if row is not None]

    def _advise(self, rows: Sequence[int], prospect: Prospect) -> None:
        self._state.advise(rows, prospect=prospect)
        if self._state.advise_ssd is not None:
            self._state.advise_ssd(rows, prospect)

    def _is_on_ssd(self, row: int) -> bool:
        return self._state.catalog.segment[row] != NO_SEGMENT


class QuotaDesk:
    """Quotas of both tiers. `ssd_bytes` is what the ssd tier can promise; None where it is off."""

    def __init__(self, state: Residents, index: SsdIndex | None, ssd_bytes: int) -> None:
        self._state = state
        self._index = index
        self._ssd_bytes = ssd_bytes

    def set_quota(self, group: str, tier: TierName, floor_bytes: int, ceiling_bytes: int | None) -> None:
        """See `Steering.set_quota`."""
        quota = Quota(floor_bytes, ceiling_bytes) if floor_bytes or ceiling_bytes is not None else NO_QUOTA
        if tier is not TierName.DRAM and (tier is not TierName.SSD or self._index is None):
            text = f"tier is {tier.value}; quotas are for dram, and for ssd where it is on"
            raise ClientError(text, param="tier")
        try:
            with self._state.outbox:
                if quota != NO_QUOTA and "/" in group:
                    self._state.catalog.workflow_number(group.partition("/")[2], has_quota=True)
                if tier is TierName.DRAM or self._index is None:
                    self._state.set_quota(group, quota)
                else:
                    self._index.set_quota(group, quota, self._ssd_bytes)
        except ValueError as error:
            raise ClientError(str(error), param="quota") from error

    def gauges(self) -> dict[str, float]:
        """What each group with a quota holds, floor and ceiling beside it."""
        readings: dict[str, float] = {}
        for tier, shares in (
            (TierName.DRAM, self._state.shares),
            (TierName.SSD, self._index and self._index.shares),
        ):
            if not shares:
                continue
            readings[f"store_{tier}_quota_groups"] = len(shares.quotas)
            for group, quota in shares.quotas.items():
                name = f"store_{tier}_quota_{label_of(group)}"
                readings[f"{name}_used_bytes"] = shares.ledger.used(group)
                readings[f"{name}_floor_bytes"] = quota.floor_bytes
                if quota.ceiling_bytes is not None:
                    readings[f"{name}_ceiling_bytes"] = quota.ceiling_bytes
        return readings


def label_of(group: str) -> str:
    """A group in the name of a reading: who may read those need not learn who the tenants are (`store stat`)."""
    return "_".join(map(shown_digest, group.split("/", 1))) if group else "others"


def set_quotas(desk: QuotaDesk, quotas: Mapping[str, QuotaConfig], tier: TierName) -> None:
    """Set what the configuration says of a tier. Raises ConfigError with the path of what cannot be kept."""
    for group, wanted in quotas.items():
        path = f'$.store.quotas."{group}".{tier}'
        if tier is TierName.DRAM:
            floor, ceiling = wanted.dram_floor, wanted.dram_ceiling
        else:
            floor, ceiling = wanted.ssd_floor, wanted.ssd_ceiling
        floor_bytes = parse_bytes(floor, f"{path}_floor")
        ceiling_bytes = None if ceiling == "" else parse_bytes(ceiling, f"{path}_ceiling")
        if not floor_bytes and ceiling_bytes is None:
            continue
        try:
            desk.set_quota(group, tier, floor_bytes, ceiling_bytes)
        except ClientError as error:
            raise ConfigError(f"{path}_floor and {tier}_ceiling: {error}") from error


def order_gauges(tier: str, of: Residents | SsdIndex) -> dict[str, float]:
    """Which eviction order a tier is under, and how many of its blocks are pinned. `tier` as readings name it."""
    return {f"store_{tier}_eviction_{of.eviction}": 1, f"store_{tier}_pinned_pages": of.order.pinned}


def ghost_gauges(tier: str, ghosts: Ghosts) -> dict[str, float]:
    """Blocks that were put into a tier, and how many of them one of so many percent of its size would have had."""
    readings: dict[str, float] = {
        f"store_{tier}_missed_blocks_total": ghosts.misses,
        f"store_{tier}_ghosts_cut_short_total": ghosts.cut_short,
    }
    readings |= {
        f"store_{tier}_would_hit_at_{round(size * 100)}_percent_total": hits
        for size, hits in ghosts.hits().items()
    }
    return readings
