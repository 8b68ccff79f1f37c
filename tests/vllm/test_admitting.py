"""Who is admitted next: as hints say, within bounds, and as vLLM has it where nobody says anything."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import Request
from test_pins import Pool

from workmem.engines.vllm.admitting import Admitting
from workmem.policy.admission import Aged
from workmem.prompt.hints import read_hints

SIZE = 4
BLOCKS = 41


class Engine:
    """vLLM's queues, pool and clock, as far as they are looked at here."""

    def __init__(self, **policy: Any) -> None:
        self.now = 100.0
        self.pool = Pool(BLOCKS)
        settings = {"priority_s": 1.0, "critical": 50, "share": 0.25, "lent_after_s": 30.0} | policy
        self.side = Admitting(Aged(**settings), self.pool, SIZE, lambda: self.now)
        self.requests: dict[str, Request] = {}
        self.tables: dict[str, list[int]] = {}
        self.running: list[Request] = []
        self.held_by_pins = 0

    def add(self, name: str, blocks: int = 2, priority: object = None, **more: Any) -> Request:
        said = {} if priority is None else {"workmem": {"priority": priority}}
        request = Request(name, [1] * (blocks * SIZE), kv_transfer_params=said, **more)
        self.requests[name] = request
        self.side.arrives(request)
        return request

    def run(self, request: Request, blocks: int) -> None:
        taken = self.pool.take(blocks)
        assert taken is not None
        self.tables[request.request_id] = taken
        request.computed = blocks * SIZE
        self.running.append(request)

    def end(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.free_blocks([self.pool.blocks[number] for number in self.tables.pop(request.request_id)])
        del self.requests[request.request_id]

    def step(self, *waiting: Request) -> list[str] | None:
        self.side.begin_step(self.requests, len(self.requests))
        found = self.side.order(waiting)
        return None if found is None else [request.request_id for request in found]

    def is_held(self, request: Request) -> bool:
        return self.side.is_held_back(
            request, self.running, self.tables.__getitem__, lambda: self.held_by_pins
        )


# -- order


def test_without_hints_the_order_is_vllms_whatever_it_is():
    engine = Engine()
    waiting = [engine.add(str(number)) for number in range(5)]
    random.Random(1).shuffle(waiting)
    assert engine.step(*waiting) is None
    assert engine.side.counts["reordered"] == 0


def test_a_priority_goes_before_those_that_came_little_earlier():
    engine = Engine()
    old = engine.add("old")
    engine.now += 20
    first, second, urgent = engine.add("first"), engine.add("second"), engine.add("urgent", priority=10)
    late = engine.add("late", priority=-5)
    assert engine.step(old, first, late, second, urgent) == ["old", "urgent", "first", "second", "late"]
    # And once it has gone there is nothing left to change.
    assert engine.step(old, first, second) is None


def test_equal_ones_stay_as_vllm_has_them():
    engine = Engine()
    one, two, three = engine.add("1"), engine.add("2"), engine.add("3", priority=3)
    assert engine.step(two, one, three) == ["3", "2", "1"]


def test_more_input_does_not_make_a_request_young():
    engine = Engine()
    stream = engine.add("stream", priority=1)
    engine.now += 5
    other = engine.add("other", priority=1)
    engine.side.arrives(stream)
    assert engine.step(other, stream) == ["stream", "other"]


@pytest.mark.parametrize("said", ["high", 101, 1.5, [1]])
def test_a_priority_that_cannot_be_read_is_none_and_is_named(said: object):
    engine = Engine()
    first, odd = engine.add("first"), engine.add("odd", priority=said)
    assert engine.step(first, odd) is None
    (outcome,) = read_hints(None, odd.kv_transfer_params, None).outcomes
    assert outcome.id == "kv_transfer_params.workmem.priority"
    assert outcome.outcome == "rejected"


def test_an_action_says_it_where_the_request_does_not():
    pin = {"action_type": "Pin", "payload": {"priority": 7}}
    assert read_hints(None, {"workmem": {"actions": [pin]}}, None).priority == 7
    assert read_hints(None, {"workmem": {"actions": [pin], "priority": -1}}, None).priority == -1
    assert read_hints(None, {"kv_hints": {"priority": 4}}, None).priority == 4
    assert read_hints(None, None, None).priority == 0


# -- what is kept for those that cannot wait


def test_blocks_are_kept_for_critical_requests_while_there_are_any():
    engine = Engine()
    running, urgent = engine.add("running", 20), engine.add("urgent", priority=50)
    engine.run(running, 20)
    # 20 of 40 are free, 10 are kept.
    assert not engine.is_held(engine.add("fits", 10))
    assert engine.is_held(engine.add("too much", 11))
    assert not engine.is_held(urgent)
    assert engine.side.counts["held_back"] == 1


def test_what_critical_requests_hold_is_of_what_is_kept():
    engine = Engine()
    urgent = engine.add("urgent", 7, priority=50)
    engine.run(urgent, 7)
    # 33 are free, 3 of them are kept.
    assert not engine.is_held(engine.add("fits", 30))
    assert engine.is_held(engine.add("too much", 31))


def test_nobody_is_held_back_where_none_is_critical_or_nothing_runs():
    engine = Engine()
    plain = engine.add("plain", 30)
    engine.run(plain, 30)
    assert not engine.is_held(engine.add("all", 10, priority=49))
    engine.add("urgent", priority=60)
    last = engine.add("last", 10)
    assert engine.is_held(last)
    engine.end(plain)
    assert not engine.is_held(last)


def test_it_is_lent_some_time_after_the_last_critical_request():
    engine = Engine()
    running, urgent = engine.add("running", 30), engine.add("urgent", 1, priority=50)
    engine.run(running, 30)
    engine.run(urgent, 1)
    engine.now += 1000
    engine.step()
    engine.end(urgent)
    engine.step()
    engine.now += 29
    new = engine.add("new", 5)
    assert engine.is_held(new)
    engine.now += 1
    assert not engine.is_held(new)


def test_nobody_is_held_back_longer_than_that_however_many_critical_ones_come():
    engine = Engine()
    engine.run(engine.add("running", 30), 30)
    poor = engine.add("poor", 5)
    for number in range(30):
        engine.add(f"urgent {number}", priority=50)
        assert engine.is_held(poor)
        engine.now += 1
    assert not engine.is_held(poor)


def test_blocks_that_pins_hold_are_room_and_what_others_still_need_is_none():
    engine = Engine()
    running = engine.add("running", 20)
    engine.run(running, 20)
    engine.add("urgent", priority=50)
    new = engine.add("new", 11)
    assert engine.is_held(new)
    engine.held_by_pins = 1
    assert not engine.is_held(new)
    # Its prompt is longer than what it has blocks for so far.
    running.all_token_ids += [1] * SIZE
    assert engine.is_held(new)


def test_leading_blocks_that_it_shares_with_running_requests_cost_nothing():
    engine = Engine()
    running = engine.add("running", 20)
    engine.run(running, 20)
    engine.add("urgent", priority=50)
    new = engine.add("new", 12)
    assert engine.is_held(new)
    for number, name in zip(engine.tables["running"], list(new.block_hashes)[:2], strict=False):
        engine.pool.blocks[number].block_hash = name
    assert not engine.is_held(new)


def test_requests_that_are_gone_are_forgotten():
    engine = Engine()
    for number in range(2000):
        request = engine.add(str(number), priority=number % 101)
        engine.step(request)
        del engine.requests[str(number)]
    engine.step()
    assert len(engine.side._known) < 300
    assert not engine.side._ranked
    assert not engine.side._critical


def test_a_policy_is_asked_and_not_known():
    class Last:
        def rank(self, candidate):
            return (-candidate.arrived_s,)

        def is_critical(self, candidate):
            return candidate.session == "boss"

        def keeps_free(self, candidate, room, now_s):
            return room.blocks

    now = SimpleNamespace(s=0.0)
    side = Admitting(Last(), Pool(), SIZE, lambda: now.s)
    requests = [
        Request(str(n), [1] * SIZE, kv_transfer_params={"workmem": {"priority": 1}}) for n in range(3)
    ]
    for request in requests:
        now.s += 1
        side.arrives(request)
    assert [request.request_id for request in side.order(requests) or []] == ["2", "1", "0"]
    boss = Request("b", [1] * SIZE, session_id="boss")
    side.arrives(boss)
    assert side.is_held_back(requests[0], [boss], lambda name: [1], lambda: 0)
    assert not side.is_held_back(boss, requests, lambda name: [1], lambda: 0)
