"""The vram ledger against a plain model: holds, names, eviction order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from workmem.core.errors import InvariantError
from workmem.core.keys import BlockKey
from workmem.engines.embedded.block_pool import BlockPool

SIZE = 8


class PoolMachine(RuleBasedStateMachine):
    """Every block is held or idle; a key names at most one block and never outlives it."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.holds: dict[int, int] = dict.fromkeys(range(SIZE), 0)
        self.names: dict[int, BlockKey] = {}

    @precondition(lambda self: self.pool.idle_count > 0)
    @rule(target=held)
    def take(self) -> int:
        [block] = self.pool.take(1)
        assert self.holds[block] == 0
        self.holds[block] = 1
        self.names.pop(block, None)
        return block

    @rule(block=held, key=st.integers(0, 20))
    def name(self, block: int, key: int) -> None:
        wanted = BlockKey(bytes([key]) * 32)
        taken = wanted in self.names.values()
        if block in self.names:
            return
        assert self.pool.name(block, wanted) is not taken
        if not taken:
            self.names[block] = wanted

    @rule(target=held, key=st.integers(0, 20))
    def share(self, key: int) -> int:
        wanted = BlockKey(bytes([key]) * 32)
        found = self.pool.match([wanted])
        expected = [block for block, name in self.names.items() if name == wanted]
        assert found == expected
        if not found:
            [found_block] = self.pool.take(1) if self.pool.idle_count else [None]
            if found_block is None:
                block = next(b for b, holds in self.holds.items() if holds)
                self.pool.hold(block)
                self.holds[block] += 1
                return block
            self.holds[found_block] = 1
            self.names.pop(found_block, None)
            return found_block
        self.pool.hold(found[0])
        self.holds[found[0]] += 1
        return found[0]

    @rule(block=consumes(held))
    def let_go(self, block: int) -> None:
        self.pool.let_go([block])
        self.holds[block] -= 1

    @rule()
    def drop_idle(self) -> None:
        dropped = self.pool.drop_idle()
        gone = [block for block in self.names if self.holds[block] == 0]
        assert dropped == len(gone)
        for block in gone:
            del self.names[block]

    @invariant()
    def ledgers_agree(self) -> None:
        assert self.pool.idle_count == sum(1 for holds in self.holds.values() if holds == 0)
        assert self.pool.cached_count == len(self.names)
        for block, holds in self.holds.items():
            assert self.pool.holds(block) == holds


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def key(n: int) -> BlockKey:
    return BlockKey(n.to_bytes(32, "big"))


def test_children_leave_before_parents_and_unnamed_blocks_first() -> None:
    pool = BlockPool(4)
    chain = pool.take(3)
    for index, block in enumerate(chain):
        pool.name(block, key(index))
    pool.let_go(chain)
    [unnamed] = pool.take(1)
    assert unnamed not in chain
    [first_out] = pool.take(1)
    assert first_out == chain[2]
    assert pool.match([key(0), key(1), key(2)]) == chain[:2]


def test_a_match_of_a_gap_stops_at_the_gap() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.name(blocks[0], key(0))
    pool.name(blocks[1], key(2))
    assert pool.match([key(0), key(1), key(2)]) == [blocks[0]]


def test_misuse_is_our_bug_and_says_so() -> None:
    pool = BlockPool(1)
    [block] = pool.take(1)
    with pytest.raises(InvariantError, match="0 idle"):
        pool.take(1)
    pool.let_go([block])
    with pytest.raises(InvariantError, match="more often than held"):
        pool.let_go([block])
    with pytest.raises(InvariantError, match="named while idle"):
        pool.name(block, key(1))
