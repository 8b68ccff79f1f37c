"""Orders by group: room comes from the group that is to give it, and chains may cross groups."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.policy.grouped import GroupedOrder
from workmem.policy.lru import Lru
from workmem.policy.order import NO_ROW


def nobody_holds(_: int) -> bool:
    return False


def drain(order: GroupedOrder, group: str | None = None) -> list[int]:
    gone = []
    while (row := order.pick(nobody_holds, group=group)) != NO_ROW:
        order.remove(row)
        gone.append(row)
    return gone


def test_victims_come_from_the_group_that_is_named():
    order = GroupedOrder(Lru)
    for row in range(6):
        order.insert(row, NO_ROW, 1, group="ab"[row % 2])
    assert drain(order, "b") == [1, 3, 5]
    assert order.pick(nobody_holds, group="b") == NO_ROW
    assert len(order) == 3
    assert order.pick(nobody_holds, group="nobody") == NO_ROW


def test_without_a_group_the_largest_gives():
    order = GroupedOrder(Lru)
    order.insert(0, NO_ROW, 1, group="a")
    order.restore([1, 2], [2, NO_ROW], [1, 1], group="b")
    assert drain(order) == [1, 0, 2]


def test_shared_prefix_waits_for_children_of_other_groups():
    order = GroupedOrder(Lru)
    order.insert(0, NO_ROW, 1, group="a")
    order.insert(1, 0, 1, group="b")
    order.insert(2, 0, 1, group="c")
    assert drain(order, "a") == []
    order.unpark(0)
    assert drain(order, "a") == []
    assert order.held_skips == 0, "nobody holds it"
    assert drain(order, "b") == [1]
    assert drain(order, "a") == []
    assert drain(order, "c") == [2]
    assert drain(order, "a") == [0]


def test_chains_that_cross_groups_are_restored_as_such():
    order = GroupedOrder(Lru)
    order.restore([1, 2], [0, 1], [1, 1], group="b")
    order.restore([0], [NO_ROW], [1], group="a")
    assert drain(order, "a") == []
    assert not order.is_leaf(0)
    assert drain(order, "b") == [2, 1]
    assert order.is_leaf(0)
    assert drain(order, "a") == [0]


def test_shared_prefix_that_leaves_first_frees_its_children():
    order = GroupedOrder(Lru)
    order.insert(0, NO_ROW, 1, group="a")
    order.insert(1, 0, 1, group="b")
    order.remove(0)
    order.insert(0, NO_ROW, 1, group="a")
    assert drain(order, "a") == [0]
    assert drain(order, "b") == [1]


def test_use_of_a_prefix_counts_in_every_group_it_crosses():
    order = GroupedOrder(Lru)
    order.insert(0, NO_ROW, 1, group="a")
    order.insert(1, NO_ROW, 1, group="a")
    order.insert(2, 0, 1, group="b")
    order.insert(3, NO_ROW, 1, group="b")
    order.touch([0, 2])
    assert drain(order, "b") == [3, 2]
    assert drain(order, "a") == [1, 0]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("iiteehd"), st.sampled_from("abc"), st.integers(0, 20)), max_size=60)
)
def test_any_history_over_groups_keeps_children_before_parents(steps):
    order = GroupedOrder(Lru)
    parents: dict[int, int] = {}
    groups: dict[int, str] = {}
    held: set[int] = set()
    free = list(range(10))
    gone = NO_ROW
    for step, group, number in steps:
        row = sorted(parents)[number % len(parents)] if parents else NO_ROW
        if step == "i" and free:
            new, parent = free.pop(), row if number % 4 else NO_ROW
            order.insert(new, parent, 1, group=group)
            parents[new], groups[new] = parent, group
        elif step == "t" and parents:
            order.touch([row])
        elif step == "d" and parents:
            gone = row
        elif step == "h" and row in held:
            held.discard(row)
            order.unpark(row)
        elif step == "h" and parents:
            held.add(row)
        elif step == "e":
            picked = order.pick(held.__contains__, group=group)
            may = {r for r in parents if groups[r] == group} - set(parents.values()) - held
            assert picked in may if may else picked == NO_ROW
            gone = picked
        if gone != NO_ROW:
            order.remove(gone)
            del parents[gone]
            held.discard(gone)
            free.append(gone)
            parents.update(dict.fromkeys((c for c, p in parents.items() if p == gone), NO_ROW))
            gone = NO_ROW
    for row in list(held):
        held.discard(row)
        order.unpark(row)
    assert len(drain(order)) == len(parents)
