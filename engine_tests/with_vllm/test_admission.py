"""vLLM with our scheduler class: hints order who waits, blocks are kept for critical requests and lent, tokens are the same."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Engine, prompt
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from workmem.plugins import vllm_scheduler

# 15 blocks of 32 tokens beside the null block, 5 of them for critical requests. One layer of made-up weights.
ENGINE = {
    "load_format": "dummy",
    "hf_overrides": {"num_hidden_layers": 1},
    "num_gpu_blocks_override": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 480,
    "scheduler_cls": "workmem.plugins.vllm_scheduler.AgentScheduler",
    "settings": {
        "vllm.load_min_blocks": "1000",
        "vllm.reserve_share": "0.34",
        "vllm.priority_s": "1000",
        "vllm.reserve_s": "1000",
    },
}


@pytest.fixture(autouse=True)
def is_on(engine: Engine):
    scheduler = engine.core.scheduler
    engine.reset()
    scheduler._admitting._critical_seen_s = None
    yield
    assert not scheduler._admission_guard.off
    assert not engine.connector._guard.off
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 15


class Run:
    """Requests given one after the other, and the order in which they were admitted."""

    def __init__(self, engine: Engine) -> None:
        self.llm = engine.llm.llm_engine
        self.scheduler = engine.core.scheduler
        self.admitted: list[str] = []
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str, ids: list[int], priority: int | None = None, n: int = 4) -> None:
        said = {} if priority is None else {"kv_transfer_params": {"workmem": {"priority": priority}}}
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, extra_args=said)
        self.llm.add_request(name, {"prompt_token_ids": ids}, params)

    def step(self) -> None:
        for answer in self.llm.step():
            if answer.finished:
                self.tokens[answer.request_id] = list(answer.outputs[0].token_ids)
        running = [request.request_id.rsplit("-", 1)[0] for request in self.scheduler.running]
        self.admitted += [name for name in running if name not in self.admitted]

    def finish(self) -> None:
        for _ in range(400):
            if not self.llm.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("requests never end")


def test_without_hints_nothing_is_changed(engine):
    run = Run(engine)
    for number in range(4):
        run.add(f"r{number}", prompt(200, number))
    run.finish()
    assert run.admitted == ["r0", "r1", "r2", "r3"]
    assert not any(engine.core.scheduler._admitting.counts.values())


def test_a_priority_is_admitted_before_those_that_wait_and_tokens_are_the_same(engine):
    ids = {f"r{number}": prompt(300, 10 + number) for number in range(4)}
    alone = {}
    for name, one in ids.items():
        alone[name] = engine.tokens(one, n=4)
        engine.reset()
    run = Run(engine)
    run.add("r0", ids["r0"])
    run.step()
    # Ten blocks each: one at a time.
    run.add("r1", ids["r1"])
    run.add("r2", ids["r2"], priority=-1)
    run.add("r3", ids["r3"], priority=9)
    run.finish()
    assert run.admitted == ["r0", "r3", "r1", "r2"]
    assert run.tokens == alone
    assert engine.core.scheduler._admitting.counts["reordered"] >= 1


def test_blocks_are_kept_for_critical_requests_and_then_lent(engine):
    side = engine.core.scheduler._admitting
    held = side.counts["held_back"]
    run = Run(engine)
    # Four of fifteen blocks, and five are kept: six are left for others.
    run.add("runs", prompt(100, 20), n=20)
    run.add("small", prompt(20, 21), priority=50, n=2)
    run.step()
    assert run.admitted == ["small", "runs"]
    run.add("large", prompt(240, 22))
    run.add("fits", prompt(100, 23), n=2)
    for _ in range(4):
        run.step()
    # Eight blocks: it is passed over, and who is behind it is not.
    assert run.admitted == ["small", "runs", "fits"]
    assert side.counts["held_back"] > held
    run.add("urgent", prompt(240, 24), priority=60)
    run.step()
    assert run.admitted[-1] == "urgent"
    # The last critical one was long ago: what was kept is lent.
    side._policy._lent_after_s = 0.0
    run.finish()
    side._policy._lent_after_s = 1000.0
    assert run.admitted[-1] == "large"


def test_an_engine_that_runs_nothing_holds_nobody_back(engine):
    run = Run(engine)
    run.add("small", prompt(20, 30), priority=50, n=2)
    run.finish()
    run.add("all", prompt(440, 31))
    run.finish()
    assert run.admitted == ["small", "all"]


def test_after_a_bug_of_ours_the_order_is_vllms(engine, monkeypatch):
    scheduler = engine.core.scheduler
    before = scheduler._admission_guard
    monkeypatch.setattr(scheduler, "_admission_guard", type(before)("order of admission"))
    monkeypatch.setattr(scheduler._admitting, "order", lambda waiting: 1 / 0)
    run = Run(engine)
    for number in range(3):
        run.add(f"r{number}", prompt(300, 40 + number), priority=number)
    run.finish()
    assert run.admitted == ["r0", "r1", "r2"]
    assert "ZeroDivisionError" in scheduler._admission_guard.off


def test_vllms_own_kind_is_taken(engine, monkeypatch):
    assert type(engine.core.scheduler) is vllm_scheduler.SyncAgentScheduler
    assert vllm_scheduler.AsyncAgentScheduler.__mro__[1:4] == (
        vllm_scheduler.SyncAgentScheduler,
        AsyncScheduler,
        Scheduler,
    )
    kinds = [vllm_scheduler.SyncAgentScheduler, vllm_scheduler.AsyncAgentScheduler]
    made: list[type] = []
    for kind in kinds:
        monkeypatch.setattr(vllm_scheduler, kind.__name__, lambda *args, kind=kind: made.append(kind))
    config = engine.llm.llm_engine.vllm_config
    for is_async in (False, True):
        monkeypatch.setattr(config.scheduler_config, "async_scheduling", is_async)
        vllm_scheduler.AgentScheduler(vllm_config=config)
    assert made == kinds


def test_the_asynchronous_kind_orders_and_keeps_as_well(engine):
    """On a CPU vLLM runs it step by step, as it runs its own."""
    kept = engine.core.scheduler
    names: dict[str, Any] = {
        "vllm_config": kept.vllm_config,
        "kv_cache_config": kept.kv_cache_config,
        "structured_output_manager": kept.structured_output_manager,
        "block_size": kept.block_size,
        "hash_block_size": kept.hash_block_size,
    }
    transfer, kept.vllm_config.kv_transfer_config = kept.vllm_config.kv_transfer_config, None
    try:
        other = vllm_scheduler.AsyncAgentScheduler(**names)
    finally:
        kept.vllm_config.kv_transfer_config = transfer
    made: list[str] = []
    for number, priority in enumerate((None, None, 9)):
        said = {} if priority is None else {"workmem": {"priority": priority}}
        made.append(f"a{number}")
        other.add_request(request(made[-1], prompt(300, 50 + number), said))
    output = other.schedule()
    assert [new.req_id for new in output.scheduled_new_reqs] == ["a2"]
    assert [one.request_id for one in other.waiting] == ["a0", "a1"]
    assert other.running[0].num_output_placeholders == 0
    output = other.schedule()
    # The rest of its prompt, and then a token that is not known yet.
    assert output.num_scheduled_tokens == {"a2": 44}
    assert other.running[0].num_output_placeholders == 1


def request(name: str, ids: list[int], said: dict[str, Any]) -> Any:
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    params = SamplingParams(temperature=0, max_tokens=4, extra_args={"kv_transfer_params": said})
    return Request(name, ids, params, None, block_hasher=get_request_block_hasher(32, sha256_cbor))
