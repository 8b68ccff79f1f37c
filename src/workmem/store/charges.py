"""Which quota group answers for which frame of the dram tier, from the moment a frame is reserved.

Empty until a quota is set. No lock here: the pool's is held by the caller (R1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from workmem.core.errors import InvariantError
from workmem.store.catalog import Catalog
from workmem.store.frames import Frame
from workmem.store.shares import TierShares


class Charges:
    """What stands behind the dram ledger of `TierShares`: its bytes, frame by frame."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[str, int]] = {}
        """Group that answers for a frame, and its size, by its offset."""

    def take(self, shares: TierShares | None, frame: Frame, group: str) -> None:
        """A frame counts for `group` from now on."""
        if shares is not None:
            shares.ledger.charge(group, frame.size)
            self._of[frame.offset] = group, frame.size

    def give_up(self, shares: TierShares | None, frame: Frame) -> None:
        """A frame counts for nobody any more."""
        charge = self._of.pop(frame.offset, None) if self._of else None
        if charge is not None and shares is not None:
            shares.ledger.refund(*charge)

    def move(self, old: int, new: int) -> None:
        """A page went from the frame at offset `old` to one of the same size at `new`."""
        charge = self._of.pop(old, None)
        if charge is not None:
            self._of[new] = charge

    def regroup(self, shares: TierShares, catalog: Catalog, is_in_order: Callable[[int], bool]) -> None:
        """Groups have changed, and `shares` has charged the blocks of its order anew: charge all others as well."""
        before, self._of = self._of, {}
        for row, frame in enumerate(catalog.frame):
            if frame is None:
                continue
            before.pop(frame.offset, None)
            if is_in_order(row):
                self._of[frame.offset] = shares.group_of(row), frame.size
            else:
                self.take(shares, frame, shares.group_of(row))
        # What is left is being filled, for who asked for it.
        for offset, (group, size) in before.items():
            self._of[offset] = group, size
            shares.ledger.charge(group, size)

    def audit(self, shares: TierShares, catalog: Catalog) -> None:
        """Recount. Raises InvariantError where the ledger, or a block, says otherwise."""
        charged = Counter[str]()
        for group, size in self._of.values():
            charged[group] += size
        if any(shares.ledger.used(group) != size for group, size in charged.items()):
            raise InvariantError(f"frames are charged {charged}, groups hold {shares.ledger.total} bytes")
        for row, frame in enumerate(catalog.frame):
            if frame is not None and self._of.get(frame.offset) != (shares.group_of(row), frame.size):
                raise InvariantError(f"the frame of row {row} is charged to another group than its own")
