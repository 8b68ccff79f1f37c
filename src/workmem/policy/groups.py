"""Groups of blocks that live and die together: one that is used keeps all, one that leaves takes all along.

For blocks that are worth nothing one by one: the cache groups of a hybrid model, the ranks of a split one,
a page and the adapter state beside it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Block = TypeVar("Block", bound=Hashable)
Group = TypeVar("Group", bound=Hashable)


class LifeGroups(Generic[Group, Block]):
    """Which blocks belong together. A block is in one group at most; a group ends with its last block."""

    def __init__(self) -> None:
        self._members: dict[Group, dict[Block, None]] = {}
        self._group_of: dict[Block, Group] = {}

    def __len__(self) -> int:
        return len(self._members)

    def size(self, group: Group) -> int:
        """Blocks of a group."""
        return len(self._members.get(group, ()))

    def join(self, group: Group, block: Block) -> None:
        """A block of a group became resident."""
        assert block not in self._group_of, f"block {block!r} is in group {self._group_of[block]!r} already"
        self._group_of[block] = group
        self._members.setdefault(group, {})[block] = None

    def used_with(self, blocks: Iterable[Block]) -> list[Block]:
        """What a use of `blocks` touches: all of their groups, in the order given, without doubles."""
        touched: dict[Block, None] = {}
        for block in blocks:
            group = self._group_of.get(block)
            touched.update(self._members[group] if group is not None else {block: None})
        return list(touched)

    def leave(self, block: Block) -> list[Block]:
        """A block left: the rest of its group is taken apart and returned, newest first, to be evicted too.

        Those that somebody holds go when they are let go (R4): advise the order that they are done.
        """
        group = self._group_of.pop(block, None)
        if group is None:
            return []
        rest = self._members.pop(group)
        del rest[block]
        for other in rest:
            del self._group_of[other]
        return list(reversed(rest))
