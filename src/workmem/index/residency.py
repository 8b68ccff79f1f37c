"""Which engine holds which blocks, by its own hashes: what its events say, and how much of a prompt is where.

A hash names a block and everything before it, so two engines of one kind name equal contexts alike. Blocks form a
forest; a block that nobody holds stays as long as one behind it is held, so that what is known of a context stays in
one piece. Two copies of a block in one place count as one.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from workmem.core.events import BoundReached, EventSink, discard

BlockHash = int | bytes
"""As the engine names it in its events: a digest, or the low 64 bits of one."""
BOUND = "index.residency"


class Holder(msgspec.Struct, frozen=True, order=True):
    """A place where blocks are."""

    engine: str
    rank: int = 0
    """Data-parallel rank of the engine."""
    medium: str = "GPU"
    """GPU, CPU or STORAGE, or the name of a tier."""
    group: int = 0
    """Of the model's groups of layers that keep KV apart; 0 where there is one."""


class Origin(msgspec.Struct, frozen=True):
    """Whose blocks: what the event that brought them said."""

    salt: str = ""
    """Of the first block of a context alone; it tells all behind it apart."""
    adapter: str = ""
    session: str = ""


_NOBODYS = Origin()


class Block:
    """A block that is held, or that one behind it leads to. To be read only."""

    __slots__ = (
        "children",
        "hash",
        "holders",
        "is_first",
        "is_queued",
        "origin",
        "parent",
        "tokens",
        "used",
    )

    def __init__(self, name: BlockHash, parent: Block | None) -> None:
        self.hash = name
        self.parent = parent
        self.children = 0
        """How many blocks follow this one."""
        self.holders = 0
        """One bit for each holder."""
        self.tokens: array[int] | None = None
        self.origin = _NOBODYS
        self.is_first = False
        """Nothing comes before it. Where that is not said and `parent` is None, what comes before is not known."""
        self.used = 0
        self.is_queued = False


class ResidencyStats(msgspec.Struct, frozen=True):
    """What an index holds."""

    blocks: int
    unheld: int
    """Blocks that nobody is known to hold, kept for those behind them."""
    holders: dict[Holder, int]
    """Blocks of each holder."""
    forgotten: int
    """Blocks that made room at the bound, since the start."""
    unknown_removals: int
    """Removals of blocks that the holder was not known to have, since the start."""


class ResidencyIndex:
    """The blocks of a fleet. Not thread-safe: one owner calls it.

    At most `blocks_max` blocks; at the bound those make room that nothing follows and that were brought or matched
    longest ago, and `events` hears of it. A block takes some 0.4 KB, and 4 bytes per token.
    """

    def __init__(self, *, blocks_max: int = 1_000_000, events: EventSink = discard) -> None:
        self._max = blocks_max
        self._events = events
        self._blocks: dict[BlockHash, Block] = {}
        self._bits: dict[Holder, int] = {}
        self._holders: list[Holder | None] = []
        self._held: list[set[Block]] = []
        self._everyone = 0
        self._leaves: list[tuple[int, int, Block]] = []
        """Heap of what may make room: last use, when queued, block. May hold some that moved on; see `_oldest_leaf`."""
        self._tick = 0
        self._forgotten = 0
        self._unknown_removals = 0

    def __len__(self) -> int:
        return len(self._blocks)

    # -- what events say

    def stored(
        self,
        holder: Holder,
        hashes: Sequence[BlockHash],
        *,
        parent: BlockHash | None = None,
        tokens: Sequence[int] = (),
        block_tokens: int = 0,
        origin: Origin = _NOBODYS,
    ) -> None:
        """`holder` has these blocks, each the parent of the next. `tokens`: of all of them, `block_tokens` each.

        Without tokens nothing is said of order either: then the blocks are not linked, and `parent` says nothing.
        """
        is_linked = block_tokens > 0 and len(tokens) >= block_tokens * len(hashes)
        bit, held = self._bit_of(holder)
        above = before = self._named(parent) if is_linked and parent is not None else None
        touched: list[Block] = []
        for index, name in enumerate(hashes):
            block = self._named(name)
            if is_linked:
                self._link(block, above)
                block.is_first = block.is_first or (index == 0 and parent is None)
                if block.tokens is None:
                    block.tokens = array("I", tokens[index * block_tokens : (index + 1) * block_tokens])
                if origin != _NOBODYS:
                    block.origin = origin
                above = block
            block.holders |= bit
            held.add(block)
            self._use(block)
            touched.append(block)
        for block in touched:
            self._queue_leaf(block)
        self._prune(before)
        self._make_room()

    def removed(self, holder: Holder, hashes: Sequence[BlockHash]) -> None:
        """`holder` has these blocks no more."""
        bit = self._bits.get(holder, 0)
        for name in hashes:
            block = self._blocks.get(name)
            if block is None or not block.holders & bit:
                self._unknown_removals += 1
                continue
            block.holders ^= bit
            self._held[bit.bit_length() - 1].discard(block)
            self._prune(block)

    def cleared(self, engine: str, rank: int | None = None, medium: str | None = None) -> int:
        """Nothing is held by `engine` any more: in one rank or all, in one medium or all. Returns how many blocks were."""
        gone = [
            holder
            for holder in self._bits
            if holder.engine == engine
            and (rank is None or holder.rank == rank)
            and (medium is None or holder.medium == medium)
        ]
        return sum(self._drop(holder) for holder in gone)

    # -- what is asked

    def match(self, hashes: Sequence[BlockHash]) -> dict[Holder, int]:
        """How many leading blocks each holder has; who has none is left out. Counts as a use of what was found.

        Takes time with the longest of them, not with the number of holders.
        """
        found: dict[Holder, int] = {}
        alive, depth = self._everyone, 0
        get, last = self._blocks.get, None
        for name in hashes:
            block = get(name)
            if block is None:
                break
            still = alive & block.holders
            if still != alive:
                if depth:
                    self._record(found, alive ^ still, depth)
                alive = still
                if not alive:
                    break
            last = block
            depth += 1
        if depth:
            self._record(found, alive, depth)
        if last is not None:
            # What leads to it cannot make room before it does: this is a use of all.
            self._use(last)
        return found

    def holders(self) -> list[Holder]:
        """Everyone who holds or held something, in order."""
        return sorted(self._bits)

    def holders_of(self, block: Block) -> list[Holder]:
        """Who has a block."""
        return [holder for bit in _bits_in(block.holders) if (holder := self._holders[bit]) is not None]

    def mask_of(self, engine: str) -> int:
        """The bits of `Block.holders` that stand for places of `engine`."""
        return sum(bit for holder, bit in self._bits.items() if holder.engine == engine)

    def held_by(self, engine: str) -> set[Block]:
        """Blocks that are in any place of `engine`."""
        return set[Block]().union(
            *(
                self._held[bit.bit_length() - 1]
                for holder, bit in self._bits.items()
                if holder.engine == engine
            )
        )

    def stats(self) -> ResidencyStats:
        """Sizes now, counts since the start."""
        return ResidencyStats(
            blocks=len(self._blocks),
            unheld=sum(1 for block in self._blocks.values() if not block.holders),
            holders={holder: len(self._held[bit.bit_length() - 1]) for holder, bit in self._bits.items()},
            forgotten=self._forgotten,
            unknown_removals=self._unknown_removals,
        )

    # -- inside

    def _bit_of(self, holder: Holder) -> tuple[int, set[Block]]:
        bit = self._bits.get(holder)
        if bit is None:
            place = next((i for i, taken in enumerate(self._holders) if taken is None), len(self._holders))
            if place == len(self._holders):
                self._holders.append(None)
                self._held.append(set())
            self._holders[place] = holder
            bit = self._bits[holder] = 1 << place
            self._everyone |= bit
        return bit, self._held[bit.bit_length() - 1]

    def _named(self, name: BlockHash) -> Block:
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = Block(name, None)
        return block

    def _link(self, block: Block, above: Block | None) -> None:
        """Let `block` follow `above`, unless it is known to follow another or `above` comes from it."""
        if above is None or block.parent is not None or block.is_first:
            return
        # Only a chain that was in pieces is long here; a wrong event must not make a ring of it.
        over: Block | None = above if block.children or above is block else None
        while over is not None:
            if over is block:
                return
            over = over.parent
        block.parent = above
        above.children += 1

    def _use(self, block: Block) -> None:
        self._tick += 1
        block.used = self._tick

    def _record(self, found: dict[Holder, int], bits: int, depth: int) -> None:
        for bit in _bits_in(bits):
            holder = self._holders[bit]
            if holder is not None:
                found[holder] = depth

    def _drop(self, holder: Holder) -> int:
        bit = self._bits.pop(holder)
        place = bit.bit_length() - 1
        gone, self._held[place] = self._held[place], set()
        self._holders[place] = None
        self._everyone ^= bit
        for block in gone:
            block.holders ^= bit
        for block in gone:
            self._prune(block)
        return len(gone)

    def _prune(self, block: Block | None) -> None:
        """Take out a block that is neither held nor followed, and what was kept for it alone."""
        while block is not None and not block.holders and not block.children:
            if self._blocks.get(block.hash) is not block:
                return
            del self._blocks[block.hash]
            above = block.parent
            if above is not None:
                above.children -= 1
                above.used = max(above.used, block.used)
                if above.holders:
                    self._queue_leaf(above)
            block = above

    def _queue_leaf(self, block: Block) -> None:
        if block.children or block.is_queued:
            return
        block.is_queued = True
        self._tick += 1
        heapq.heappush(self._leaves, (block.used, self._tick, block))
        if len(self._leaves) > 2 * len(self._blocks) + 1024:
            live = [
                leaf
                for leaf in self._leaves
                if not leaf[2].children and self._blocks.get(leaf[2].hash) is leaf[2]
            ]
            for leaf in self._leaves:
                leaf[2].is_queued = False
            for leaf in live:
                leaf[2].is_queued = True
            heapq.heapify(live)
            self._leaves = live

    def _make_room(self) -> None:
        if len(self._blocks) <= self._max:
            return
        before = len(self._blocks)
        while len(self._blocks) > self._max:
            leaf = self._oldest_leaf()
            for bit in _bits_in(leaf.holders):
                self._held[bit].discard(leaf)
            leaf.holders = 0
            self._prune(leaf)
        self._forgotten += before - len(self._blocks)
        self._events(BoundReached(name=BOUND, limit=self._max))

    def _oldest_leaf(self) -> Block:
        while True:
            used, _, block = heapq.heappop(self._leaves)
            block.is_queued = False
            if block.children or self._blocks.get(block.hash) is not block:
                continue
            if block.used == used:
                return block
            self._queue_leaf(block)


def _bits_in(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
