"""The rule of waiting for a handoff, as a table and as properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workmem.core.generation import Handoff
from workmem.policy.handoff import LOOK_MAX_S, QUIET_MIN_S, QUIET_SHARE, Ending, HandoffWait

T0 = 100.0


def wait(wait_s: float = 4.0, *, blocks: int = 4, longest_s: float = 5.0) -> HandoffWait:
    return HandoffWait(Handoff(tokens=64, wait_s=wait_s), blocks=blocks, longest_s=longest_s, now=T0)


# Each look: seconds after the arrival, blocks there.
TABLE = [
    ("all there at once", [(0.0, 4)], Ending.READY, 0.0),
    ("more than all", [(0.0, 9)], Ending.READY, 0.0),
    ("all come together", [(0.0, 0), (0.5, 4)], Ending.WHOLE, 0.5),
    ("they come one by one", [(0.0, 0), (0.9, 1), (1.8, 2), (2.7, 3), (3.6, 4)], Ending.WHOLE, 3.6),
    ("nothing ever comes", [(0.0, 0), (0.99, 0), (1.0, 0)], Ending.STALLED, 1.0),
    ("it stops half-way", [(0.0, 1), (0.8, 2), (1.7, 2), (1.8, 2)], Ending.STALLED, 1.8),
    (
        "slow, but not slow enough",
        [(0.0, 0), (0.9, 1), (1.8, 2), (2.7, 3), (3.6, 3), (4.0, 3)],
        Ending.LATE,
        4.0,
    ),
    ("all there when its turn comes late", [(60.0, 4)], Ending.READY, 0.0),
    ("not all there when its turn comes late", [(60.0, 3)], Ending.LATE, 0.0),
    ("its turn comes after the quiet time", [(2.0, 0)], Ending.STALLED, 0.0),
    ("what was there goes again", [(0.0, 2), (0.9, 1), (1.0, 2)], Ending.STALLED, 1.0),
]


@pytest.mark.parametrize(
    ("looks", "ending", "waited_s"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_the_table(looks: list[tuple[float, int]], ending: Ending, waited_s: float) -> None:
    held = wait()
    for at, blocks in looks[:-1]:
        assert held.observe(blocks, T0 + at)
        assert not held.is_over
    at, blocks = looks[-1]
    assert not held.observe(blocks, T0 + at)
    assert held.ending is ending
    assert held.waited_s == pytest.approx(waited_s)


def test_the_engine_allows_less_than_was_asked_for() -> None:
    held = wait(3600.0, longest_s=2.0)
    assert held.observe(0, T0)
    assert held.observe(1, T0 + 0.4)
    assert not held.observe(1, T0 + 2.0)
    assert held.ending is Ending.LATE


@pytest.mark.parametrize("wait_s", [0.0, math.nan, -1.0])
def test_no_time_is_no_wait(wait_s: float) -> None:
    """A NaN, or less than nothing, cannot come in by a request; were one to, nobody would wait for ever."""
    held = wait(wait_s)
    assert not held.observe(3, T0)
    assert held.ending is Ending.LATE
    assert wait(wait_s, longest_s=math.inf).is_late(T0)


def test_no_wait_where_the_engine_allows_none() -> None:
    assert not wait(longest_s=0.0).observe(3, T0)


def test_the_first_ending_counts() -> None:
    held = wait()
    assert held.observe(0, T0)
    held.end(Ending.UNAVAILABLE, T0 + 1)
    held.end(Ending.LEFT, T0 + 2)
    assert not held.observe(4, T0 + 3)
    assert (held.ending, held.waited_s) == (Ending.UNAVAILABLE, 1.0)
    assert held.report(48).tokens == 48
    assert held.report(48).waited_s == 1.0


def test_one_that_never_waited_has_waited_for_nothing() -> None:
    held = wait()
    held.end(Ending.LEFT, T0 + 9)
    assert held.waited_s == 0.0


@given(
    wait_ms=st.integers(0, 10_000),
    longest_ms=st.integers(0, 10_000),
    blocks=st.integers(0, 9),
    looks=st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 10)), max_size=20),
)
def test_whatever_is_seen_it_ends_in_time_and_stays_ended(
    wait_ms: int, longest_ms: int, blocks: int, looks: list[tuple[int, int]]
) -> None:
    wait_s, longest_s = wait_ms / 1000, longest_ms / 1000
    held = wait(wait_s, blocks=blocks, longest_s=longest_s)
    allowed = min(wait_s, longest_s)
    now, most, grew = T0, 0, T0
    for pause, there in looks:
        was_over = held.is_over
        goes_on = held.observe(there, now)
        assert goes_on is not held.is_over
        if was_over:
            assert not goes_on
        elif goes_on:
            if there > most:
                most, grew = there, now
            assert there < blocks
            assert now - T0 < allowed
            assert now - grew < max(QUIET_SHARE * allowed, QUIET_MIN_S)
        now += pause / 1000
    if held.is_over:
        assert 0 <= held.waited_s <= max(0.0, now - T0)
        assert (held.ending in {Ending.READY, Ending.WHOLE}) is (
            held.ending not in {Ending.LATE, Ending.STALLED}
        )


@given(wait_ms=st.integers(10, 8000), start_ms=st.integers(0, 3000))
def test_looks_are_soon_enough_and_not_too_many(wait_ms: int, start_ms: int) -> None:
    wait_s, start_s = wait_ms / 1000, start_ms / 1000
    held = wait(wait_s, longest_s=math.inf)
    now = T0 + start_s
    looks = 0
    while held.observe(0, now):
        looks += 1
        before = now
        while not held.is_due(now):
            now += 0.001
        assert now - before <= LOOK_MAX_S + 0.002
    assert now - T0 <= max(start_s, wait_s) + 0.002
    assert looks <= 1 + max(wait_s, QUIET_MIN_S) / 0.005
