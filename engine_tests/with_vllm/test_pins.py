"""Contexts held in vLLM's own pool between turns, by what clients say: they stay, give way, expire, and never block."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness import Engine, prompt, sources

# 13 blocks of 32 tokens beside the null block, 5 of them for pins. The store is left out of it: what is not in the pool is computed.
# One layer of made-up weights: what is looked at is who has which blocks.
ENGINE = {
    "load_format": "dummy",
    "hf_overrides": {"num_hidden_layers": 1},
    "num_gpu_blocks_override": 14,
    "max_num_batched_tokens": 128,
    "max_model_len": 256,
    "settings": {"vllm.load_min_blocks": "1000", "vllm.pin_share": "0.5"},
}
CONTEXT = 100


@pytest.fixture(autouse=True)
def nothing_held(engine: Engine):
    yield
    pins = pins_of(engine)
    pins.release()
    assert pins.held == 0
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
    assert pool.get_num_free_blocks() == 13
    assert not engine.connector._guard.off


def pins_of(engine: Engine) -> Any:
    return engine.connector._scheduler.levers.pins


def turn(engine: Engine, ids: list[int], *actions: dict[str, Any], session: str = "s", n: int = 2, salt=None):
    said = {"session_id": session, "actions": list(actions)}
    (answer,) = engine.ask(ids, n=n, salt=salt, extra_args={"kv_transfer_params": {"workmem": said}})
    return answer


def pin(ttl_s: float = 3000.0, **more: Any) -> dict[str, Any]:
    return {
        "action_id": "a",
        "action_type": "Pin",
        "action_version": "1",
        "payload": {"ttl_s": ttl_s, **more},
    }


def fill(engine: Engine, seed: int) -> None:
    """Requests that need more than the pool, one after the other."""
    for more in range(3):
        engine.ask(prompt(150, seed + more), n=1)


def preemptions(engine: Engine, monkeypatch) -> list[str]:
    seen: list[str] = []
    scheduler = engine.core.scheduler
    real = scheduler._preempt_request

    def noted(request, *args, **kwargs):
        seen.append(request.request_id)
        return real(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", noted)
    return seen


def next_turn(first: Any, seed: int) -> list[int]:
    return first.prompt_token_ids + list(first.outputs[0].token_ids) + prompt(10, seed)


def test_without_a_pin_the_next_turn_has_nothing_of_its_own(engine):
    first = turn(engine, prompt(CONTEXT, 1))
    fill(engine, 100)
    assert "vram" not in sources(turn(engine, next_turn(first, 2)))


def test_with_a_pin_it_has_all_of_it(engine):
    first = turn(engine, prompt(CONTEXT, 3), pin())
    assert first.kv_transfer_params["workmem"]["hints"] == [{"id": "a", "outcome": "accepted"}]
    assert pins_of(engine).held == CONTEXT // 32
    fill(engine, 110)
    second = turn(engine, next_turn(first, 4), pin())
    assert sources(second)["vram"] == 96
    # Its pin took the place of the first.
    assert len(pins_of(engine)) == 1


def test_what_is_said_in_the_envelope_of_vllm_counts_as_much(engine):
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    ids = prompt(CONTEXT, 5)
    llm = engine.llm.llm_engine
    action = KvHintAction("b", "Pin", "1", {"ttl_s": 3000})
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.add_request("e", {"prompt_token_ids": ids}, params, kv_hints=KvHintsEnvelope("1", "m", [action]))
    answers = []
    while llm.has_unfinished_requests():
        answers += llm.step()
    assert answers[-1].kv_transfer_params["workmem"]["hints"] == [{"id": "b", "outcome": "accepted"}]
    fill(engine, 120)
    assert sources(turn(engine, ids + prompt(10, 6)))["vram"] == 96


def test_a_pin_expires(engine):
    first = turn(engine, prompt(CONTEXT, 7), pin(ttl_s=0.2))
    assert pins_of(engine).held
    time.sleep(0.3)
    fill(engine, 130)
    assert pins_of(engine).held == 0
    assert "vram" not in sources(turn(engine, next_turn(first, 8)))


def test_pins_give_way_to_a_request_that_needs_the_whole_pool(engine, monkeypatch):
    seen = preemptions(engine, monkeypatch)
    turn(engine, prompt(CONTEXT, 9), pin(), session="one")
    turn(engine, prompt(40, 10), pin(), session="two")
    held = pins_of(engine).held
    assert held == 4
    # Two that together need 12.
    answers = engine.ask(prompt(170, 11), prompt(170, 12), n=4)
    assert all(len(answer.outputs[0].token_ids) == 4 for answer in answers)
    assert pins_of(engine).held < held
    assert pins_of(engine).counts["pins_gave_way"] >= 1
    assert not seen


def test_pins_give_way_to_requests_that_grow_before_any_is_preempted(engine, monkeypatch):
    seen = preemptions(engine, monkeypatch)
    turn(engine, prompt(CONTEXT, 13), pin())
    # 4 x 2 blocks at first, 4 x 3 at the end.
    answers = engine.ask(*(prompt(45, 14 + more) for more in range(4)), n=30)
    assert all(len(answer.outputs[0].token_ids) == 30 for answer in answers)
    assert pins_of(engine).held == 0
    assert not seen


def test_the_engine_asks_before_it_preempts(engine, monkeypatch):
    """Should no foresight have helped."""
    levers = engine.connector._scheduler.levers
    monkeypatch.setattr(levers, "steps", lambda running: None)
    seen = preemptions(engine, monkeypatch)
    spared = levers.counts["preemptions_spared"]
    turn(engine, prompt(CONTEXT, 20), pin())
    answers = engine.ask(*(prompt(45, 21 + more) for more in range(4)), n=30)
    assert all(len(answer.outputs[0].token_ids) == 30 for answer in answers)
    assert levers.counts["preemptions_spared"] > spared
    assert not seen


def test_the_prefix_cache_can_be_reset_while_there_are_pins(engine):
    first = turn(engine, prompt(CONTEXT, 30), pin())
    assert pins_of(engine).held
    assert engine.llm.reset_prefix_cache()
    assert pins_of(engine).held == 0
    assert "vram" not in sources(turn(engine, next_turn(first, 31)))


def test_tokens_are_those_without_pins(engine):
    ids = prompt(CONTEXT, 32)
    first = turn(engine, ids, pin())
    fill(engine, 140)
    longer = next_turn(first, 33)
    held = list(turn(engine, longer).outputs[0].token_ids)
    engine.llm.reset_prefix_cache()
    # The same split: the first turn again, and then the second from vLLM's own cache.
    turn(engine, ids)
    assert list(turn(engine, longer).outputs[0].token_ids) == held


def test_what_cannot_be_read_is_named_and_the_answer_comes(engine):
    bad = [{"action_type": "Melt"}, {"action_type": "Pin", "payload": {"ttl_s": "soon"}}, 7]
    told = turn(engine, prompt(CONTEXT, 34), *bad, pin()).kv_transfer_params["workmem"]["hints"]
    assert [one["outcome"] for one in told] == ["rejected", "rejected", "rejected", "accepted"]
    assert "Melt" in told[0]["why"]


def test_a_session_of_another_tenant_cannot_be_demoted(engine):
    turn(engine, prompt(CONTEXT, 35), pin(), session="x", salt="a")
    held = pins_of(engine).held
    demote = {"action_type": "Demote", "action_id": "d", "payload": {"session": "x"}}
    other = turn(engine, prompt(40, 36), demote, session="y", salt="b")
    assert other.kv_transfer_params["workmem"]["hints"][0]["outcome"] == "missing"
    assert pins_of(engine).held == held
    own = turn(engine, prompt(40, 37), demote, session="y", salt="a")
    assert own.kv_transfer_params["workmem"]["hints"][0]["outcome"] == "accepted"
    assert pins_of(engine).held == 0


def test_an_aborted_request_holds_nothing(engine):
    from vllm import SamplingParams

    llm = engine.llm.llm_engine
    said = {"kv_transfer_params": {"workmem": {"actions": [pin()]}}}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args=said)
    llm.add_request("gone", {"prompt_token_ids": prompt(CONTEXT, 38)}, params)
    for _ in range(3):
        llm.step()
    llm.abort_request(["gone"])
    while llm.has_unfinished_requests():
        llm.step()
    engine.ask(prompt(40, 39), n=1)
    assert pins_of(engine).held == 0
