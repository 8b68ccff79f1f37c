"""Our eviction orders over vLLM's chunks: who leaves, and that vLLM's tables are never wrong."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from workmem.engines.vllm.chain import Chain
from workmem.engines.vllm.chunk_policy import ChunkPolicy
from workmem.policy.choose import EvictionName

ORDERS: list[EvictionName] = ["value", "segmented_lru", "s3fifo", "lru"]


@dataclass
class State:
    chunk_id: int
    ref_cnt: int = -1


class HostMemory:
    """What vLLM does around a policy: rows, and transfers that hold them."""

    def __init__(self, order: EvictionName, capacity: int) -> None:
        self.policy: ChunkPolicy[State] = ChunkPolicy(order, capacity)
        self.free = list(range(capacity))
        self.clear_count = 0

    def begin(self, names: Sequence[bytes], chain: Chain) -> list[bytes] | None:
        """Make room for chunks of a request; those that had to leave, or None where there is no room."""
        new = [name for name in names if self.policy.get(name) is None]
        self.policy.missed(new, chain)
        left: list[bytes] = []
        if len(new) > len(self.free):
            evicted = self.policy.evict(len(new) - len(self.free), set(names))
            if evicted is None:
                return None
            for name, state in evicted:
                assert state.ref_cnt == 0
                assert name not in names
                self.free.append(state.chunk_id)
                left.append(name)
        for name in new:
            self.policy.insert(name, State(self.free.pop()))
        return left

    def end(self, names: Sequence[bytes]) -> None:
        for name in names:
            state = self.policy.get(name)
            if state is not None and state.ref_cnt == -1:
                state.ref_cnt = 0
                self.policy.let_go(name)

    def fail(self, name: bytes) -> None:
        state = self.policy.get(name)
        assert state is not None
        self.policy.remove(name)
        self.free.append(state.chunk_id)

    def put(self, names: Sequence[bytes]) -> list[bytes]:
        left = self.begin(names, chain_of(names))
        assert left is not None
        self.end(names)
        return left

    def read(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.policy.get(name).ref_cnt += 1

    def unread(self, names: Sequence[bytes]) -> None:
        for name in names:
            state = self.policy.get(name)
            state.ref_cnt -= 1
            if not state.ref_cnt:
                self.policy.let_go(name)

    def here(self, names: Sequence[bytes]) -> int:
        return sum(self.policy.get(name) is not None for name in names)


def names_of(text: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{text}/{index}".encode()).digest() + bytes(4) for index in range(count)]


def chain_of(names: Sequence[bytes]) -> Chain:
    return Chain({name: index for index, name in enumerate(names)})


@pytest.mark.parametrize("order", ORDERS)
def test_the_end_of_a_context_leaves_before_its_beginning(order: EvictionName):
    memory = HostMemory(order, 8)
    first = names_of("a", 8)
    memory.put(first)
    assert memory.put(names_of("b", 3)) == first[:4:-1]
    assert memory.policy.off == ""


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_read_or_asked_for_stays(order: EvictionName):
    memory = HostMemory(order, 4)
    one, two = names_of("a", 2), names_of("b", 2)
    memory.put(one)
    memory.put(two)
    memory.read(two)
    # Of the four only `one` may go, and its first is asked for as well.
    assert memory.begin([one[0], *names_of("c", 2)], chain_of(names_of("c", 2))) is None
    assert memory.here([*one, *two]) == 4
    assert memory.put([one[0], *names_of("c", 1)]) == [one[1]]
    memory.unread(two)
    assert set(memory.put(names_of("d", 3))) <= {*one, *two, *names_of("c", 1)}


@pytest.mark.parametrize("order", ["value", "segmented_lru", "s3fifo"])
def test_what_is_used_again_and_again_outlives_a_scan(order: EvictionName):
    """The contexts of agents, between tools that read a thousand pages once. LRU loses them."""

    def left_after_scan(name: EvictionName) -> int:
        memory = HostMemory(name, 32)
        agent = names_of("agent", 8)
        memory.put(agent)
        for turn in range(4):
            memory.policy.used(agent)
            memory.put(names_of(f"tool{turn}", 4))
        for page in range(40):
            memory.put(names_of(f"page{page}", 2))
        return memory.here(agent)

    assert left_after_scan(order) == 8
    assert left_after_scan("lru") == 0


def test_what_comes_back_is_taken_for_used(monkeypatch: pytest.MonkeyPatch):
    memory = HostMemory("value", 8)
    agent = names_of("agent", 4)
    memory.put(agent)
    memory.put(names_of("b", 8))
    assert memory.here(agent) == 0
    entered: list[bool] = []
    insert = memory.policy._order.insert

    def spy(row: int, parent: int, size: int, *, is_back: bool = False) -> None:
        entered.append(is_back)
        insert(row, parent, size, is_back=is_back)

    monkeypatch.setattr(memory.policy._order, "insert", spy)
    memory.put([*agent, *names_of("c", 1)])
    assert entered == [True] * 4 + [False]


def test_a_chunk_that_never_came_leaves_its_row():
    memory = HostMemory("value", 4)
    names = names_of("a", 4)
    memory.begin(names, chain_of(names))
    memory.end(names[2:])
    for name in names[:2]:
        memory.fail(name)
    assert memory.here(names) == 2
    memory.put(names_of("b", 4))
    assert memory.here(names) == 0


def test_a_bug_of_ours_leaves_the_oldest_first(monkeypatch: pytest.MonkeyPatch):
    memory = HostMemory("value", 6)
    names = names_of("a", 6)
    memory.put(names)

    def broken(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(memory.policy._order, "pick", broken)
    memory.read(names[:1])
    assert memory.put(names_of("b", 2)) == names[1:3]
    assert "ZeroDivisionError" in memory.policy.off
    assert memory.put(names_of("c", 2)) == names[3:5]
    assert memory.begin(names_of("d", 6), chain_of(names_of("d", 6))) is None


def test_nothing_is_left_after_clear():
    memory = HostMemory("value", 4)
    names = names_of("a", 4)
    memory.put(names)
    memory.read(names)
    memory.policy.clear()
    memory.free = list(range(4))
    assert len(memory.policy) == 0
    assert memory.put(names) == []


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(2))
def test_rows_and_chunks_agree_whatever_happens(order: EvictionName, seed: int):
    chance = random.Random(seed)
    memory = HostMemory(order, 24)
    contexts = [names_of(f"c{number}", chance.randrange(1, 9)) for number in range(12)]
    reading: list[list[bytes]] = []
    for _ in range(200):
        names = chance.choice(contexts)[: chance.randrange(1, 9)]
        what = chance.random()
        if what < 0.5:
            if memory.begin(names, chain_of(names)) is not None:
                if what < 0.05:
                    pending = [n for n in names if memory.policy.get(n).ref_cnt == -1]
                    for name in pending:
                        memory.fail(name)
                memory.end(names)
        elif what < 0.7:
            here = [name for name in names if memory.policy.get(name) is not None]
            memory.read(here)
            reading.append(here)
        elif what < 0.9 and reading:
            memory.unread(reading.pop(chance.randrange(len(reading))))
        else:
            memory.policy.used(names)
        rows = [
            memory.policy.get(name).chunk_id
            for names in contexts
            for name in names
            if memory.policy.get(name)
        ]
        assert sorted(rows + memory.free) == list(range(24))
    assert memory.policy.off == ""
    for names in reading:
        memory.unread(names)
    assert len(memory.policy.evict(len(memory.policy), ()) or ()) == 24 - len(memory.free)
