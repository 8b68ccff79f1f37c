"""Floors and ceilings: from which group room comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.policy.quotas import Quota, QuotaLedger


def ledger(capacity: int, used: dict[str, int], **quotas: Quota) -> QuotaLedger:
    made = QuotaLedger(capacity)
    for group, quota in quotas.items():
        made.set_quota(group, quota)
    for group, size in used.items():
        made.charge(group, size)
    return made


def room_from(groups: QuotaLedger, group: str, size: int) -> str | None:
    return next(iter(groups.sources(group, size)), None)


def test_group_over_its_ceiling_gives_way_itself_although_there_is_room():
    groups = ledger(100, {"a": 20, "b": 60}, a=Quota(ceiling_bytes=20))
    assert groups.is_over("a", 1)
    assert room_from(groups, "a", 1) == "a"
    assert not groups.is_over("b", 1)


def test_group_at_its_floor_is_left_alone():
    groups = ledger(100, {"a": 70, "b": 30}, a=Quota(floor_bytes=70))
    assert room_from(groups, "b", 10) == "b"
    assert room_from(groups, "c", 10) == "b"
    groups = ledger(100, {"a": 70}, a=Quota(floor_bytes=70))
    assert room_from(groups, "c", 10) is None
    assert room_from(groups, "a", 10) == "a", "the floor protects from others only"


def test_group_below_its_floor_grows_at_the_cost_of_others():
    groups = ledger(100, {"a": 55, "b": 45}, a=Quota(floor_bytes=60))
    assert room_from(groups, "a", 5) == "b"
    assert room_from(groups, "a", 6) == "a"


def test_otherwise_whoever_is_most_over_a_fair_share():
    groups = ledger(100, {"a": 50, "b": 30, "c": 20})
    assert room_from(groups, "c", 1) == "a"
    assert room_from(groups, "a", 1) == "a"


def test_of_two_that_are_equally_over_the_one_that_took_bytes_longest_ago():
    groups = ledger(90, {"a": 40, "b": 40, "c": 10})
    assert room_from(groups, "c", 1) == "a"
    groups.refund("a", 1)
    groups.charge("a", 1)
    assert room_from(groups, "c", 1) == "b"


def test_block_that_could_never_fit_is_refused_before_anything_is_evicted():
    groups = ledger(100, {"a": 60}, a=Quota(floor_bytes=60), b=Quota(ceiling_bytes=10))
    assert not groups.admits("b", 11)
    assert not groups.admits("c", 41)
    assert groups.admits("c", 40)
    assert groups.admits("a", 100)


def test_quota_that_cannot_be_kept_is_refused():
    groups = ledger(100, {}, a=Quota(floor_bytes=60))
    with pytest.raises(ValueError, match="40 bytes that are not promised"):
        groups.set_quota("b", Quota(floor_bytes=41))
    with pytest.raises(ValueError, match="below its floor"):
        groups.set_quota("b", Quota(floor_bytes=10, ceiling_bytes=9))
    with pytest.raises(ValueError, match="0 or more"):
        groups.set_quota("b", Quota(floor_bytes=-1))
    groups.set_quota("a", Quota(floor_bytes=100))


def test_bytes_add_up():
    groups = ledger(100, {"a": 5, "b": 6})
    groups.refund("a", 5)
    assert (groups.used("a"), groups.used("b"), groups.total) == (0, 6, 6)
    with pytest.raises(AssertionError, match="gives back"):
        groups.refund("b", 7)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=60))
def test_any_load_keeps_every_promise(wants):
    quotas = {"a": Quota(floor_bytes=12), "b": Quota(ceiling_bytes=9)}
    groups = ledger(30, {}, **quotas)
    for group, size in wants:
        if not groups.admits(group, size):
            continue
        for _ in range(100):
            if not groups.is_over(group, size) and groups.total + size <= 30:
                break
            giver = room_from(groups, group, size)
            assert giver is not None
            assert giver == group or groups.used(giver) > groups.quota(giver).floor_bytes
            groups.refund(giver, 1)
        groups.charge(group, size)
        assert groups.total <= 30
        assert groups.used("b") <= 9
