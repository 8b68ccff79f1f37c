"""A pool that is too small for its requests: preempted ones come back from the store, aborted ones leave nothing."""

from __future__ import annotations

import pytest
from harness import prompt, sources

# 20 blocks of 32 tokens.
ENGINE = {
    "num_gpu_blocks_override": 20,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "dtype": "float32",
}


def test_preempted_requests_load_what_they_had(engine):
    prompts = [prompt(150, seed) for seed in range(4)]
    alone = [engine.tokens(ids, n=60) for ids in prompts]
    engine.reset()
    answers = engine.ask(*prompts, n=60)
    assert [list(answer.outputs[0].token_ids) for answer in answers] == alone
    engine.saved()
    assert engine.worker._worker.counts["pages_loaded"] > 0
    engine.host.store.audit()


def test_a_context_that_was_evicted_from_vllm_comes_from_the_store(engine):
    first = prompt(200, 10)
    wanted = engine.tokens(first)
    for seed in range(11, 15):
        engine.ask(prompt(300, seed), n=2)
    engine.saved()
    (again,) = engine.ask(first)
    assert list(again.outputs[0].token_ids) == wanted
    found = sources(again)
    assert found.get("dram", 0) + found.get("ssd", 0) >= 160


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_aborted_request_leaves_nothing(engine, steps: int):
    """Queued, in its first chunk, in a later one, decoding."""
    from vllm import SamplingParams

    llm = engine.llm.llm_engine
    ids = prompt(400, 20 + steps)
    llm.add_request(
        f"a{steps}", {"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    )
    for _ in range(steps):
        llm.step()
    llm.abort_request([f"a{steps}"])
    while llm.has_unfinished_requests():
        llm.step()
    engine.ask(prompt(40, 1), n=1)
    assert not engine.connector._scheduler._requests
    engine.saved()
    engine.host.store.audit()
    # What it had computed by then is whole, and is a hit.
    assert engine.llm.reset_prefix_cache()
    (again,) = engine.ask(ids)
    assert sources(again).get("dram", 0) >= min(steps, 1) * 256


def test_an_abort_while_pages_are_loaded_aside(engine, monkeypatch):
    import threading

    from vllm import SamplingParams

    ids = prompt(300, 40)
    engine.ask(ids)
    engine.reset()
    side, gate = engine.connector._scheduler, threading.Event()
    match = side.match

    def aside(request, computed):
        tokens, _ = match(request, computed)
        side._requests[request.request_id].is_async = tokens > 0
        return tokens, tokens > 0

    monkeypatch.setattr(side, "match", aside)
    loading = engine.worker._worker._loading
    copied, ended = loading._copied, []

    def slow(*given):
        gate.wait(30)
        ended.append(copied(*given))
        return ended[-1]

    monkeypatch.setattr(loading, "_copied", slow)
    llm = engine.llm.llm_engine
    llm.add_request("x", {"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=4))
    llm.step()
    llm.step()
    llm.abort_request(["x"])
    gate.set()
    monkeypatch.undo()
    for seed in range(50, 53):
        engine.ask(prompt(200, seed), n=2)
    assert engine.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() >= 18
    assert ended
    assert ended[0] > 0, "they came all the same, to blocks that nobody else had by then"
    assert not side._requests
    engine.saved()
    engine.host.store.audit()
