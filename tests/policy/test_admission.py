"""Priority is worth seconds, so nobody is overtaken for ever; blocks are kept for a while, and lent after it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workmem.policy.admission import Aged, Candidate, Room

POLICY = Aged(priority_s=2.0, critical=50, share=0.25, lent_after_s=30.0)


def room(held: int = 0, seen_s: float = 100.0) -> Room:
    return Room(blocks=41, critical_blocks=held, critical_seen_s=seen_s)


def test_without_priority_who_came_first_is_first():
    first, second = Candidate(arrived_s=1.0), Candidate(arrived_s=2.0)
    assert POLICY.rank(first) < POLICY.rank(second)
    assert POLICY.rank(first) == POLICY.rank(Candidate(arrived_s=1.0, session="s"))


@given(st.integers(-100, 100), st.integers(-100, 100), st.floats(0, 1000), st.floats(0, 1000))
def test_a_step_of_priority_is_worth_so_many_seconds_and_no_more(mine, other, came, later):
    me = Candidate(arrived_s=came, priority=mine)
    next_one = Candidate(arrived_s=came + later, priority=other)
    is_overtaken = POLICY.rank(next_one) < POLICY.rank(me)
    if is_overtaken:
        assert later <= (other - mine) * 2.0


def test_what_is_kept_is_a_share_less_what_critical_requests_hold():
    new = Candidate(arrived_s=100.0)
    assert POLICY.keeps_free(new, room(), 101.0) == 10
    assert POLICY.keeps_free(new, room(held=7), 101.0) == 3
    assert POLICY.keeps_free(new, room(held=20), 101.0) == 0


@pytest.mark.parametrize(("came_s", "seen_s"), [(100.0, 70.9), (70.9, 100.9)])
def test_it_is_lent_when_no_critical_one_came_for_long_and_nobody_waits_longer(came_s, seen_s):
    old = Candidate(arrived_s=came_s)
    assert POLICY.keeps_free(old, room(seen_s=seen_s), 100.8) == 10
    assert POLICY.keeps_free(old, room(seen_s=seen_s), 101.0) == 0


def test_critical_begins_at_a_priority():
    assert POLICY.is_critical(Candidate(arrived_s=0.0, priority=50))
    assert not POLICY.is_critical(Candidate(arrived_s=0.0, priority=49))
