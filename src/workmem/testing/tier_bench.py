"""What the tier suite works with: a tier that is open, memory for it, pages whose bytes follow from their keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import xxhash

from workmem.core.keys import BlockKey
from workmem.store.tiers.contract import HeldPage, Outcome, PageIn, PageName, PageOut, Tier
from workmem.store.tiers.page_header import PageHeader, header_bytes, pack
from workmem.testing.pages import Chain, page_bytes

Call = Callable[[Callable[[int, Outcome], None]], None]
WAIT_S = 20.0


def require(condition: object, otherwise: str) -> None:
    """Raise AssertionError, whatever Python's flags are."""
    if not condition:
        raise AssertionError(otherwise)


def outcomes_of(count: int, call: Call) -> list[Outcome]:
    """Run a batch; every page must be answered for, once."""
    found: dict[int, Outcome] = {}
    twice: list[int] = []
    ended = threading.Event()

    def done(index: int, outcome: Outcome) -> None:
        if index in found or not 0 <= index < count:
            twice.append(index)
        found[index] = outcome
        if len(found) >= count:
            ended.set()

    call(done)
    require(not count or ended.wait(WAIT_S), f"only {len(found)} of {count} pages were answered for")
    require(not twice, f"pages {twice} were answered for twice, or do not exist")
    return [found[index] for index in range(count)]


def page_of(chain: Chain, index: int, into: memoryview) -> PageOut:
    """Block `index` of `chain` as a page in `into`, whose bytes follow from its key."""
    layout, block = chain.space.layout, chain.block(index)
    payload = page_bytes(block.key, layout)
    sums = tuple(
        xxhash.xxh3_64_intdigest(payload[start:end])
        for start, end in (layout.slice_span(number) for number in range(layout.slice_count))
    )
    header = PageHeader(chain.root, block.key, block.parent, block.depth, block.tokens, sums)
    header_sum = pack(header, layout, into)
    head = header_bytes(layout)
    into[head : head + len(payload)] = payload
    name = PageName(chain.root, bytes(block.key))
    about = HeldPage(name, chain.space, bytes(block.parent), block.depth, len(into), header_sum)
    return PageOut(about, into.toreadonly())


class Bench:
    """A tier that is open, and memory of an arena for it."""

    def __init__(self, tier: Tier, pages: int, held: Sequence[HeldPage], memory: memoryview) -> None:
        self.tier = tier
        self.held = held
        self._memory = memory
        self._size = len(memory) // pages

    def room(self, number: int) -> memoryview:
        """Place `number` in the arena, one page long."""
        return self._memory[number * self._size : (number + 1) * self._size]

    def put(self, chain: Chain, indices: Sequence[int]) -> list[Outcome]:
        """Keep these blocks of `chain`."""
        pages = [page_of(chain, index, self.room(place)) for place, index in enumerate(indices)]
        return outcomes_of(len(pages), lambda done: self.tier.put(pages, done))

    def get(self, chain: Chain, indices: Sequence[int]) -> list[Outcome]:
        """Bring these blocks; what is DONE must be what was put."""
        rooms = [self.room(place) for place in range(len(indices))]
        for room in rooms:
            room[:] = bytes(len(room))
        pages = [
            PageIn(PageName(chain.root, bytes(chain.keys[index])), room)
            for index, room in zip(indices, rooms, strict=True)
        ]
        found = outcomes_of(len(pages), lambda done: self.tier.get(pages, done))
        wanted = memoryview(bytearray(self._size))
        for index, room, outcome in zip(indices, rooms, found, strict=True):
            page_of(chain, index, wanted)
            same = outcome is not Outcome.DONE or room == wanted
            require(same, f"block {index} came back as something else")
        return found

    def drop(self, keys: Sequence[tuple[bytes, BlockKey]]) -> list[Outcome]:
        """Forget these."""
        names = [PageName(root, bytes(key)) for root, key in keys]
        return outcomes_of(len(names), lambda done: self.tier.drop(names, done))
