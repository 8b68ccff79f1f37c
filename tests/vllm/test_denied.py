"""Blocks that could not be loaded are not offered for a while."""

from __future__ import annotations

from workmem.core.keys import BlockKey
from workmem.engines.vllm import denied
from workmem.engines.vllm.denied import Denied

KEYS = [BlockKey(bytes([number]) * 32) for number in range(6)]


class At:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_comes_before_a_denied_block_may_be_offered():
    made = Denied(10.0, At())
    assert made.allowed(KEYS) == 6
    made.add(KEYS[4])
    made.add(KEYS[2])
    assert made.allowed(KEYS) == 2
    assert made.allowed(KEYS[3:]) == 1
    assert made.allowed(KEYS[5:]) == 1


def test_it_ends_for_each_in_its_time_which_begins_anew_when_it_fails_again():
    clock = At()
    made = Denied(10.0, clock)
    made.add(KEYS[0])
    clock.now = 4.0
    made.add(KEYS[1])
    clock.now = 8.0
    made.add(KEYS[0])
    clock.now = 13.9
    assert made.allowed(KEYS[1:]) == 0
    clock.now = 14.0
    assert made.allowed(KEYS[1:]) == 5
    assert made.allowed(KEYS) == 0
    clock.now = 18.0
    assert made.allowed(KEYS) == 6
    assert len(made) == 0


def test_the_oldest_makes_room(monkeypatch):
    monkeypatch.setattr(denied, "KEYS_MAX", 2)
    made = Denied(10.0, At())
    for key in KEYS[:3]:
        made.add(key)
    assert [made.allowed([key]) for key in KEYS[:3]] == [1, 0, 0]
