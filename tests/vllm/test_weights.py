"""Weights that change under a running engine: no block of before is computed with, and none of after is taken for one of before."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from fake_engine import FakeVllm, Request
from small import SIZE, open_store

from workmem.engines.vllm.outcomes import LoadOutcomes
from workmem.engines.vllm.steps import OTHER_WEIGHTS, Loaded, Promise, StaleEpoch, StepPlan, StepReport
from workmem.engines.vllm.weights import WeightsWatch
from workmem.store.store import Store

BLOCKS = 6
PROMPT = list(range(100, 100 + BLOCKS * SIZE + 1))
OTHER = list(range(300, 300 + BLOCKS * SIZE + 1))
ALL = {"computed": len(PROMPT)}
HIT = {"dram": BLOCKS * SIZE, "computed": 1}


@pytest.fixture
def engines(store: Store):
    made = [FakeVllm(store, 32) for _ in range(2)]
    yield made
    for engine in made:
        engine.close()


def found(engine: FakeVllm, prompt: list[int], name: str) -> dict[str, int]:
    request = Request(name, prompt)
    engine.add(request)
    engine.run()
    assert request.answer is not None
    return request.answer["workmem"]["tokens"]


def reset(engine: FakeVllm) -> None:
    """As vLLM's own, without a word to connectors."""
    engine.reset()
    engine.side.emptied()


def test_what_was_stored_before_is_no_hit_though_nobody_said_that_weights_changed(store: Store, engines):
    first, _ = engines
    assert found(first, PROMPT, "a") == ALL
    assert store.flush(5)
    first.weights = 1
    reset(first)
    # The engine itself checks what it reads.
    assert found(first, PROMPT, "b") == ALL
    assert first.side.counts["new_weights"] == 1
    # That was saved anew, and under another epoch it is a hit.
    assert store.flush(5)
    reset(first)
    assert found(first, PROMPT, "c") == HIT
    assert first.side.counts["new_weights"] == 1


def test_an_engine_with_the_weights_of_before_never_hits_what_was_computed_with_others(store: Store, engines):
    first, second = engines
    first.weights = 1
    assert found(first, PROMPT, "a") == ALL
    assert store.flush(5)
    assert found(second, PROMPT, "b") == ALL


def test_where_the_engine_kept_its_own_blocks_nothing_is_saved_until_it_has_dropped_them(
    store: Store, engines
):
    first, _ = engines
    found(first, PROMPT, "a")
    first.weights = 1
    assert found(first, OTHER, "b") == ALL
    assert found(first, [*OTHER, *OTHER], "c")["computed"] > 0
    assert store.flush(5)
    assert first.worker.counts["pages_stored"] == BLOCKS
    reset(first)
    assert found(first, OTHER, "d") == ALL
    assert store.flush(5)
    reset(first)
    assert found(first, OTHER, "e") == HIT


def test_a_reset_of_all_after_the_change_is_one_epoch_and_not_two(store: Store, engines):
    first, _ = engines
    found(first, PROMPT, "a")
    first.weights = 1
    reset(first)
    first.side.start_epoch(5, is_empty=True)
    assert found(first, PROMPT, "b") == ALL
    assert store.flush(5)
    reset(first)
    assert found(first, PROMPT, "c") == HIT
    assert first.side.counts["new_weights"] == 0


def test_pages_that_are_under_way_when_weights_change_are_computed(tmp_path: Path, monkeypatch):
    before = open_store(tmp_path / "ssd")
    first = FakeVllm(before, 32)
    found(first, PROMPT, "a")
    assert before.flush(5)
    first.close()
    before.close()
    after = open_store(tmp_path / "ssd")
    second = FakeVllm(after, 32)
    second.side._prefetching._share = 0
    gate, load = threading.Event(), second.worker._loading.load

    def held(*given):
        gate.wait(10)
        return load(*given)

    monkeypatch.setattr(second.worker._loading, "load", held)
    request = Request("b", PROMPT)
    second.add(request)
    second.step()
    assert request.state == "parked"
    second.weights = 1
    second.step()
    gate.set()
    second.run()
    assert request.answer is not None
    assert request.answer["workmem"] == {"prompt_tokens": len(PROMPT), "tokens": ALL, "miss": OTHER_WEIGHTS}
    second.close()
    after.audit()
    after.close()


def test_what_came_and_was_not_told_yet_is_told_as_not_there():
    outcomes, op = LoadOutcomes(), Promise(request="r", blocks=(4, 5), is_async=True)
    outcomes.goes_aside(op)
    outcomes.end(op, 2, "")
    outcomes.spoil(OTHER_WEIGHTS)
    assert outcomes.arrived() == {"r"}
    assert outcomes.failed_blocks() == {4, 5}
    assert outcomes.report() == StepReport({"r": Loaded("r", 0, OTHER_WEIGHTS)})
    # The next load of that name is another one.
    outcomes.goes_aside(op)
    outcomes.end(op, 2, "")
    assert outcomes.failed_blocks() == set()


def test_a_step_that_was_planned_before_the_scheduler_heard_is_stale_too():
    written = [0]
    watch = WeightsWatch(lambda: written[0])
    watch.begins(StepPlan(epoch=0, resets=3))
    assert watch.stale is None
    written[0] = 2
    for _ in range(2):
        watch.begins(StepPlan(epoch=0, resets=4))
        assert watch.stale == StaleEpoch(0, is_empty=True)
    watch.begins(StepPlan(epoch=9, resets=4))
    assert watch.stale is None
    written[0] = 3
    watch.begins(StepPlan(epoch=9, resets=4))
    assert watch.stale == StaleEpoch(9, is_empty=False)


def test_one_worker_that_saw_it_is_enough():
    stale = StaleEpoch(0, is_empty=False)
    for both in (StepReport(stale=stale).with_(StepReport()), StepReport().with_(StepReport(stale=stale))):
        assert both.stale == stale
