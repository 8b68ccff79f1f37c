"""The eviction order: a pure object, checked against its rules and against a slow model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.policy.eviction import SegmentedLru


def drain(order: SegmentedLru[str]) -> list[str]:
    gone = []
    while (node := order.pick(lambda _: False)) is not None:
        order.remove(node)
        gone.append(node.item)
    return gone


def chain(order: SegmentedLru[str], name: str, length: int) -> dict[str, object]:
    parent: object = ("root", name)
    nodes = {}
    for index in range(length):
        item = f"{name}{index}"
        nodes[item] = order.insert(item, item, parent, 1)
        parent = item
    return nodes


def test_children_go_before_parents():
    order: SegmentedLru[str] = SegmentedLru(100)
    chain(order, "a", 4)
    assert drain(order) == ["a3", "a2", "a1", "a0"]
    assert len(order) == 0


def test_parent_with_two_branches_waits_for_both():
    order: SegmentedLru[str] = SegmentedLru(100)
    for item, parent in (("p", "root"), ("x", "p"), ("y", "p")):
        order.insert(item, item, parent, 1)
    assert drain(order) == ["x", "y", "p"]


def test_parent_that_arrives_after_its_child_still_waits_for_it():
    order: SegmentedLru[str] = SegmentedLru(100)
    order.insert("child", "child", "parent", 1)
    order.insert("parent", "parent", "root", 1)
    assert drain(order) == ["child", "parent"]


def test_scan_goes_before_anything_reused():
    order: SegmentedLru[str] = SegmentedLru(100)
    hot = chain(order, "hot", 3)
    order.touch(list(hot.values()))
    for number in range(20):
        chain(order, f"scan{number}-", 2)
    gone = drain(order)
    assert gone[-3:] == ["hot2", "hot1", "hot0"]


def test_oldest_first_among_equals():
    order: SegmentedLru[str] = SegmentedLru(100)
    nodes = [order.insert(name, name, "root", 1) for name in "abcd"]
    order.touch([nodes[0], nodes[2], nodes[1]])
    assert drain(order) == ["d", "a", "c", "b"]


def test_reused_segment_is_bounded_so_a_new_working_set_can_take_over():
    order: SegmentedLru[str] = SegmentedLru(2)
    nodes = [order.insert(name, name, "root", 1) for name in "abc"]
    order.touch(nodes)
    order.insert("new", "new", "root", 1)
    assert drain(order) == ["a", "new", "b", "c"]


def test_held_block_is_passed_over_and_counted_until_unparked():
    order: SegmentedLru[str] = SegmentedLru(100)
    first = order.insert("first", "first", "root", 1)
    order.insert("second", "second", "root", 1)
    picked = order.pick(lambda item: item == "first")
    assert picked is not None
    assert picked.item == "second"
    assert order.held_skips == 1
    assert first.parked
    order.pick(lambda item: item == "first")
    assert order.held_skips == 1
    order.unpark(first)
    assert drain(order) == ["first", "second"]


def test_heap_stays_in_proportion_to_what_is_held():
    order: SegmentedLru[str] = SegmentedLru(100)
    nodes = [order.insert(name, name, "root", 1) for name in "abc"]
    for _ in range(10_000):
        order.touch(nodes)
    assert len(order._heap) < 100
    assert drain(order) == ["a", "b", "c"]


class Slow:
    """The same rules, one full scan per decision."""

    def __init__(self, protected_max: int) -> None:
        self.max = protected_max
        self.blocks: dict[str, list] = {}
        self.clock = 0

    def insert(self, item: str, parent: str) -> None:
        self.clock += 1
        self.blocks[item] = [False, self.clock, parent]

    def touch(self, item: str) -> None:
        self.clock += 1
        self.blocks[item][0:2] = [True, self.clock]
        reused = sorted((block[1], name) for name, block in self.blocks.items() if block[0])
        for _, name in reused[: max(0, len(reused) - self.max)]:
            self.blocks[name][0] = False

    def victim(self, held: set[str]) -> str | None:
        parents = {block[2] for block in self.blocks.values()}
        free = [
            (b[0], b[1], name) for name, b in self.blocks.items() if name not in parents and name not in held
        ]
        return min(free)[2] if free else None


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 6),
    st.lists(
        st.tuples(st.sampled_from(["insert", "touch", "evict", "hold", "drop"]), st.integers(0, 30)),
        max_size=80,
    ),
)
def test_agrees_with_the_slow_model(protected_max, steps):
    order: SegmentedLru[str] = SegmentedLru(protected_max)
    slow = Slow(protected_max)
    nodes: dict[str, object] = {}
    held: set[str] = set()
    for number, (step, pick) in enumerate(steps):
        names = sorted(slow.blocks)
        if step == "insert" or not names:
            item = f"{number:03d}"
            parent = names[pick % len(names)] if names and pick % 3 else "root"
            nodes[item] = order.insert(item, item, parent, 1)
            slow.insert(item, parent)
            continue
        item = names[pick % len(names)]
        if step == "touch":
            order.touch([nodes[item]])
            slow.touch(item)
        elif step == "hold":
            if item in held:
                held.discard(item)
                order.unpark(nodes[item])
            else:
                held.add(item)
        elif step == "drop":
            order.remove(nodes[item])
            del slow.blocks[item]
            held.discard(item)
        else:
            picked = order.pick(held.__contains__)
            assert (picked.item if picked else None) == slow.victim(held)
            if picked is not None:
                order.remove(picked)
                del slow.blocks[picked.item]
    assert len(order) == len(slow.blocks)
