"""The vram tier's ledger: which block holds what, who uses it, who goes next. No tensors here.

The pool is owned by the engine thread alone (rule R1 needs no lock where there is one thread).
A block is *held* (holds > 0) or *idle*. Idle blocks wait in one queue, in the order in which they will
be given away: blocks without a key first, then cached ones, least recently used first. A sequence
gives its blocks back tail first, so children leave before their parents (rule R7).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from workmem.core.errors import InvariantError
from workmem.core.events import BlockEvicted, EventSink, discard
from workmem.core.keys import BlockKey
from workmem.core.outcomes import TierName

GHOSTS_MAX = 65_536
GHOST_BYTES = 8
"""Evicted keys are remembered cut short: a mistaken one only names a miss wrongly."""


class BlockPool:
    """`block_count` blocks, numbered from 0; each may carry the key of the prefix it completes."""

    def __init__(self, block_count: int, sink: EventSink = discard) -> None:
        self.block_count = block_count
        self._sink = sink
        self._holds = [0] * block_count
        self._key: list[BlockKey | None] = [None] * block_count
        self._by_key: dict[BlockKey, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict((block, None) for block in range(block_count))
        self.evicted_count = 0
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    @property
    def idle_count(self) -> int:
        """Blocks that `take` could give out now, cached ones included."""
        return len(self._idle)

    @property
    def cached_count(self) -> int:
        """Blocks that carry a key."""
        return len(self._by_key)

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Blocks of the longest cached prefix of `keys`. Nothing is held: call `hold` before relying on it."""
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody holds: holding them shrinks `idle_count` by that much."""
        return sum(1 for block in blocks if self._holds[block] == 0)

    def hold(self, block: int) -> None:
        """One more user of a block; it cannot be given away until `let_go` (rule R3)."""
        if self._holds[block] == 0:
            del self._idle[block]
        self._holds[block] += 1

    def was_evicted(self, key: BlockKey) -> bool:
        """Whether a block of this key was here and had to make room, as far back as memory goes."""
        return key[:GHOST_BYTES] in self._ghosts

    def take(self, count: int) -> list[int]:
        """Give out `count` blocks, each held once and without a key, evicting cached ones as needed."""
        if count > len(self._idle):
            raise InvariantError(
                f"asked for {count} vram blocks with {len(self._idle)} idle: admission must check first"
            )
        blocks: list[int] = []
        for _ in range(count):
            block, _ = self._idle.popitem(last=False)
            self._forget(block, reason="room")
            self._holds[block] = 1
            blocks.append(block)
        return blocks

    def let_go(self, blocks: Sequence[int]) -> None:
        """One user less for each block. Pass a sequence's blocks in prefix order: the tail goes idle first."""
        for block in reversed(blocks):
            holds = self._holds[block]
            if holds <= 0:
                raise InvariantError(f"vram block {block} let go more often than held")
            self._holds[block] = holds - 1
            if holds == 1:
                self._idle[block] = None
                if self._key[block] is None:
                    self._idle.move_to_end(block, last=False)

    def name(self, block: int, key: BlockKey) -> bool:
        """Make a complete block findable. False if another block already carries `key`."""
        if self._holds[block] == 0:
            raise InvariantError(f"vram block {block} named while idle")
        if key in self._by_key:
            return False
        self._key[block] = key
        self._by_key[key] = block
        return True

    def drop_idle(self) -> int:
        """Forget every idle cached block; returns how many. Held ones stay."""
        dropped = 0
        for block in self._idle:
            if self._key[block] is not None:
                self._forget(block, reason="dropped")
                dropped += 1
        return dropped

    def holds(self, block: int) -> int:
        """Users of a block."""
        return self._holds[block]

    def _forget(self, block: int, *, reason: str) -> None:
        key = self._key[block]
        if key is None:
            return
        del self._by_key[key]
        self._key[block] = None
        self.evicted_count += 1
        self._ghosts[key[:GHOST_BYTES]] = None
        if len(self._ghosts) > GHOSTS_MAX:
            self._ghosts.popitem(last=False)
        self._sink(BlockEvicted(tier=TierName.VRAM, key=key.hex()[:16], reason=reason))
