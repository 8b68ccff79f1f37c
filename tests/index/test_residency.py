"""The residency index agrees with a model that keeps plain sets, also when it is full."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from workmem.core.events import BoundReached
from workmem.index.residency import BOUND, Holder, Origin, ResidencyIndex

A, B = Holder("a"), Holder("b")
SIZE = 2


def tokens_of(count: int) -> list[int]:
    return list(range(count * SIZE))


def store(index: ResidencyIndex, holder: Holder, hashes: list, parent=None, **more) -> None:
    index.stored(holder, hashes, parent=parent, tokens=tokens_of(len(hashes)), block_tokens=SIZE, **more)


def test_prefix_is_counted_for_each_holder():
    index = ResidencyIndex()
    store(index, A, [1, 2, 3, 4])
    store(index, B, [1, 2])
    assert index.match([1, 2, 3, 9]) == {A: 3, B: 2}
    index.removed(A, [2])
    assert index.match([1, 2, 3]) == {A: 1, B: 2}
    assert index.match([9]) == {}
    assert index.match([]) == {}


def test_places_of_an_engine_are_told_apart_and_leave_together():
    index = ResidencyIndex()
    for holder in (Holder("a"), Holder("a", 1), Holder("a", 0, "STORAGE"), B):
        store(index, holder, [b"x", b"y"])
    assert index.cleared("a", 0, "GPU") == 2
    assert set(index.match([b"x"])) == {Holder("a", 1), Holder("a", 0, "STORAGE"), B}
    assert index.cleared("a") == 4
    assert index.match([b"x", b"y"]) == {B: 2}
    assert index.holders() == [B]


def test_what_comes_before_may_be_told_later():
    index = ResidencyIndex()
    store(index, A, [3, 4], parent=2)
    assert index.match([1, 2, 3, 4]) == {}
    store(index, A, [1, 2])
    assert index.match([1, 2, 3, 4]) == {A: 4}
    assert index.stats().unheld == 0


def test_blocks_without_tokens_are_held_but_not_linked():
    index = ResidencyIndex()
    index.stored(A, [7, 8], parent=None)
    (first,) = [block for block in index.held_by("a") if block.hash == 7]
    assert not first.is_first
    assert first.children == 0
    assert index.match([7, 8]) == {A: 2}


def test_a_wrong_event_makes_no_ring():
    index = ResidencyIndex(blocks_max=2)
    store(index, A, [1], parent=1)
    store(index, A, [2], parent=3)
    store(index, A, [3], parent=2)
    store(index, A, [4, 5, 6, 4, 5])
    assert len(index) <= 2


def test_at_the_bound_the_oldest_end_makes_room_and_it_is_said():
    heard: list = []
    index = ResidencyIndex(blocks_max=4, events=heard.append)
    store(index, A, [1, 2])
    store(index, A, [10, 11])
    index.match([1, 2])
    store(index, B, [20])
    assert heard == [BoundReached(name=BOUND, limit=4)]
    assert index.match([10, 11]) == {A: 1}
    assert index.match([1, 2]) == {A: 2}
    assert index.stats().forgotten == 1
    assert index.stats().holders == {A: 3, B: 1}


def test_a_removal_of_what_was_not_known_is_counted():
    index = ResidencyIndex()
    store(index, A, [1])
    index.removed(B, [1])
    index.removed(A, [2])
    assert index.stats().unknown_removals == 2
    assert index.match([1]) == {A: 1}


def test_who_brought_a_block_is_kept_when_another_says_nothing():
    index = ResidencyIndex()
    store(index, A, [1], origin=Origin(salt="tenant", session="s1"))
    store(index, B, [1])
    (block,) = index.held_by("a")
    assert block.origin == Origin(salt="tenant", session="s1")


def test_many_removals_leave_no_rubbish_behind():
    index = ResidencyIndex()
    for turn in range(3000):
        store(index, A, [turn])
        index.removed(A, [turn])
    assert len(index) == 0
    assert len(index._leaves) < 1100


@pytest.mark.slow
def test_a_match_takes_microseconds():
    """A generous bound: it must not depend on how many blocks are held, or by how many."""
    index = ResidencyIndex()
    chain = [hash(("x", n)) for n in range(256)]
    for engine in range(32):
        store(index, Holder(f"e{engine}"), chain[: 8 * (engine + 1)])
        store(index, Holder(f"e{engine}"), [hash((engine, n)) for n in range(1000)])
    best = min(timed(index, chain) for _ in range(20))
    assert best < 0.002


def timed(index: ResidencyIndex, chain: list) -> float:
    start = time.perf_counter()
    index.match(chain)
    return time.perf_counter() - start


class Naive:
    """Sets of hashes, and walks over all of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: dict[Holder, set[int]] = {}
        self.parent: dict[int, int | None] = {}
        self.used: dict[int, int] = {}
        self.tick = 0

    def stored(self, holder: Holder, chain: list[int], start: int) -> None:
        self.held.setdefault(holder, set())
        if start:
            self.name(chain[start - 1], None)
        for at in range(start, len(chain)):
            name = chain[at]
            self.name(name, None)
            self.parent[name] = chain[at - 1] if at else None
            self.held[holder].add(name)
            self.use(name)
        self.tidy()
        while len(self.parent) > self.most:
            oldest = min(self.leaves(), key=lambda name: self.used[name])
            for held in self.held.values():
                held.discard(oldest)
            self.tidy()

    def name(self, name: int, parent: int | None) -> None:
        self.parent.setdefault(name, parent)
        self.used.setdefault(name, 0)

    def use(self, name: int) -> None:
        self.tick += 1
        self.used[name] = self.tick

    def leaves(self) -> list[int]:
        return [name for name in self.parent if name not in self.parent.values()]

    def tidy(self) -> None:
        while True:
            gone = [n for n in self.leaves() if not any(n in held for held in self.held.values())]
            if not gone:
                return
            for name in gone:
                above = self.parent.pop(name)
                used = self.used.pop(name)
                if above is not None:
                    self.used[above] = max(self.used[above], used)

    def removed(self, holder: Holder, names: list[int]) -> None:
        self.held.get(holder, set()).difference_update(names)
        self.tidy()

    def match(self, chain: list[int]) -> dict[Holder, int]:
        found = {}
        for holder, held in self.held.items():
            depth = 0
            while depth < len(chain) and chain[depth] in held:
                depth += 1
            if depth:
                found[holder] = depth
        last = max(found.values(), default=0)
        if last:
            self.use(chain[last - 1])
        return found


def chain_of(path: tuple[int, ...]) -> list[int]:
    return [hash(path[: depth + 1]) for depth in range(len(path))]


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
HOLDERS = st.sampled_from([A, B, Holder("a", 1), Holder("a", 0, "STORAGE")])


class Agrees(RuleBasedStateMachine):
    @initialize(most=st.sampled_from([4, 9, 1000]))
    def open(self, most: int) -> None:
        self.index, self.naive = ResidencyIndex(blocks_max=most), Naive(most)

    @rule(holder=HOLDERS, path=PATHS, start=st.integers(0, 5))
    def stores(self, holder: Holder, path: tuple[int, ...], start: int) -> None:
        chain = chain_of(path)
        start = min(start, len(chain) - 1)
        parent = chain[start - 1] if start else None
        store(self.index, holder, chain[start:], parent)
        self.naive.stored(holder, chain, start)

    @rule(holder=HOLDERS, path=PATHS, count=st.integers(1, 3))
    def removes(self, holder: Holder, path: tuple[int, ...], count: int) -> None:
        names = chain_of(path)[-count:]
        self.index.removed(holder, names)
        self.naive.removed(holder, names)

    @rule(holder=HOLDERS)
    def clears(self, holder: Holder) -> None:
        self.index.cleared(holder.engine, holder.rank, holder.medium)
        self.naive.held.pop(holder, None)
        self.naive.tidy()

    @rule(engine=st.sampled_from(["a", "b"]))
    def leaves(self, engine: str) -> None:
        self.index.cleared(engine)
        self.naive.held = {h: held for h, held in self.naive.held.items() if h.engine != engine}
        self.naive.tidy()

    @rule(path=PATHS)
    def matches(self, path: tuple[int, ...]) -> None:
        assert self.index.match(chain_of(path)) == self.naive.match(chain_of(path))

    @invariant()
    def holds_the_same(self) -> None:
        if not hasattr(self, "index"):
            return
        stats = self.index.stats()
        assert stats.blocks == len(self.naive.parent) <= max(self.naive.most, 0)
        assert stats.holders == {h: len(held) for h, held in self.naive.held.items()}
        assert {b.hash: b.parent and b.parent.hash for b in self.index._blocks.values()} == self.naive.parent


Agrees.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestAgrees = Agrees.TestCase
