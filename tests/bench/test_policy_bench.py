"""What the benchmark of eviction orders counts, and its ceiling."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from traces import Request, Trace, generated, recorded

import policy
from policy import EVEN, ORDERS, TOLD, oracle, replay
from workmem.policy.choose import EvictionName


def trace(*paths: list[int]) -> Trace:
    return Trace("t", "", [Request(path) for path in paths])


def test_leading_blocks_count_and_no_others():
    outcome = replay(trace([0, 1, 2], [0, 1, 3], [4], [0, 1, 2]), "lru", 100)
    assert outcome.hit_rate == 5 / 10
    assert outcome.evictions == 0


def test_cost_weighs_a_block_by_its_depth():
    outcome = replay(trace([0, 1], [0]), "lru", 100)
    assert outcome.cost_saved == pytest.approx(1 / (2 + 1 / EVEN + 1))


def test_oracle_keeps_what_is_used_next_and_does_not_admit_the_rest():
    outcome = oracle(trace([0], [1], [2], [0], [1]), 2)
    assert outcome.hit_rate == 2 / 5
    assert outcome.evictions == 0
    assert replay(trace([0], [1], [2], [0], [1]), "lru", 2).hit_rate == 0


@pytest.mark.parametrize("seed", range(3))
def test_no_order_beats_the_oracle(seed):
    chance = random.Random(seed)
    paths = []
    for _ in range(200):
        root = int(chance.paretovariate(0.8)) % 20
        paths.append([root * 100 + depth for depth in range(chance.randint(1, 12))])
    for capacity in (5, 20, 60):
        best = oracle(trace(*paths), capacity).hit_rate
        for name in ORDERS:
            assert replay(trace(*paths), name, capacity).hit_rate <= best


def test_recorded_traces_share_a_prefix_as_far_as_their_ids_agree(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"hash_ids": [7, 8, 9]}\n{"hash_ids": [7, 5, 9]}\n')
    (tmp_path / "other.jsonl").write_text('{"messages": []}\n')
    session = (
        '{"block_size": 64, "requests": [{"t": 0, "stop": "tool_use", "hash_runs": [[1, 9]]},'
        ' {"t": 5, "hash_runs": [[1, 17]]}]}\n'
    )
    (tmp_path / "sessions.jsonl").write_text(session * 2)
    lines, sessions = recorded(tmp_path, seed=1, blocks_max=6)
    assert [request.blocks for request in lines.requests] == [[0, 1, 2], [0, 3, 4]]
    ours = [request for request in sessions.requests if request.blocks[0] == 0]
    assert [request.blocks for request in ours] == [[0], [0, 1]]
    assert [(request.goes_on, request.is_last) for request in ours] == [(True, False), (False, True)]
    assert len(sessions.requests) == 4


def test_generated_sessions_are_the_same_for_the_same_seed():
    assert generated(3, 4) == generated(3, 4)
    assert generated(3, 4) != generated(4, 4)


def test_orders_without_anything_to_be_told_are_not_replayed_twice():
    assert policy.TOLD not in policy._names(trace([0]))
    assert policy.TOLD in policy._names(generated(3, 4))


def test_every_order_that_can_be_chosen_is_measured():
    assert {*get_args(EvictionName), TOLD} == set(ORDERS)
