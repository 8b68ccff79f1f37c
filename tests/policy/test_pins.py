"""Pins within a budget, and groups that live and die together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.policy.groups import LifeGroups
from workmem.policy.order import NO_ROW, EvictionOrder, Prospect
from workmem.policy.pins import PinTable
from workmem.policy.segmented_lru import SegmentedLru
from workmem.policy.value import ValueOrder

PINNED = Prospect.PINNED


def test_pin_lasts_for_its_time():
    pins: PinTable[str] = PinTable(100)
    assert pins.pin("acme", "session", {"x": 1, "y": 1}, now_s=0, ttl_s=3600).pinned == ("x", "y")
    assert pins.expire(3599).unpinned == ()
    assert pins.is_pinned("x")
    change = pins.expire(3600)
    assert change.unpinned == ("x", "y")
    assert change.expired == (("acme", "session"),)
    assert not pins.is_pinned("x")


def test_pins_over_the_budget_demote_the_oldest_and_never_fail():
    pins: PinTable[str] = PinTable(10)
    pins.pin("acme", "first", {"a": 6}, now_s=0, ttl_s=60)
    pins.pin("other", "first", {"z": 10}, now_s=0, ttl_s=60)
    change = pins.pin("acme", "second", {"b": 6}, now_s=1, ttl_s=60)
    assert change.demoted == (("acme", "first"),)
    assert change.pinned == ("b",)
    assert change.unpinned == ("a",)
    assert pins.is_pinned("z"), "a budget is its owner's own"


def test_pin_larger_than_the_budget_costs_no_other_pin():
    pins: PinTable[str] = PinTable(10)
    pins.pin("acme", "small", {"a": 6}, now_s=0, ttl_s=60)
    change = pins.pin("acme", "huge", {"b": 11}, now_s=1, ttl_s=60)
    assert change.demoted == (("acme", "huge"),)
    assert change.pinned == change.unpinned == ()
    assert pins.is_pinned("a")
    assert len(pins) == 1


def test_pin_of_the_same_name_is_renewed_and_counts_as_new():
    pins: PinTable[str] = PinTable(10)
    pins.pin("acme", "one", {"a": 4}, now_s=0, ttl_s=60)
    pins.pin("acme", "two", {"b": 4}, now_s=1, ttl_s=60)
    change = pins.pin("acme", "one", {"a": 4, "c": 1}, now_s=50, ttl_s=60)
    assert change.pinned == ("c",)
    assert change.unpinned == ()
    assert pins.expire(61).expired == (("acme", "two"),)
    assert pins.pin("acme", "three", {"d": 9}, now_s=62, ttl_s=9).demoted == (("acme", "one"),)


def test_block_in_two_pins_counts_once_and_stays_until_both_end():
    pins: PinTable[str] = PinTable(10)
    pins.pin("acme", "one", {"a": 8}, now_s=0, ttl_s=60)
    assert pins.pin("acme", "two", {"a": 8, "b": 2}, now_s=0, ttl_s=60).demoted == ()
    assert pins.owners() == [("acme", 2, 10)]
    assert pins.unpin("acme", "one").unpinned == ()
    assert pins.unpin("acme", "two").unpinned == ("a", "b")
    assert pins.owners() == []


def test_ending_a_pin_that_is_not_there_changes_nothing():
    pins: PinTable[str] = PinTable(10)
    assert pins.unpin("acme", "one").unpinned == ()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("pue"), st.sampled_from("xy"), st.integers(0, 3), st.sets(st.integers(0, 5))
        ),
        max_size=30,
    )
)
def test_changes_add_up_to_what_is_pinned(steps):
    pins: PinTable[int] = PinTable(12)
    pinned: set[int] = set()
    for now, (step, owner, name, blocks) in enumerate(steps):
        if step == "p":
            sizes = {block: block + 1 for block in blocks}
            change = pins.pin(owner, str(name), sizes, now_s=now, ttl_s=5)
        elif step == "u":
            change = pins.unpin(owner, str(name))
        else:
            change = pins.expire(now)
        assert not pinned & set(change.pinned)
        assert set(change.unpinned) <= pinned
        pinned = (pinned | set(change.pinned)) - set(change.unpinned)
        assert pinned == {block for block in range(6) if pins.is_pinned(block)}
        assert all(named <= 12 for _, _, named in pins.owners())
    pins.expire(1000)
    assert len(pins) == 0


@pytest.mark.parametrize("make", [lambda: SegmentedLru(80), ValueOrder])
def test_session_that_is_pinned_for_an_hour_survives_pressure_for_an_hour(make):
    order: EvictionOrder = make()
    pins: PinTable[int] = PinTable(20)
    for row in range(100):
        order.insert(row, row - 1 if row % 10 else NO_ROW, 1)
    order.advise(
        pins.pin("acme", "s", dict.fromkeys(range(10), 1), now_s=0, ttl_s=3600).pinned, prospect=PINNED
    )
    assert {scan(order) for _ in range(500)}.isdisjoint(range(10))
    order.advise(pins.expire(3600).unpinned, prospect=Prospect.UNKNOWN)
    assert {scan(order) for _ in range(500)} >= set(range(10))


def scan(order: EvictionOrder) -> int:
    """One block comes, another goes."""
    row = order.pick(lambda _: False)
    order.remove(row)
    order.insert(row, NO_ROW, 1)
    return row


def test_group_lives_and_dies_together():
    groups: LifeGroups[str, int] = LifeGroups()
    for group, block in (("g", 1), ("g", 2), ("g", 3), ("h", 4)):
        groups.join(group, block)
    assert groups.used_with([9, 2, 3, 4]) == [9, 1, 2, 3, 4]
    assert groups.leave(2) == [3, 1]
    assert groups.used_with([1]) == [1]
    assert groups.leave(1) == []
    assert len(groups) == 1
    assert groups.leave(4) == []
    assert len(groups) == 0


def test_block_is_in_one_group_only():
    groups: LifeGroups[str, int] = LifeGroups()
    groups.join("g", 1)
    with pytest.raises(AssertionError, match="already"):
        groups.join("h", 1)


def test_when_a_block_is_not_pinned_any_more_is_known():
    table = PinTable[str](100)
    assert table.ends_s("a") is None
    table.pin("o", "short", {"a": 1, "b": 1}, now_s=0.0, ttl_s=5.0)
    table.pin("o", "long", {"a": 1}, now_s=0.0, ttl_s=9.0)
    assert (table.ends_s("a"), table.ends_s("b")) == (9.0, 5.0)
    table.unpin("o", "short")
    assert (table.ends_s("a"), table.ends_s("b")) == (9.0, None)
    table.expire(9.0)
    assert table.ends_s("a") is None
