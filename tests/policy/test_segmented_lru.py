"""Segmented LRU: what it prefers, checked on examples, against a slow model, and for size and speed."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.policy.order import NO_ROW
from workmem.policy.segmented_lru import SegmentedLru


def nobody_holds(_: int) -> bool:
    return False


def drain(order: SegmentedLru) -> list[int]:
    gone = []
    while (row := order.pick(nobody_holds)) != NO_ROW:
        order.remove(row)
        gone.append(row)
    return gone


def test_scan_goes_before_anything_reused():
    order = SegmentedLru(100)
    for row in range(3):
        order.insert(row, row - 1, 1)
    order.touch([0, 1, 2])
    for row in range(3, 40):
        order.insert(row, NO_ROW if row % 2 else row - 1, 1)
    assert drain(order)[-3:] == [2, 1, 0]


def test_oldest_first_among_equals():
    order = SegmentedLru(100)
    for row in range(4):
        order.insert(row, NO_ROW, 1)
    for row in (0, 2, 1):
        order.touch([row])
    assert drain(order) == [3, 0, 2, 1]


def test_reused_segment_is_bounded_so_a_new_working_set_can_take_over():
    order = SegmentedLru(2)
    for row in range(3):
        order.insert(row, NO_ROW, 1)
    order.touch([0])
    order.touch([1])
    order.touch([2])
    order.insert(3, NO_ROW, 1)
    assert drain(order) == [0, 3, 1, 2]


def test_block_that_comes_back_counts_as_reused_within_the_bound():
    order = SegmentedLru(2)
    order.insert(0, NO_ROW, 1, is_back=True)
    order.insert(1, NO_ROW, 1, is_back=True)
    order.insert(2, NO_ROW, 1)
    assert order.pick(nobody_holds) == 2
    order.insert(3, NO_ROW, 1, is_back=True)
    assert drain(order) == [2, 0, 1, 3]


def test_bound_of_the_reused_segment_is_in_bytes():
    order = SegmentedLru(10)
    for row, size in enumerate((6, 4, 4)):
        order.insert(row, NO_ROW, size)
        order.touch([row])
    assert drain(order) == [0, 1, 2]
    order.insert(0, NO_ROW, 11)
    order.touch([0])
    order.insert(1, NO_ROW, 1)
    assert drain(order) == [0, 1], "a block larger than the bound is never protected"


def test_new_turn_keeps_the_chain_it_extends():
    """The prefix was used from vram, so nobody touched it here: its new child must not inherit its age."""
    order = SegmentedLru(100)
    order.insert(0, NO_ROW, 1)
    order.insert(1, 0, 1)
    for row in range(2, 6):
        order.insert(row, NO_ROW, 1)
    order.insert(6, 1, 1)
    assert drain(order) == [2, 3, 4, 5, 6, 1, 0]


def test_chains_that_are_saved_in_turns_leave_by_age_of_their_leaves():
    order = SegmentedLru(100)
    for row, parent in ((0, NO_ROW), (10, NO_ROW), (1, 0), (11, 10)):
        order.insert(row, parent, 1)
    assert drain(order) == [1, 0, 11, 10]


class Slow:
    """The same rules on plain lists, newest first, every touch at once."""

    def __init__(self, protected_max: int) -> None:
        self.max = protected_max
        self.lists: tuple[list[int], list[int]] = ([], [])
        self.reused: dict[int, bool] = {}
        self.parents: dict[int, int] = {}
        self.parked: set[int] = set()
        self.last = NO_ROW

    def insert(self, row: int, parent: int) -> None:
        fresh = self.lists[0]
        at = fresh.index(parent) + 1 if parent != NO_ROW and parent == self.last else 0
        fresh.insert(at, row)
        self.reused[row] = False
        self.parents[row] = parent
        self.last = row

    def touch(self, path: list[int]) -> None:
        self.last = NO_ROW
        for row in reversed(path):
            self.unlink(row)
            self.parked.discard(row)
            self.reused[row] = True
            self.lists[1].insert(0, row)
        while sum(self.reused.values()) > self.max and self.lists[1]:
            row = self.lists[1].pop()
            self.reused[row] = False
            self.lists[0].insert(0, row)

    def unlink(self, row: int) -> None:
        for rows in self.lists:
            if row in rows:
                rows.remove(row)

    def is_leaf(self, row: int) -> bool:
        return row not in self.parents.values()

    def victim(self, held: set[int]) -> int:
        for rows in self.lists:
            while rows:
                if self.is_leaf(rows[-1]) and rows[-1] not in held:
                    return rows[-1]
                self.parked.add(rows.pop())
                self.last = NO_ROW
        return NO_ROW

    def back(self, row: int, held: set[int]) -> None:
        if row in self.parked and self.is_leaf(row) and row not in held:
            self.parked.discard(row)
            self.lists[self.reused[row]].append(row)
            self.last = NO_ROW

    def remove(self, row: int, held: set[int]) -> None:
        self.unlink(row)
        self.parked.discard(row)
        self.last = NO_ROW if row == self.last else self.last
        del self.reused[row]
        parent = self.parents.pop(row)
        if parent != NO_ROW:
            self.back(parent, held)


STEPS = ["insert", "insert", "touch", "evict", "hold"]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 6), st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 30)), max_size=80))
def test_agrees_with_the_slow_model(protected_max, steps):
    order, slow = SegmentedLru(protected_max), Slow(protected_max)
    held: set[int] = set()
    free = list(range(100))
    for step, number in steps:
        rows = sorted(slow.parents)
        row = rows[number % len(rows)] if rows else NO_ROW
        if step == "insert" or not rows:
            new, parent = free.pop(), row if number % 3 else NO_ROW
            order.insert(new, parent, 1)
            slow.insert(new, parent)
        elif step == "touch":
            path = [row]
            while slow.parents[path[0]] != NO_ROW:
                path.insert(0, slow.parents[path[0]])
            order.touch(path)
            slow.touch(path)
        elif step == "hold" and row in held:
            held.discard(row)
            order.unpark(row)
            slow.back(row, held)
        elif step == "hold":
            held.add(row)
        else:
            picked = order.pick(held.__contains__)
            assert picked == slow.victim(held)
            if picked != NO_ROW:
                order.remove(picked)
                slow.remove(picked, held)
                free.append(picked)
    assert len(order) == len(slow.parents)


def columns_bytes(order: SegmentedLru) -> int:
    columns = (order._older, order._newer, order._parent, order._children, order._size)
    return sum(len(column) * column.itemsize for column in columns) + len(order._flags)


def test_restores_a_million_blocks_quickly_and_small():
    order = SegmentedLru(1 << 60)
    rows = range(1_000_000)
    parents = [row - 1 if row % 100 else NO_ROW for row in rows]
    began = time.process_time()
    order.restore(rows, parents, [1 << 20] * len(rows))
    assert time.process_time() - began < 3, "about 0.3 s on an idle core"
    assert columns_bytes(order) <= 22 * len(rows)
    assert order.pick(nobody_holds) == 99


def test_touching_a_long_prefix_costs_microseconds():
    order = SegmentedLru(1 << 60)
    prefix = list(range(512))
    order.restore(prefix, [row - 1 for row in prefix], [1] * 512)
    began = time.process_time()
    for _ in range(1000):
        order.touch(prefix)
    assert (time.process_time() - began) / 1000 < 1e-3, "about 100 us with everything taken in, 5 us without"
