"""One server prefills, another one decodes: `workmem vllm serve` as producer, an engine in this process as consumer, one store."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Engine, Host, prompt, series, sources

LONGEST_S = 120.0
"""Patient: two engines on a busy machine."""
START_S = 240.0
ENGINE = {
    "kv_role": "kv_consumer",
    "settings": {"vllm.handoff_wait_max_s": str(LONGEST_S)},
    "disable_log_stats": False,
}


class Producer:
    """A real server in the role of a producer."""

    def __init__(self, host: Host, model: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.model = str(model)
        role = {
            "kv_connector": "WorkmemConnector",
            "kv_connector_module_path": "workmem.plugins.vllm",
            "kv_role": "kv_producer",
        }
        words = ["--set", f"store.host.socket={host.socket}", "--set", "vllm.start_store=false", self.model]
        words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager"]
        # Small steps: pages come one after the other.
        words += ["--block-size", "32", "--max-model-len", "2048", "--num-gpu-blocks-override", "256"]
        words += ["--max-num-batched-tokens", "128", "--kv-transfer-config", json.dumps(role)]
        env = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "workmem", "vllm", "serve", *words], env=env, start_new_session=True
        )
        until = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:
                assert self.process.poll() is None, "the producer does not start"
                assert time.monotonic() < until, "the producer does not come up"
                time.sleep(0.2)
            else:
                return

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())

    def kill(self) -> None:
        """All of it at once: the front end and the engine's process."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def producer(host: Host, engine: Engine, smollm2: Path) -> Iterator[Producer]:
    # After the engine: two that start at once take twice as long.
    made = Producer(host, smollm2)
    yield made
    made.kill()


def handed_off(tokens: int, wait_s: float) -> dict[str, Any]:
    return {"kv_transfer_params": {"workmem": {"handoff": {"tokens": tokens, "wait_s": wait_s}}}}


def told(answer: Any) -> dict[str, Any]:
    return answer.kv_transfer_params["workmem"]


def behind(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def pages(host: Host) -> float:
    assert host.store is not None
    return host.store.gauges()["store_dram_pages"]


def test_what_a_producer_has_computed_is_there_at_once(host: Host, engine: Engine, producer: Producer):
    tokens = prompt(257, 1)
    assert producer.prefill(tokens)["usage"]["prompt_tokens"] == 257
    (answer,) = engine.ask(tokens, extra_args=handed_off(257, 20.0))
    assert sources(answer) == {"dram": 256, "computed": 1}
    assert told(answer)["handoff"]["tokens"] == 256
    assert told(answer)["handoff"]["waited_s"] < 2.0, "a moment, for what was still being copied"
    hit = engine.ask(tokens)[0]
    assert sources(hit) == {"vram": 256, "computed": 1}
    assert list(answer.outputs[0].token_ids) == list(hit.outputs[0].token_ids)
    assert "handoff" not in told(hit)
    assert producer.prefill(tokens)["usage"]["prompt_tokens"] == 257


def test_the_tail_behind_what_another_server_has_computed_comes_too(
    host: Host, engine: Engine, producer: Producer
):
    """A turn that goes on: the producer has its beginning itself, and computes the rest in one step."""
    begun = prompt(129, 2)
    producer.prefill(begun)
    longer = [*begun[:128], *prompt(65, 3)]
    producer.prefill(longer)
    (answer,) = engine.ask(longer, extra_args=handed_off(len(longer), 20.0))
    assert sources(answer) == {"dram": 192, "computed": 1}


def test_a_request_that_comes_before_the_prefill_has_ended_waits_and_hits(engine: Engine, producer: Producer):
    tokens = prompt(513, 4)
    sent = behind(lambda: (time.sleep(0.3), producer.prefill(tokens)))
    (answer,) = engine.ask(tokens, extra_args=handed_off(513, LONGEST_S))
    sent.join()
    assert sources(answer) == {"dram": 512, "computed": 1}
    assert told(answer)["handoff"]["waited_s"] > 0.3
    assert told(answer)["handoff"]["tokens"] == 512
    hit = engine.ask(tokens)[0]
    assert sources(hit) == {"vram": 512, "computed": 1}
    assert list(answer.outputs[0].token_ids) == list(hit.outputs[0].token_ids)
    assert series(engine, "handoffs")["whole"] >= 1
    assert series(engine, "handoff_wait_seconds")[""] > 0.3


def test_an_engine_that_only_waits_takes_few_steps_and_others_would_run(engine: Engine, producer: Producer):
    steps: list[int] = []
    schedule = engine.core.scheduler.schedule

    def counted(*args: Any) -> Any:
        steps.append(1)
        return schedule(*args)

    engine.core.scheduler.schedule = counted
    try:
        began = time.monotonic()
        (answer,) = engine.ask(prompt(129, 5), n=1, extra_args=handed_off(129, 4.0))
        seconds = time.monotonic() - began
    finally:
        engine.core.scheduler.schedule = schedule
    assert sources(answer) == {"computed": 129}
    assert 0.99 <= told(answer)["handoff"]["waited_s"] < 4.0, "a quarter of the time, as nothing came"
    assert len(steps) < 600 * seconds
    # One that waits stands before others in the queue, and they are done first.
    held, *others = [prompt(65, seed) for seed in range(6, 10)]
    from vllm import SamplingParams

    greedy = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    params = [
        SamplingParams(**greedy, extra_args=handed_off(65, 4.0)),
        *(SamplingParams(**greedy) for _ in others),
    ]
    answers = engine.llm.generate(
        [{"prompt_token_ids": ids} for ids in (held, *others)], params, use_tqdm=False
    )
    assert told(answers[0])["handoff"]["waited_s"] >= 1.0
    ends = [answer.metrics.last_token_ts for answer in answers]
    assert all(end < ends[0] for end in ends[1:])


def test_what_cannot_be_read_is_named(engine: Engine):
    (answer,) = engine.ask(
        prompt(65, 11), n=1, extra_args={"kv_transfer_params": {"workmem": {"handoff": {"tokens": -1}}}}
    )
    (outcome,) = told(answer)["hints"]
    assert (outcome["id"], outcome["outcome"]) == ("kv_transfer_params.workmem.handoff", "rejected")
    assert "handoff" not in told(answer)


def test_a_producer_that_dies_half_way_costs_the_rest_of_the_prompt(
    host: Host, engine: Engine, producer: Producer
):
    """Last: it is gone then."""
    tokens = prompt(801, 12)
    before = pages(host)

    def sent() -> None:
        with pytest.raises((OSError, urllib.error.URLError)):
            producer.prefill(tokens)

    def kills() -> None:
        while pages(host) < before + 4:
            time.sleep(0.005)
        producer.kill()

    threads = [behind(sent), behind(kills)]
    (answer,) = engine.ask(tokens, extra_args=handed_off(801, 40.0))
    for thread in threads:
        thread.join(30)
    assert told(answer)["handoff"]["waited_s"] < 40.0, (
        "no longer than a quarter of the time after its last page"
    )
    assert sources(answer)["dram"] >= 128
    assert sources(answer)["computed"] > 1
    assert sum(sources(answer).values()) == 801
    hit = engine.ask(tokens)[0]
    assert list(answer.outputs[0].token_ids) == list(hit.outputs[0].token_ids)
    assert host.store is not None
    host.store.audit()


def test_the_role_is_what_it_was_told_to_be(engine: Engine, host: Host):
    """A consumer saves nothing: what it computed is computed again."""
    tokens = prompt(129, 13)
    engine.ask(tokens)
    engine.reset()
    assert sources(engine.ask(tokens)[0]) == {"computed": 129}
