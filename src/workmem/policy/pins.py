"""Pins: blocks that somebody wants kept for a while, within a budget. Pure: times are passed in.

A pin is advice to the eviction order (`Prospect.PINNED`), not a hold: whoever reads takes a lease.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

import msgspec

Block = TypeVar("Block", bound=Hashable)


class PinChange(msgspec.Struct, Generic[Block], frozen=True):
    """What a step changed. Blocks of other pins are in neither list."""

    pinned: tuple[Block, ...] = ()
    """Blocks that were not pinned before."""
    unpinned: tuple[Block, ...] = ()
    """Blocks that no pin names any more."""
    demoted: tuple[tuple[str, str], ...] = ()
    """Owner and name of pins that ended because a budget was exceeded, oldest first; say so in an event."""
    expired: tuple[tuple[str, str], ...] = ()
    """Owner and name of pins whose time was over."""


class _Pin(Generic[Block]):
    __slots__ = ("blocks", "ends_s")

    def __init__(self, blocks: Mapping[Block, int], ends_s: float) -> None:
        self.blocks = dict(blocks)
        self.ends_s = ends_s


class _Owner(Generic[Block]):
    """The pins of an owner, oldest first, and the bytes they name; a block in two pins counts once."""

    def __init__(self) -> None:
        self.pins: dict[str, _Pin[Block]] = {}
        self.uses: dict[Block, int] = {}
        self.bytes = 0


class PinTable(Generic[Block]):
    """All pins of a store. `budget_bytes` bounds what each owner's pins may name together.

    A pin never fails: past the budget the owner's oldest pins are demoted, and one that is larger than the
    budget alone is demoted itself, at once (P2). Not thread-safe: call it under the pool's lock.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._owners: dict[str, _Owner[Block]] = {}
        self._uses: dict[Block, int] = {}
        """How many pins name a block, whoever owns them."""
        self._ends_s: dict[Block, float] = {}
        """When the last pin that ever named a block ends, of those that are pinned."""

    def __len__(self) -> int:
        return sum(len(owner.pins) for owner in self._owners.values())

    def pin(
        self, owner: str, name: str, blocks: Mapping[Block, int], *, now_s: float, ttl_s: float
    ) -> PinChange[Block]:
        """Pin `blocks` (with their bytes) until `now_s + ttl_s`. A pin of the same name is replaced and renewed."""
        if sum(blocks.values()) > self._budget:
            return msgspec.structs.replace(self.unpin(owner, name), demoted=((owner, name),))
        mine = self._owners.setdefault(owner, _Owner())
        before = {**self._snapshot(owner), **{block: block in self._uses for block in blocks}}
        if name in mine.pins:
            self._end(owner, name)
            mine = self._owners.setdefault(owner, mine)
        pin = _Pin(blocks, now_s + ttl_s)
        mine.pins[name] = pin
        for block, size in pin.blocks.items():
            self._uses[block] = self._uses.get(block, 0) + 1
            self._ends_s[block] = max(pin.ends_s, self._ends_s.get(block, pin.ends_s))
            mine.uses[block] = mine.uses.get(block, 0) + 1
            if mine.uses[block] == 1:
                mine.bytes += size
        return self._change(before, demoted=self._keep_budget(owner))

    def unpin(self, owner: str, name: str) -> PinChange[Block]:
        """End a pin. Nothing happens when there is none."""
        if owner not in self._owners or name not in self._owners[owner].pins:
            return PinChange()
        before = self._snapshot(owner)
        self._end(owner, name)
        return self._change(before)

    def expire(self, now_s: float) -> PinChange[Block]:
        """End all pins whose time is over."""
        over = [
            (owner, name)
            for owner, mine in self._owners.items()
            for name, pin in mine.pins.items()
            if pin.ends_s <= now_s
        ]
        before: dict[Block, bool] = {}
        for owner, name in over:
            before.update(dict.fromkeys(self._owners[owner].pins[name].blocks, True))
        for owner, name in over:
            self._end(owner, name)
        return self._change(before, expired=over)

    def is_pinned(self, block: Block) -> bool:
        """Whether any pin names the block, resident or not."""
        return block in self._uses

    def ends_s(self, block: Block) -> float | None:
        """When a block will not be pinned any more, unless a pin is ended before its time; None where none names it."""
        return self._ends_s.get(block)

    def owners(self) -> list[tuple[str, int, int]]:
        """Name, pins and bytes named of each owner, whoever names most first. May be asked without the lock."""
        found = [(name, len(mine.pins), mine.bytes) for name, mine in list(self._owners.items())]
        return sorted(found, key=lambda owner: (-owner[2], owner[0]))

    def _snapshot(self, owner: str) -> dict[Block, bool]:
        return dict.fromkeys(self._owners[owner].uses, True) if owner in self._owners else {}

    def _change(
        self,
        before: Mapping[Block, bool],
        *,
        demoted: Iterable[tuple[str, str]] = (),
        expired: Iterable[tuple[str, str]] = (),
    ) -> PinChange[Block]:
        return PinChange(
            pinned=tuple(block for block, was in before.items() if not was and block in self._uses),
            unpinned=tuple(block for block, was in before.items() if was and block not in self._uses),
            demoted=tuple(demoted),
            expired=tuple(expired),
        )

    def _keep_budget(self, owner: str) -> list[tuple[str, str]]:
        demoted: list[tuple[str, str]] = []
        while owner in self._owners and self._owners[owner].bytes > self._budget:
            oldest = next(iter(self._owners[owner].pins))
            self._end(owner, oldest)
            demoted.append((owner, oldest))
        return demoted

    def _end(self, owner: str, name: str) -> None:
        mine = self._owners[owner]
        for block, size in mine.pins.pop(name).blocks.items():
            mine.uses[block] -= 1
            if not mine.uses[block]:
                del mine.uses[block]
                mine.bytes -= size
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
                del self._ends_s[block]
        if not mine.pins:
            del self._owners[owner]
