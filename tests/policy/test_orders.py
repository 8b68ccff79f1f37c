"""What every eviction order owes a tier, whatever it prefers: one suite for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.policy.choose import EvictionName, make_order
from workmem.policy.grouped import GroupedOrder
from workmem.policy.lru import Lru
from workmem.policy.order import NO_ROW, EvictionOrder, Loss, Prospect
from workmem.policy.s3fifo import S3Fifo
from workmem.policy.segmented_lru import SegmentedLru
from workmem.policy.value import ValueOrder

ORDERS: dict[str, Callable[[], EvictionOrder]] = {
    "segmented_lru": lambda: SegmentedLru(1 << 40),
    "segmented_lru_tight": lambda: SegmentedLru(6),
    "lru": Lru,
    "grouped": lambda: GroupedOrder(lambda: SegmentedLru(6)),
    "s3fifo": lambda: S3Fifo(1 << 40),
    "value": lambda: ValueOrder(even_depth=3),
    "s3fifo_tight": lambda: S3Fifo(40),
}


def test_every_order_that_can_be_chosen_is_held_to_this():
    chosen = {type(make_order(name, 1 << 20)) for name in get_args(EvictionName)}
    assert chosen <= {type(make()) for make in ORDERS.values()}


@pytest.fixture(params=list(ORDERS))
def order(request) -> EvictionOrder:
    return ORDERS[request.param]()


def nobody_holds(_: int) -> bool:
    return False


def drain(order: EvictionOrder) -> list[int]:
    gone = []
    while (row := order.pick(nobody_holds)) != NO_ROW:
        order.remove(row)
        gone.append(row)
    return gone


def chain(order: EvictionOrder, rows: range, size: int = 1) -> None:
    parent = NO_ROW
    for row in rows:
        order.insert(row, parent, size)
        parent = row


def test_empty_order_has_no_victim(order):
    assert order.pick(nobody_holds) == NO_ROW
    assert len(order) == 0


def test_children_go_before_parents(order):
    chain(order, range(4))
    assert drain(order) == [3, 2, 1, 0]
    assert len(order) == 0


def test_touched_chain_still_goes_leaf_first(order):
    chain(order, range(4))
    order.touch([0, 1, 2])
    order.touch([0, 1])
    assert drain(order) == [3, 2, 1, 0]


def test_parent_with_two_branches_waits_for_both(order):
    order.insert(0, NO_ROW, 1)
    order.insert(1, 0, 1)
    order.insert(2, 0, 1)
    assert drain(order)[-1] == 0


def test_victim_stays_until_removed(order):
    chain(order, range(3))
    assert order.pick(nobody_holds) == order.pick(nobody_holds) == 2
    assert len(order) == 3


def test_held_block_is_passed_over_and_counted_once_until_unparked(order):
    order.insert(0, NO_ROW, 1)
    order.insert(1, NO_ROW, 1)
    first = order.pick(nobody_holds)
    other = 1 - first
    asked = []

    def is_held(row: int) -> bool:
        asked.append(row)
        return row == first

    assert order.pick(is_held) == other
    assert order.pick(is_held) == other
    assert order.held_skips == 1
    assert asked.count(first) == 1
    order.unpark(first)
    assert sorted(drain(order)) == [0, 1]


def test_nothing_to_pick_while_all_leaves_are_held(order):
    chain(order, range(3))
    assert order.pick(lambda row: row == 2) == NO_ROW
    order.unpark(2)
    assert drain(order) == [2, 1, 0]


def test_parked_block_that_is_used_again_is_a_candidate_again(order):
    order.insert(0, NO_ROW, 1)
    assert order.pick(lambda _: True) == NO_ROW
    order.touch([0])
    assert order.pick(nobody_holds) == 0


def test_parked_block_that_leaves_is_forgotten(order):
    chain(order, range(2))
    assert order.pick(lambda _: True) == NO_ROW
    order.remove(1)
    order.insert(1, NO_ROW, 1)
    order.unpark(1)
    assert sorted(drain(order)) == [0, 1]


def test_unpark_of_a_block_that_is_not_parked_does_nothing(order):
    chain(order, range(2))
    order.unpark(0)
    order.unpark(1)
    assert drain(order) == [1, 0]


def test_child_that_arrives_while_its_parent_is_parked_goes_first(order):
    order.insert(0, NO_ROW, 1)
    assert order.pick(lambda _: True) == NO_ROW
    order.insert(1, 0, 1)
    order.unpark(0)
    assert drain(order) == [1, 0]


def test_held_parent_waits_for_unpark_after_its_last_child_left(order):
    order.insert(0, NO_ROW, 1)
    assert order.pick(lambda _: True) == NO_ROW
    order.insert(1, 0, 1)
    order.remove(1)
    assert order.pick(nobody_holds) == NO_ROW
    order.unpark(0)
    assert drain(order) == [0]


def test_row_of_a_parent_that_left_before_its_children_comes_back_as_a_stranger(order):
    """A quarantined parent leaves at once; its number may name any block afterwards, even a grandchild."""
    chain(order, range(3))
    order.remove(0)
    order.insert(0, 2, 1)
    assert drain(order) == [0, 2, 1]


def test_restored_rows_may_name_parents_that_come_later(order):
    order.restore([5, 3, 4, 9], [3, NO_ROW, 3, 4], [1, 1, 1, 1])
    assert len(order) == 4
    gone = drain(order)
    assert sorted(gone) == [3, 4, 5, 9]
    assert gone.index(3) == 3
    assert gone.index(9) < gone.index(4)


def test_restore_takes_rows_whose_old_children_are_still_here(order):
    chain(order, range(2))
    order.remove(0)
    order.restore([2, 0], [0, NO_ROW], [1, 1])
    gone = drain(order)
    assert gone.index(2) < gone.index(0)
    assert sorted(gone) == [0, 1, 2]


def test_restored_blocks_leave_oldest_first(order):
    order.restore([7, 1, 4], [NO_ROW] * 3, [1] * 3)
    assert drain(order) == [7, 1, 4]


def test_rows_restored_as_a_range_are_like_any_others(order):
    order.insert(0, NO_ROW, 1)
    order.restore(range(2, 6), [0, 2, 3, NO_ROW], [1] * 4)
    assert len(order) == 5
    gone = drain(order)
    assert [row for row in gone if row != 5] == [4, 3, 2, 0]


def test_restoring_a_row_twice_is_our_bug_and_says_so(order):
    order.insert(3, NO_ROW, 1)
    with pytest.raises(AssertionError, match="twice"):
        order.restore(range(2, 6), [NO_ROW] * 4, [1] * 4)
    with pytest.raises(AssertionError, match="twice"):
        order.restore([3], [NO_ROW], [1])


def test_inserting_a_row_twice_is_our_bug_and_says_so(order):
    order.insert(0, NO_ROW, 1)
    with pytest.raises(AssertionError, match="twice"):
        order.insert(0, NO_ROW, 1)


def test_parent_that_is_not_here_is_our_bug_and_says_so(order):
    order.insert(0, NO_ROW, 1)
    order.insert(1, NO_ROW, 1)
    order.remove(1)
    with pytest.raises(AssertionError, match="not in this order"):
        order.insert(2, 1, 1)


def test_touching_rows_that_left_changes_nothing(order):
    chain(order, range(2))
    order.remove(1)
    order.touch([0, 1, 99])
    assert drain(order) == [0]


def test_touched_rows_do_not_pile_up(order):
    chain(order, range(64))
    for _ in range(3000):
        order.touch(range(64))
    assert len(getattr(order, "_pending", [])) <= 1 << 14
    assert drain(order) == list(reversed(range(64)))


def test_pinned_goes_last_but_goes(order):
    for row in range(4):
        order.insert(row, NO_ROW, 1)
    order.advise([0, 1], prospect=Prospect.PINNED)
    order.touch([3])
    order.touch([0])
    assert drain(order)[2:] == [1, 0]


def test_pin_that_ended_protects_no_longer(order):
    order.insert(0, NO_ROW, 1)
    order.insert(1, NO_ROW, 1)
    order.advise([0, 1], prospect=Prospect.PINNED)
    order.advise([1], prospect=Prospect.UNKNOWN)
    order.insert(2, NO_ROW, 1)
    assert drain(order)[2] == 0


def test_done_goes_next_however_often_it_was_used(order):
    for row in range(4):
        order.insert(row, NO_ROW, 1)
    for _ in range(3):
        order.touch([2])
        assert order.pick(nobody_holds) != 2
    order.advise([2], prospect=Prospect.DONE)
    gone = drain(order)
    # A queue of S3-FIFO that is not to give victims yet comes second.
    assert gone.index(2) <= (3 if isinstance(order, S3Fifo) else 0)
    assert sorted(gone) == [0, 1, 2, 3]


def test_done_of_a_parked_block_counts_when_it_is_let_go(order):
    order.insert(0, NO_ROW, 1)
    order.insert(1, NO_ROW, 1)
    order.touch([0, 1])
    assert order.pick(lambda row: row == 0) == 1
    order.advise([0], prospect=Prospect.DONE)
    order.unpark(0)
    assert sorted(drain(order)) == [0, 1]


def test_leaf_is_a_block_without_children_here(order):
    chain(order, range(2))
    order.insert(2, NO_ROW, 1)
    assert [order.is_leaf(row) for row in range(3)] == [False, True, True]
    order.remove(1)
    assert order.is_leaf(0)


def test_pin_given_while_a_block_is_parked_counts_when_it_comes_back(order):
    for row in range(3):
        order.insert(row, NO_ROW, 1)
    order.pick(lambda row: row == 0)
    order.advise([0], prospect=Prospect.PINNED)
    order.unpark(0)
    assert drain(order)[2] == 0


def test_pin_of_a_block_that_left_says_nothing_of_the_next_in_its_row(order):
    order.insert(0, NO_ROW, 1)
    order.advise([0], prospect=Prospect.PINNED)
    order.remove(0)
    order.insert(0, NO_ROW, 1)
    order.insert(1, NO_ROW, 1)
    order.advise([1], prospect=Prospect.PINNED)
    assert drain(order) == [0, 1]


class World:
    """A tier's blocks in dicts, beside the order that is tested."""

    def __init__(self, order: EvictionOrder) -> None:
        self.order = order
        self.parents: dict[int, int] = {}
        self.held: set[int] = set()
        self.free = list(range(12))

    def row(self, number: int) -> int:
        rows = sorted(self.parents)
        return rows[number % len(rows)] if rows else NO_ROW

    def insert(self, number: int) -> None:
        if self.free:
            parent = self.row(number) if number % 3 else NO_ROW
            row = self.free.pop()
            self.parents[row] = parent
            self.order.insert(row, parent, 1 + number % 4, is_back=number % 5 == 0)

    def restore(self, number: int) -> None:
        if len(self.free) > 1:
            parent = self.row(number) if number % 3 else NO_ROW
            row, child = self.free.pop(), self.free.pop()
            self.parents.update({row: parent, child: row})
            self.order.restore([child, row], [row, parent], [1 + number % 4, 1])

    def touch(self, number: int) -> None:
        row, path = self.row(number), []
        while row != NO_ROW:
            path.insert(0, row)
            row = self.parents[row]
        self.order.touch(path)

    def hold(self, number: int) -> None:
        row = self.row(number)
        if row in self.held:
            self.held.discard(row)
            self.order.unpark(row)
        elif row != NO_ROW:
            self.held.add(row)

    def drop(self, number: int) -> None:
        if self.parents:
            self.remove(self.row(number))

    def remove(self, row: int) -> None:
        self.order.remove(row)
        del self.parents[row]
        self.held.discard(row)
        self.free.append(row)
        self.parents.update(dict.fromkeys((c for c, p in self.parents.items() if p == row), NO_ROW))

    def evict(self, _: int) -> None:
        row = self.order.pick(self.held.__contains__)
        free = set(self.parents) - set(self.parents.values()) - self.held
        assert row in free if free else row == NO_ROW
        if row != NO_ROW:
            self.remove(row)

    def advise(self, number: int) -> None:
        rows = sorted(self.parents)[: 1 + number % 3]
        self.order.advise(rows, prospect=Prospect(number % 4), loss=Loss(number % 2) if number % 3 else None)


STEPS = [
    World.advise,
    World.insert,
    World.insert,
    World.restore,
    World.touch,
    World.hold,
    World.drop,
    World.evict,
    World.evict,
]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(ORDERS)),
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 30)), max_size=70),
)
def test_any_history_keeps_the_contract(name, steps):
    world = World(ORDERS[name]())
    for step, number in steps:
        step(world, number)
        assert len(world.order) == len(world.parents)
    for row in list(world.held):
        world.hold(sorted(world.parents).index(row))
    for _ in range(len(world.order)):
        world.evict(0)
    assert world.order.pick(nobody_holds) == NO_ROW
    assert not world.parents
