"""What a tier asks of an eviction order. Blocks are row numbers; orders are pure: no clock, no lock, no bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

NO_ROW = -1
"""In place of a row: no parent in this tier, nothing to evict."""


class Prospect(IntEnum):
    """What is known of a block's next use. Advice: an order may pass over it."""

    UNKNOWN = 0
    DONE = 1
    """Its session ended, its group was dropped: nobody is going to ask for it."""
    EXPECTED = 2
    """A next use is announced. Lasts until that use, or until the order has aged past it."""
    PINNED = 3
    """Somebody pinned it, within a budget (`policy.pins`): goes after everything that is not."""


class Loss(IntEnum):
    """What an eviction would cost whoever needs the block next."""

    RECOMPUTE = 0
    """The only copy."""
    RELOAD = 1
    """Another tier holds it: a read brings it back."""


class EvictionOrder(Protocol):
    """Which block leaves a tier next. Implementations are in this package; their rules in docs/internals/eviction.md."""

    @property
    def held_skips(self) -> int:
        """How often a victim was passed over because it was held (R4)."""
        ...

    @property
    def pinned(self) -> int:
        """Blocks in the order that are pinned."""
        ...

    def __len__(self) -> int:
        """Blocks in the order."""
        ...

    def insert(self, row: int, parent: int, size: int, *, is_back: bool = False) -> None:
        """A block became resident.

        `parent` is the row of the block before it if that one is in this order, else -1; `size` in bytes.
        `is_back`: it left this tier not long ago (see `policy.ghosts`).
        """
        ...

    def restore(self, rows: Sequence[int], parents: Sequence[int], sizes: Sequence[int]) -> None:
        """Insert many blocks at once, least recent first. A parent may come after its children."""
        ...

    def touch(self, rows: Sequence[int]) -> None:
        """Blocks of one prefix were used again, root first. May be kept for later, within a bound."""
        ...

    def advise(
        self, rows: Sequence[int], *, prospect: Prospect | None = None, loss: Loss | None = None
    ) -> None:
        """Facts about blocks that are here; None leaves what was said before. An order may ignore all of it."""
        ...

    def is_leaf(self, row: int) -> bool:
        """Whether a block that is here has no children here: only then may it leave to make room (R7)."""
        ...

    def was_used(self, row: int) -> bool:
        """Whether a block that is here was used again since it came, as far as the order remembers."""
        ...

    def regret(self, size: int, *, was_used: bool) -> None:
        """A block of `size` bytes that left not long ago is wanted back: it had better stayed.

        `was_used`: what `was_used` said before it left. Comes before the `insert`, and also where none follows.
        """
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
