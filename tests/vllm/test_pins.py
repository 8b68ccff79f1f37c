"""The pin table against a pool that counts every reference: nothing leaks, the cap holds, nobody waits for a pin."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workmem.engines.vllm.pins import DevicePins
from workmem.policy.retention import Lru, Retention, Ttl

BLOCKS = 17


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False
    block_hash: bytes | None = None


class Pool:
    """vLLM's, as far as pins and requests use it."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.num_gpu_blocks = blocks
        self.blocks = [Block(number) for number in range(blocks)]
        self.blocks[0].is_null = True
        self.free = OrderedDict.fromkeys(range(1, blocks))

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                del self.free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free[block.block_id] = None

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[Block] | None:
        found = [block for block in self.blocks if block.block_hash == block_hash]
        return found[:1] or None

    def take(self, count: int) -> list[int] | None:
        """New blocks of a request."""
        if count > len(self.free):
            return None
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for number in taken:
            self.blocks[number].ref_cnt = 1
            self.blocks[number].block_hash = None
        return taken

    def cache(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.blocks[number].block_hash = b"%d" % number


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def table(
    pool: Pool, *, share: float = 0.5, largest: int = 4, retention: Retention | None = None
) -> DevicePins:
    return DevicePins(pool, retention or Ttl(30), Time(), share=share, largest=largest)


def turn(pool: Pool, blocks: int) -> list[int]:
    taken = pool.take(blocks)
    assert taken is not None
    pool.cache(taken)
    return taken


def end(pool: Pool, blocks: Sequence[int]) -> None:
    pool.free_blocks([pool.blocks[number] for number in reversed(blocks)])


def test_blocks_outlive_their_request():
    pool = Pool()
    pins = table(pool)
    mine = turn(pool, 5)
    assert pins.pin(("", "s"), "", mine, ttl_s=10) == 5
    end(pool, mine)
    assert pool.get_num_free_blocks() == BLOCKS - 1 - 5
    assert pins.unpin(("", "s"), "")
    assert not pins.unpin(("", "s"), "")
    # Its end is evicted before its beginning.
    assert list(pool.free)[-5:] == mine[::-1]


def test_what_is_not_full_and_the_null_block_are_not_held():
    pool = Pool()
    pins = table(pool)
    mine = turn(pool, 4)
    pool.blocks[mine[2]].block_hash = None
    assert pins.pin(("", "s"), "", mine, ttl_s=10) == 2
    assert pins.pin(("", "t"), "", [0, *mine], ttl_s=10) == 0
    assert len(pins) == 1


def test_the_same_blocks_again_are_never_free_in_between():
    pool = Pool()
    pins = table(pool)
    mine = turn(pool, 4)
    pins.pin(("", "s"), "", mine, ttl_s=10)
    end(pool, mine)
    freed: list[int] = []
    real = pool.free_blocks
    pool.free_blocks = lambda blocks: (
        found := list(blocks),
        freed.extend(b.block_id for b in found),
        real(found),
    )[0]
    assert pins.pin(("", "s"), "", mine, ttl_s=20) == 4
    assert freed == []


def test_a_block_of_two_contexts_is_held_until_both_end():
    pool = Pool()
    pins = table(pool)
    mine = turn(pool, 4)
    pins.pin(("", "s"), "", mine, ttl_s=10)
    pins.pin(("", "t"), "", mine[:2], ttl_s=20)
    end(pool, mine)
    assert pins.held == 4
    pins.unpin_all(("", "s"))
    assert pins.held == 2
    pins.unpin_all(("", "t"))
    assert pins.held == 0
    assert pool.get_num_free_blocks() == BLOCKS - 1


@pytest.mark.parametrize(("share", "largest", "cap"), [(0.5, 4, 8), (1.0, 4, 12), (1.0, 16, 0), (0.5, 99, 0)])
def test_the_longest_request_has_room_beside_all_pins(share, largest, cap):
    assert table(Pool(), share=share, largest=largest).cap == cap


def test_past_the_cap_the_first_to_end_gives_way_and_the_rest_is_cut():
    pool = Pool()
    pins = table(pool)
    late, early, new = turn(pool, 4), turn(pool, 3), turn(pool, 6)
    pins.pin(("", "late"), "", late, ttl_s=100)
    pins.pin(("", "early"), "", early, ttl_s=10)
    assert pins.pin(("", "new"), "", new, ttl_s=50) == 4
    assert pins.counts["pins_outranked"] == 1
    assert pins.held == 8


def test_a_lower_priority_takes_no_room_from_a_higher():
    pool = Pool()
    pins = table(pool)
    pins.pin(("", "high"), "", turn(pool, 8), ttl_s=10, priority=1)
    assert pins.pin(("", "low"), "", turn(pool, 4), ttl_s=100) == 0
    assert len(pins) == 1


@pytest.mark.parametrize(("retention", "goes"), [(Lru(), "first"), (Ttl(30), "second")])
def test_who_gives_way_first_is_up_to_the_retention(retention, goes):
    pool = Pool()
    pins = table(pool, retention=retention)
    a, b = turn(pool, 4), turn(pool, 4)
    pins.pin(("", "first"), "", a, ttl_s=100)
    pins._clock.now = 1.0
    pins.pin(("", "second"), "", b, ttl_s=10)
    end(pool, a + b)
    assert pins.give_way(lambda: 10)
    assert pins.unpin_all(("", goes)) == 0
    assert len(pins) == 1


def test_nothing_ends_in_vain():
    pool = Pool()
    pins = table(pool)
    mine, running = turn(pool, 4), turn(pool, 8)
    pins.pin(("", "s"), "", mine, ttl_s=10)
    end(pool, mine)
    assert not pins.give_way(lambda: 12)
    assert len(pins) == 1
    end(pool, running)
    assert not pins.give_way(lambda: 12)
    assert pins.give_way(lambda: 13)
    assert len(pins) == 0


def test_a_request_keeps_what_it_hits_itself():
    pool = Pool()
    pins = table(pool)
    own, other = turn(pool, 4), turn(pool, 4)
    pins.pin(("", "own"), "", own, ttl_s=1)
    pins.pin(("", "other"), "", other, ttl_s=100)
    end(pool, own + other)
    hashes = [b"%d" % number for number in own]
    # 8 are free; it wants 13, of which 4 are its own.
    assert pins.give_way(lambda: pins.needed(13, hashes), last=("", "own"))
    assert pins.unpin_all(("", "own")) == 1


class PinsAndRequests(RuleBasedStateMachine):
    """Turns run, end, are pinned, cut off and evicted in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.pins = table(self.pool, retention=Ttl(30))
        self.running: list[list[int]] = []

    @rule(blocks=st.integers(1, 9), hits=st.integers(0, 4), session=st.integers(0, 3))
    def admit(self, blocks: int, hits: int, session: int) -> None:
        """A request is given what it needs, whatever is pinned, unless others run in it."""
        cached = [b for b in self.pool.blocks if b.block_hash is not None and not b.is_null][
            : min(hits, blocks)
        ]
        hashes = [b.block_hash for b in cached]
        held_by_others = {number for table in self.running for number in table}
        self.pins.give_way(lambda: self.pins.needed(blocks, hashes), last=("", str(session)))
        fits = blocks - len([b for b in cached if b.block_id in held_by_others]) <= BLOCKS - 1 - len(
            held_by_others
        )
        needs = self.pins.needed(blocks, hashes)
        assert (needs <= self.pool.get_num_free_blocks()) == fits
        if fits:
            self.pool.touch(cached)
            new = self.pool.take(blocks - len(cached))
            assert new is not None
            self.running.append([b.block_id for b in cached] + new)

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        full=st.integers(0, 9),
        session=st.integers(0, 3),
        ttl=st.floats(1, 50),
        rank=st.integers(0, 1),
    )
    def finish(self, data, full: int, session: int, ttl: float, rank: int) -> None:
        mine = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.cache(mine[:full])
        self.pins.pin(("", str(session)), "", mine, ttl_s=ttl, priority=rank)
        end(self.pool, mine)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data) -> None:
        end(self.pool, self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.pins._clock.now += seconds
        self.pins.expire()
        assert all(pin.kept.ends_s > self.pins._clock.now for pin in self.pins._pins.values())

    @rule(session=st.integers(0, 3))
    def demote(self, session: int) -> None:
        self.pins.unpin_all(("", str(session)))

    @rule()
    def reset(self) -> None:
        self.pins.release()
        assert self.pins.held == 0
        if not self.running:
            assert self.pool.get_num_free_blocks() == BLOCKS - 1

    @invariant()
    def every_reference_has_an_owner(self) -> None:
        pinned = {number for pin in self.pins._pins.values() for number in pin.blocks}
        assert pinned == set(self.pins._uses)
        assert len(pinned) <= self.pins.cap
        for block in self.pool.blocks:
            uses = sum(block.block_id in table for table in self.running)
            assert block.ref_cnt == uses + (block.block_id in pinned)
            assert (block.block_id in self.pool.free) == (block.ref_cnt == 0 and not block.is_null)


TestPinsAndRequests = PinsAndRequests.TestCase
TestPinsAndRequests.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
