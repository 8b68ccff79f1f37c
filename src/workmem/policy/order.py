"""What a tier asks of an eviction order. Blocks are row numbers; orders are pure: no clock, no lock, no bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

NO_ROW = -1
"""In place of a row: no parent in this tier, nothing to evict."""


class EvictionOrder(Protocol):
    """Which block leaves a tier next. Implementations are in this package; their rules in docs/internals/eviction.md."""

    held_skips: int
    """How often a victim was passed over because it was held (R4)."""

    def __len__(self) -> int:
        """Blocks in the order."""
        ...

    def insert(self, row: int, parent: int, size: int) -> None:
        """A block became resident.

        `parent` is the row of the block before it if that one is in this order, else -1; `size` in bytes.
        """
        ...

    def restore(self, rows: Sequence[int], parents: Sequence[int], sizes: Sequence[int]) -> None:
        """Insert many blocks at once, least recent first. A parent may come after its children."""
        ...

    def touch(self, rows: Sequence[int]) -> None:
        """Blocks of one prefix were used again, root first. May be kept for later, within a bound."""
        ...

    def remove(self, row: int) -> None:
        """A block left, whatever the reason. Its number may come back with the next `insert`."""
        ...

    def pick(self, is_held: Callable[[int], bool]) -> int:
        """The next victim, which stays until `remove`; -1 when there is none.

        Only blocks without children in this order are candidates (R7). Held ones met on the way are
        parked: they are not asked about again before `unpark` or their next use (R4).
        """
        ...

    def unpark(self, row: int) -> None:
        """A block is no longer held. Does nothing unless it is parked."""
        ...
