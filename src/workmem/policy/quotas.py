"""Who gives way: floors and ceilings in bytes of the groups (tenants, workflows) that share a tier. Pure."""

from __future__ import annotations

import msgspec


class Quota(msgspec.Struct, frozen=True):
    """What a group may count on, and what it may not exceed."""

    floor_bytes: int = 0
    """Never taken by another group."""
    ceiling_bytes: int | None = None
    """Past it a group makes room from what it holds itself. None: the tier is the limit."""


NO_QUOTA = Quota()


class QuotaLedger:
    """Bytes by group, and from which group room comes: one pass over the groups that hold some.

    Not thread-safe: call it under the pool's lock. Where no group has a quota, age alone should decide.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._quotas: dict[str, Quota] = {}
        self._used: dict[str, int] = {}
        """By group, the one that took bytes longest ago first."""

    def set_quota(self, group: str, quota: Quota) -> None:
        """Set or replace a group's quota. Raises ValueError when it cannot be kept."""
        floors = sum(q.floor_bytes for name, q in self._quotas.items() if name != group)
        if quota.floor_bytes < 0:
            raise ValueError(f"floor_bytes of {group!r} is {quota.floor_bytes}; give 0 or more")
        if quota.ceiling_bytes is not None and quota.ceiling_bytes < quota.floor_bytes:
            raise ValueError(
                f"ceiling_bytes of {group!r} is {quota.ceiling_bytes}, below its floor of {quota.floor_bytes}"
            )
        if floors + quota.floor_bytes > self._capacity:
            raise ValueError(
                f"floor_bytes of {group!r} is {quota.floor_bytes}, and the tier has only "
                f"{self._capacity - floors} bytes that are not promised to others"
            )
        self._quotas[group] = quota

    def quota(self, group: str) -> Quota:
        """The quota of a group."""
        return self._quotas.get(group, NO_QUOTA)

    def used(self, group: str) -> int:
        """Bytes that a group holds."""
        return self._used.get(group, 0)

    @property
    def total(self) -> int:
        """Bytes that all groups hold."""
        return sum(self._used.values())

    def charge(self, group: str, size: int) -> None:
        """A group took `size` bytes."""
        self._used[group] = self._used.pop(group, 0) + size

    def refund(self, group: str, size: int) -> None:
        """A group gave `size` bytes back."""
        left = self._used[group] - size
        assert left >= 0, f"group {group!r} gives back {size} bytes and holds {left + size}"
        if left:
            self._used[group] = left
        else:
            del self._used[group]

    def admits(self, group: str, size: int) -> bool:
        """Whether a group could ever hold `size` more bytes, if all else that may go went (Q1, Q2)."""
        ceiling = self.quota(group).ceiling_bytes
        if ceiling is not None and size > ceiling:
            return False
        promised = sum(
            min(self.used(name), quota.floor_bytes) for name, quota in self._quotas.items() if name != group
        )
        return size <= self._capacity - promised

    def is_over(self, group: str, size: int) -> bool:
        """Whether `size` more bytes take a group past its ceiling, be there room in the tier or not."""
        ceiling = self.quota(group).ceiling_bytes
        return ceiling is not None and self.used(group) + size > ceiling

    def sources(self, group: str | None, size: int) -> list[str]:
        """All groups that may give room for `size` more bytes of `group`, the first to be asked first.

        Asked again after each eviction; a group whose blocks are all held gives none. Without a group the room is for
        whoever comes. Rules Q1-Q4: docs/internals/eviction.md.
        """
        mine = self.used(group) if group is not None else 0
        if group is not None and self.is_over(group, size):
            return [group] if mine else []
        share = self._capacity / max(1, len(self._used.keys() | ({group} if group is not None else set())))
        ranked: list[tuple[float, str]] = []
        if group is not None and mine and mine + size > self.quota(group).floor_bytes:
            ranked.append((mine + size - max(share, self.quota(group).floor_bytes), group))
        for name, used in self._used.items():
            floor = self.quota(name).floor_bytes
            if name != group and used > floor:
                ranked.append((used - max(share, floor), name))
        ranked.sort(key=lambda entry: -entry[0])
        found = [name for _, name in ranked]
        return found if not mine or group is None or group in found else [*found, group]
