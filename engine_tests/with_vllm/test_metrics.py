"""What the connector counts is among vLLM's own metrics, from the start, and what is off is seen there."""

from __future__ import annotations

import pytest
from harness import Engine, prompt, series

from workmem.engines.vllm.telling import METRICS

ENGINE = {
    "load_format": "dummy",
    "hf_overrides": {"num_hidden_layers": 1},
    "num_gpu_blocks_override": 40,
    "max_model_len": 256,
    "scheduler_cls": "workmem.plugins.vllm_scheduler.AgentScheduler",
    "disable_log_stats": False,
}


def ask(engine: Engine, ids: list[int], **said: object) -> None:
    engine.ask(ids, n=2, extra_args={"kv_transfer_params": {"workmem": said}})


def test_all_are_there_from_the_start_at_zero(engine):
    for name, metric in METRICS.items():
        assert series(engine, name) == dict.fromkeys(metric.names(name), 0), name


def test_what_is_saved_and_loaded_is_counted(engine):
    ids = prompt(100, 1)
    ask(engine, ids)
    engine.reset()
    ask(engine, ids)
    assert series(engine, "pages_offered") == {"": 3}
    # A worker tells in its next step what ended behind it.
    assert series(engine, "pages_saved")["stored"] == 3
    assert series(engine, "pages_loaded") == {"": 3}
    assert series(engine, "loads")["whole"] == 1
    page = engine.worker._worker.page_bytes
    assert series(engine, "bytes") == {"loaded": 3 * page, "saved": 3 * page}


def test_levers_and_pins_are_counted_and_what_is_held_goes_down_again(engine):
    pin = {"action_type": "Pin", "action_id": "a", "payload": {"ttl_s": 3000}}
    demote = {"action_type": "Demote", "action_id": "b"}
    ask(engine, prompt(70, 2), session_id="s", actions=[pin, {"action_type": "Melt"}])
    ask(engine, prompt(40, 3), session_id="other")
    assert series(engine, "pins_held") == {"": 1}
    assert series(engine, "pinned_blocks") == {"": 2}
    ask(engine, prompt(70, 4), session_id="s", actions=[demote])
    ask(engine, prompt(40, 5), session_id="other")
    assert series(engine, "pins") == {
        "made": 1,
        "released": 1,
        "expired": 0,
        "gave_way": 0,
        "outranked": 0,
    }
    assert series(engine, "pins_held") == {"": 0}
    assert series(engine, "pinned_blocks") == {"": 0}
    levers = {name: count for name, count in series(engine, "levers").items() if count}
    assert levers == {"Pin": 1, "Demote": 1}
    assert series(engine, "hints") == {"accepted": 2, "clipped": 0, "missing": 0, "rejected": 1}


def test_what_the_scheduler_class_does_is_counted(engine):
    from vllm import SamplingParams

    params = [
        SamplingParams(max_tokens=2, extra_args={"kv_transfer_params": {"workmem": {"priority": n}}})
        for n in (0, 9)
    ]
    inputs = [{"prompt_token_ids": prompt(40, 6 + n)} for n in range(2)]
    engine.llm.generate(inputs, params, use_tqdm=False)
    assert series(engine, "admissions") == {"reordered": 1, "held_back": 0}


def test_a_side_that_is_off_is_seen(engine, monkeypatch: pytest.MonkeyPatch):
    """The last one: it stays off."""
    monkeypatch.setattr(engine.connector._scheduler, "match", lambda *args: 1 / 0)
    assert series(engine, "off") == {"scheduler": 0, "worker": 0}
    engine.ask(prompt(40, 9), n=2)
    assert series(engine, "off")["scheduler"] == 1
    assert series(engine, "bugs")["scheduler"] == 1
