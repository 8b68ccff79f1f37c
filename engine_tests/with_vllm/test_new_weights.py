"""Weights that change under a real vLLM, with and without a word to us: what was stored before is never a hit for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Engine, prompt, sources, tiny_model

from workmem.engines.vllm.hashes import block_hashes

LENGTH = 193
BLOCKS = 6
ENGINE = {
    "dtype": "float32",
    "max_model_len": 512,
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 96,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tiny_model(tmp_path_factory.mktemp(f"seed{seed}"), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def smollm2(models: list[Path]) -> Path:
    """The engine starts with the first of them."""
    return models[0]


def reload(engine: Engine, folder: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def new_weights(engine: Engine) -> int:
    """How often the scheduler's side has heard of them."""
    assert not engine.connector._guard.off
    assert not engine.worker._guard.off
    return engine.connector._scheduler.counts["new_weights"]


def epochs(engine: Engine, ids: list[int]) -> set[int]:
    """In which the first block of a prompt was stored."""
    assert engine.host.store is not None
    catalog = engine.host.store.pool.state.catalog
    key = block_hashes(ids, 32)[0]
    return {
        catalog.space[row].namespace.weights_epoch
        for row, frame in enumerate(catalog.frame)
        if frame is not None and catalog.key[row] == key
    }


def told_everybody(engine: Engine) -> None:
    engine.saved()
    assert engine.llm.reset_prefix_cache(reset_connector=True)


def test_a_reload_that_tells_nobody_and_a_reset_of_vllms_own_cache_alone(engine: Engine, models: list[Path]):
    """As trainers do it: the only word is for vLLM's own cache."""
    ids = prompt(LENGTH, 1)
    old = engine.tokens(ids)
    engine.reset()
    assert engine.tokens(ids) == old
    before = new_weights(engine)
    reload(engine, models[1])
    assert engine.llm.reset_prefix_cache()
    (first,) = engine.ask(ids)
    new = list(first.outputs[0].token_ids)
    assert sources(first) == {"computed": LENGTH}
    assert new != old
    assert new_weights(engine) == before + 1
    # That is kept, in an epoch of its own, and comes back.
    engine.reset()
    (again,) = engine.ask(ids)
    assert sources(again) == {"dram": BLOCKS * 32, "computed": 1}
    assert list(again.outputs[0].token_ids) == new
    # Nothing of it is under the name of the weights in the files.
    stored = epochs(engine, ids)
    assert 0 in stored
    assert len(stored) == 2
    # The reference: everybody was told.
    reload(engine, models[1])
    told_everybody(engine)
    assert engine.tokens(ids) == new
    reload(engine, models[0])
    told_everybody(engine)
    assert engine.tokens(ids) == old


def test_a_reload_without_any_reset_keeps_nothing(engine: Engine, models: list[Path]):
    """VLLM's own cache mixes both then, as it says itself; what comes of that stays there."""
    told_everybody(engine)
    head, ids = prompt(64, 2), prompt(LENGTH, 3)
    engine.ask(head)
    engine.saved()
    reload(engine, models[1])
    engine.ask([*head, *ids])
    engine.ask(ids)
    engine.saved()
    assert epochs(engine, ids) == set()
    assert epochs(engine, head) != set()
    assert engine.llm.reset_prefix_cache()
    wanted = engine.tokens(ids)
    engine.reset()
    (again,) = engine.ask(ids)
    assert sources(again)["dram"] == BLOCKS * 32
    assert list(again.outputs[0].token_ids) == wanted
    reload(engine, models[0])
    told_everybody(engine)


def test_pages_that_are_on_their_way_while_weights_change(engine: Engine, models: list[Path], monkeypatch):
    from threading import Event

    from vllm import SamplingParams

    told_everybody(engine)
    ids = prompt(LENGTH, 4)
    engine.ask(ids)
    engine.reset()
    side, gate = engine.connector._scheduler, Event()
    match, load = side.match, engine.worker._worker._loading.load

    def aside(request, computed):
        tokens, _ = match(request, computed)
        side._requests[request.request_id].is_async = tokens > 0
        return tokens, tokens > 0

    def held(*given):
        gate.wait(30)
        return load(*given)

    monkeypatch.setattr(side, "match", aside)
    monkeypatch.setattr(engine.worker._worker._loading, "load", held)
    llm = engine.llm.llm_engine
    llm.add_request(
        "x", {"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    )
    llm.step()
    llm.step()
    reload(engine, models[1])
    llm.step()
    gate.set()
    answers = []
    while llm.has_unfinished_requests():
        answers += [answer for answer in llm.step() if answer.finished]
    monkeypatch.undo()
    assert sources(answers[0]) == {"computed": LENGTH}
    told_everybody(engine)
    assert list(answers[0].outputs[0].token_ids) == engine.tokens(ids)
    reload(engine, models[0])
    told_everybody(engine)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_is_a_new_epoch(engine: Engine, models: list[Path], level: int):
    """As with memory that is really taken away, but that vLLM's CPU worker keeps it: level 2 is followed by a reload."""
    ids = prompt(LENGTH, 10 + level)
    wanted = engine.tokens(ids)
    engine.reset()
    assert sources(engine.ask(ids)[0])["dram"] == BLOCKS * 32
    engine.saved()
    engine.llm.sleep(level=level)
    assert engine.core.model_executor.is_sleeping
    if level == 2:
        reload(engine, models[1])
    assert engine.llm.wake_up()
    (awake,) = engine.ask(ids)
    assert sources(awake) == {"computed": LENGTH}
    assert (list(awake.outputs[0].token_ids) == wanted) == (level == 1)
    engine.reset()
    (again,) = engine.ask(ids)
    assert sources(again)["dram"] == BLOCKS * 32
    assert list(again.outputs[0].token_ids) == list(awake.outputs[0].token_ids)
    new_weights(engine)
    reload(engine, models[0])
    told_everybody(engine)


def test_no_block_is_read_any_more_when_its_memory_goes(engine: Engine, monkeypatch):
    """The worker's own `sleep` is called on a CPU as well, where it does nothing."""
    from threading import Event

    ids, gate, order = prompt(LENGTH, 20), Event(), []
    blocks = engine.worker._worker._blocks
    copy = blocks.copy_out

    def slow(block: int, into: memoryview) -> tuple[int, ...]:
        gate.wait(30)
        order.append("copied")
        return copy(block, into)

    monkeypatch.setattr(blocks, "copy_out", slow)
    engine.ask(ids, n=1)
    assert len(engine.worker._worker._pending)
    worker = engine.core.model_executor.driver_worker.worker
    # It waits: whoever copies is let go on once it is asked for.
    drain = engine.worker._worker._pending.drain

    def draining(timeout_s: float) -> bool:
        gate.set()
        return drain(timeout_s)

    monkeypatch.setattr(engine.worker._worker._pending, "drain", draining)
    worker.sleep(1)
    order.append("asleep")
    assert order == ["copied"] * BLOCKS + ["asleep"]
    assert not engine.worker._guard.off


def test_what_vllms_cpu_platform_refuses(smollm2: Path, engine: Engine):
    """Real sleep, and memory given back piece by piece: these are for GPUs."""
    from vllm import EngineArgs

    with pytest.raises(ValueError, match="Sleep mode is not supported"):
        EngineArgs(model=str(smollm2), enable_sleep_mode=True).create_model_config()
    with pytest.raises(RuntimeError, match="not supported on CPU"):
        engine.core.model_executor.discard(("kv_cache",))
    engine.core.model_executor.sleeping_tags.clear()
    ids = prompt(LENGTH, 30)
    assert len(engine.tokens(ids)) == 8
    assert not engine.worker._guard.off
