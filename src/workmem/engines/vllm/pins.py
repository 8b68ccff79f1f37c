"""Blocks of vLLM's own pool, held for contexts that will go on: by one reference more, for a while, within a cap.

A pin never costs a request its turn: pins give way when the pool is short, in the order of a `Retention`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from workmem.policy.retention import Kept, Retention

PINS_MAX = 1024
"""One more ends the first that would give way."""

Owner = tuple[str, str]
"""Salt and session: nobody names another tenant's pins."""


class Block(Protocol):
    """The part of vLLM's `KVCacheBlock` that is read here."""

    block_id: int
    ref_cnt: int
    is_null: bool

    @property
    def block_hash(self) -> Any:
        """Of a full block that the prefix cache has; else None."""
        ...


class BlockPool(Protocol):
    """The part of vLLM's `BlockPool` that is used here."""

    num_gpu_blocks: int

    @property
    def blocks(self) -> Sequence[Any]:
        """All, by number."""
        ...

    def touch(self, blocks: Sequence[Any]) -> None:
        """One reference more to each."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """One reference less; of those without any, the first is evicted first."""
        ...

    def get_num_free_blocks(self) -> int:
        """Without any reference; cached ones too."""
        ...

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None:
        """The block with that hash, in each group."""
        ...


class _Pin(msgspec.Struct, frozen=True):
    blocks: tuple[int, ...]
    kept: Kept


class DevicePins:
    """Of one pool. `clock` in seconds. Called by the scheduler's thread alone.

    Holds at most `share` of the pool, and never so much that a request of `largest` blocks has no room.
    """

    def __init__(
        self,
        pool: BlockPool,
        retention: Retention,
        clock: Callable[[], float],
        *,
        share: float,
        largest: int,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._pool = pool
        self._retention = retention
        self._clock = clock
        # One block of the pool is the null block.
        self.cap = max(0, min(int(share * pool.num_gpu_blocks), pool.num_gpu_blocks - 1 - largest))
        self._pins: dict[tuple[Owner, str], _Pin] = {}
        self._uses: Counter[int] = Counter()
        """Pins that hold a block: the pool hears of the first and of the last."""

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def held(self) -> int:
        """Blocks, each counted once."""
        return len(self._uses)

    @property
    def free(self) -> int:
        """Blocks of the pool that nobody holds."""
        return self._pool.get_num_free_blocks()

    @property
    def within_reach(self) -> int:
        """Blocks that only pins hold."""
        return sum(self._pool.blocks[number].ref_cnt == 1 for number in self._uses)

    def pin(self, owner: Owner, name: str, blocks: Sequence[int], *, ttl_s: float, priority: int = 0) -> int:
        """Hold the leading `blocks` that the prefix cache has; a pin of the same owner and name ends.

        Returns how many are held: those that come first, where the cap leaves no room for all.
        """
        wanted: list[int] = []
        for number in blocks:
            block: Block = self._pool.blocks[number]
            if block.is_null or block.block_hash is None:
                break
            wanted.append(number)
        now = self._clock()
        kept = Kept(since_s=now, ends_s=now + ttl_s, priority=priority)
        # First the new ones: the pin that ends may hold the same, and they would be free in between.
        self._hold(wanted)
        self.unpin(owner, name)
        mine = self._retention.rank(kept)
        for other in self._in_order():
            if len(self._uses) <= self.cap and len(self._pins) < PINS_MAX:
                break
            if self._retention.rank(self._pins[other].kept) > mine:
                break
            self._end(other, "pins_outranked")
        if len(self._pins) >= PINS_MAX:
            self._let_go(wanted)
            return 0
        over = self.held - self.cap
        fits = len(wanted)
        while fits and over > 0:
            fits -= 1
            over -= self._uses[wanted[fits]] == 1
        self._let_go(wanted[fits:])
        if fits:
            self._pins[owner, name] = _Pin(tuple(wanted[:fits]), kept)
            self.counts["pins"] += 1
        return fits

    def unpin(self, owner: Owner, name: str) -> bool:
        """End a pin. False where there is none."""
        if (owner, name) not in self._pins:
            return False
        self._end((owner, name), "pins_ended")
        return True

    def unpin_all(self, owner: Owner) -> int:
        """End all pins of an owner. How many."""
        mine = [pin for pin in self._pins if pin[0] == owner]
        for pin in mine:
            self._end(pin, "pins_ended")
        return len(mine)

    def expire(self) -> None:
        """End those whose time is over."""
        now = self._clock()
        for pin in [pin for pin, of in self._pins.items() if of.kept.ends_s <= now]:
            self._end(pin, "pins_expired")

    def needed(self, blocks: int, hashes: Sequence[bytes]) -> int:
        """Of `blocks` that a request wants, how many must be free: of its hits, those in use cost nothing."""
        in_use = 0
        for name in hashes:
            found = self._pool.get_cached_block(name, [0])
            if found is None:
                break
            in_use += found[0].ref_cnt > 0
        return blocks - in_use

    def give_way(self, needed: Callable[[], int], *, spare: int = 0, last: Owner | None = None) -> bool:
        """Have so many blocks free, and `spare` more if they can be had; those of `last` go last.

        Nothing ends where that is not enough: others must end first, and then this is asked again. Returns whether
        a block became free.
        """
        if not self._pins:
            return False
        pool = self._pool
        before = pool.get_num_free_blocks()
        must = needed()
        if before >= must + spare:
            return False
        if before + self.within_reach < must:
            return False
        order = self._in_order()
        for pin in [pin for pin in order if pin[0] != last] + [pin for pin in order if pin[0] == last]:
            free = pool.get_num_free_blocks()
            # What the request itself would hit is needed once it is not held any more.
            if free >= needed() and (free >= must + spare or pin[0] == last):
                break
            if any(pool.blocks[number].ref_cnt == 1 for number in self._pins[pin].blocks):
                self._end(pin, "pins_gave_way")
        return pool.get_num_free_blocks() > before

    def release(self) -> None:
        """End all."""
        for pin in list(self._pins):
            self._end(pin, "pins_ended")

    # -- inside

    def _in_order(self) -> list[tuple[Owner, str]]:
        return sorted(self._pins, key=lambda pin: self._retention.rank(self._pins[pin].kept))

    def _hold(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[number] for number in blocks if not self._uses[number]])
        self._uses.update(blocks)

    def _let_go(self, blocks: Sequence[int]) -> None:
        over: list[Any] = []
        for number in blocks:
            self._uses[number] -= 1
            if not self._uses[number]:
                del self._uses[number]
                over.append(self._pool.blocks[number])
        # The end of a context is of no use without its beginning: it is evicted first.
        self._pool.free_blocks(reversed(over))

    def _end(self, pin: tuple[Owner, str], count: str) -> None:
        self._let_go(self._pins.pop(pin).blocks)
        self.counts[count] += 1
