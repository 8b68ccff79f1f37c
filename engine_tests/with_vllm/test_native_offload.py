"""VLLM's own tiered offload with our tier, our order and, on a CPU, our spec: configured as the guide says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Engine, Host, prompt

GUIDE = Path(__file__).parents[2] / "docs/guides/vllm-native.md"
MODULE = "workmem.plugins.vllm_offload"
BLOCK = 32
CHUNK = 2 * BLOCK
CHUNK_BYTES = CHUNK * 2 * 30 * 3 * 64 * 4
CHUNKS = 24
"""Host memory that vLLM has, in chunks: less than the longest prompt, and than a few short ones."""
WAIT_S = 60.0


def transfer(host: Host) -> dict[str, Any]:
    """The guide's configuration, for a store that is served here and little host memory."""
    (text,) = re.findall(r"```json\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    config = json.loads(text)
    extra = config["kv_connector_extra_config"]
    extra["cpu_bytes_to_use"] = CHUNKS * CHUNK_BYTES
    extra["secondary_tiers"][0] |= {"store.host.socket": str(host.socket), "vllm.start_store": "false"}
    return config


class NativeEngine(Engine):
    """An `LLM` with vLLM's own connector."""

    def __init__(self, host: Host, model: Path) -> None:
        super().__init__(
            host,
            model,
            # A chunk that is computed again in other steps is rounded otherwise in bf16.
            dtype="float32",
            kv_transfer_config=transfer(host),
            max_num_batched_tokens=256,
            num_gpu_blocks_override=128,
        )

    @property
    def offload(self) -> Any:
        return self.connector.connector_scheduler.manager

    @property
    def tier(self) -> Any:
        return self.offload.secondary_tiers[0]

    @property
    def policy(self) -> Any:
        return self.offload.primary_tier._policy

    @property
    def counts(self) -> Any:
        return self.tier._side.counts

    def saved(self) -> None:
        until = time.monotonic() + WAIT_S
        while self.connector.has_pending_push_work() and time.monotonic() < until:
            self.llm.llm_engine.step()
            time.sleep(0.005)
        assert not self.connector.has_pending_push_work()
        if self.host.store is not None:
            self.host.settle()

    def forget(self) -> None:
        """Neither the device nor host memory has anything any more; the tier has."""
        self.reset()
        self.offload.primary_tier.reset_cache()

    def cached(self, ids: list[int], **more: Any) -> tuple[list[int], int]:
        """Tokens, and how many of the prompt were not computed."""
        (answer,) = self.ask(ids, **more)
        return list(answer.outputs[0].token_ids), answer.num_cached_tokens

    def after_own_hit(self, ids: list[int], shared: int) -> list[int]:
        """The reference: tokens when the first `shared` tokens are a hit in vLLM's own prefix cache."""
        self.forget()
        self.offload.secondary_tiers, tiers = [], self.offload.secondary_tiers
        try:
            self.ask(ids[: shared + 1], n=1)
            tokens, hit = self.cached(ids)
        finally:
            self.offload.secondary_tiers = tiers
        assert hit == shared
        return tokens


@pytest.fixture(scope="module")
def stored(host: Host, smollm2: Path) -> dict[str, list[int]]:
    """What another process computed and stored before the engine here began."""
    done = subprocess.run(
        [sys.executable, __file__, str(smollm2), str(host.folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def engine(host: Host, smollm2: Path, stored: dict[str, list[int]]) -> Iterator[NativeEngine]:
    made = NativeEngine(host, smollm2)
    assert made.tier._guard.off == ""
    yield made
    made.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(autouse=True)
def all_is_well(engine: NativeEngine) -> Iterator[None]:
    engine.forget()
    yield
    assert engine.tier._guard.off == ""
    assert engine.policy._chunks.off == ""


LENGTHS = (257, 300, 256)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_fresh_process_hits_what_another_one_stored(engine: NativeEngine, stored, length: int):
    ids = prompt(length, length)
    before = engine.counts["chunks_loaded"]
    tokens, hit = engine.cached(ids)
    assert hit == length // CHUNK * CHUNK
    assert engine.counts["chunks_loaded"] - before == length // CHUNK
    if length % CHUNK:
        # By now all of it is a hit of vLLM's own, of the same split, as it was in the other process.
        assert tokens == engine.cached(ids)[0] == stored[str(length)]


@pytest.mark.parametrize("length", [257, 300, 63])
def test_what_comes_back_is_what_vllm_would_have_had_itself(engine: NativeEngine, length: int):
    ids = prompt(length, 500 + length)
    engine.ask(ids)
    shared = length // CHUNK * CHUNK
    wanted = engine.after_own_hit(ids, shared)
    engine.forget()
    assert engine.cached(ids) == (wanted, shared)


def test_from_ssd_after_a_restart_of_the_store(engine: NativeEngine):
    ids = prompt(257, 1)
    engine.ask(ids)
    wanted = engine.after_own_hit(ids, 256)
    engine.forget()
    engine.host.restart()
    attached(engine)
    assert engine.cached(ids) == (wanted, 256)


def test_a_dead_store_is_a_miss_and_one_that_is_back_is_used(engine: NativeEngine):
    ids = prompt(257, 2)
    wanted, _ = engine.cached(ids)
    engine.forget()
    engine.host.stop()
    assert engine.cached(ids) == (wanted, 0)
    engine.forget()
    assert engine.cached(ids) == (wanted, 0)
    engine.host.start()
    attached(engine)
    engine.forget()
    assert engine.cached(ids)[1] == 256


def test_a_damaged_chunk_is_computed(engine: NativeEngine):
    ids = prompt(300, 3)
    engine.ask(ids)
    wanted = engine.after_own_hit(ids, 2 * CHUNK)
    engine.forget()
    hashes: list[bytes] = []
    watch = engine.connector.connector_scheduler.on_new_request

    def seen(request: Any) -> None:
        hashes.extend(request.block_hashes)
        watch(request)

    engine.connector.connector_scheduler.on_new_request = seen
    engine.ask(ids, n=1)
    engine.connector.connector_scheduler.on_new_request = watch
    engine.forget()
    engine.host.damage(hashes[3 * 2 - 1])
    corrupt = engine.counts["corrupt"]
    assert engine.cached(ids) == (wanted, 2 * CHUNK)
    assert engine.counts["corrupt"] == corrupt + 1


def test_salts_never_meet(engine: NativeEngine):
    ids = prompt(257, 4)
    engine.ask(ids, salt="a")
    engine.forget()
    assert engine.cached(ids, salt="b")[1] == 0
    engine.forget()
    assert engine.cached(ids)[1] == 0
    engine.forget()
    assert engine.cached(ids, salt="a")[1] == 256


def test_nothing_of_before_a_reset_is_a_hit(engine: NativeEngine):
    ids = prompt(257, 5)
    engine.ask(ids)
    engine.saved()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert engine.cached(ids)[1] == 0
    engine.forget()
    assert engine.cached(ids)[1] == 256


def test_a_prompt_longer_than_host_memory_is_answered(engine: NativeEngine):
    length = (CHUNKS + 4) * CHUNK + 1
    ids = prompt(length, 6)
    wanted, _ = engine.cached(ids, n=2)
    engine.forget()
    tokens, hit = engine.cached(ids, n=2)
    assert len(tokens) == len(wanted)
    # As much as it may fill, or less where what was stored of it had to make room meanwhile.
    assert 0 < hit <= CHUNKS * 3 // 4 * CHUNK


def test_requests_together_get_their_own(engine: NativeEngine):
    prompts = [prompt(200 + 20 * n, 40 + n) for n in range(4)]
    for ids in prompts:
        engine.ask(ids)
    engine.forget()
    answers = engine.ask(*prompts)
    assert [answer.num_cached_tokens for answer in answers] == [len(ids) // CHUNK * CHUNK for ids in prompts]


def test_our_order_keeps_what_is_used_again_through_a_scan(engine: NativeEngine):
    agent = prompt(4 * CHUNK + 1, 7)
    for _ in range(3):
        engine.ask(agent, n=1)
        engine.reset()
    assert len(engine.policy._chunks) == 4
    for seed in range(12):
        engine.ask(prompt(2 * CHUNK + 1, 70 + seed), n=1)
    engine.reset()
    assert len(engine.policy._chunks) == CHUNKS
    before = engine.counts["chunks_loaded"]
    assert engine.cached(agent, n=1)[1] == 4 * CHUNK
    # From host memory, where the scan has left them.
    assert engine.counts["chunks_loaded"] == before


def test_a_bug_of_ours_ends_every_job_and_vllm_goes_on(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch):
    ids = prompt(257, 8)
    computed, _ = engine.cached(ids)
    loaded = engine.after_own_hit(ids, 256)
    for hook in ("has", "load", "store", "heard", "forget"):
        engine.forget()

        def broken(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(engine.tier._side, hook, broken)
        assert engine.cached(ids)[0] in (computed, loaded)
        engine.ask([*ids, *prompt(300, 9)], n=1)
        engine.saved()
        assert engine.tier._guard.off == "ZeroDivisionError: ", hook
        assert len(engine.tier._jobs) == 0
        monkeypatch.undo()
        engine.tier._guard.off = ""


def test_a_tier_that_never_began_answers_every_job(engine: NativeEngine):
    """Where it is not told enough of the model: here its configuration is not to be found."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    made = type(engine.tier)(engine.tier._offloading_spec, engine.tier._primary_kv_view, "WorkmemTier")
    assert "was not found" in made._guard.off
    context = ReqContext(req_id="r")
    name = bytes(36)
    assert made.lookup(name, context) is LookupResult.MISS
    for number, is_load in enumerate((True, False)):
        job = TransferJob(number, [name], np.array([0]), is_load, context)
        (made.submit_load if is_load else made.submit_store)(job)
    assert [(end.job_id, end.success) for end in made.get_finished_jobs()] == [(0, False), (1, False)]
    made.drain_jobs()
    made.shutdown()


def attached(engine: NativeEngine) -> None:
    until = time.monotonic() + 20
    while not engine.tier._store.is_attached and time.monotonic() < until:
        time.sleep(0.05)


def main() -> None:
    """The other process: computes, stores, says what its own prefix hit gives, and ends."""
    host = Host(Path(sys.argv[2]))
    engine = NativeEngine(host, Path(sys.argv[1]))
    said: dict[int, list[int]] = {}
    for length in LENGTHS:
        ids = prompt(length, length)
        engine.ask(ids)
        said[length] = engine.cached(ids)[0]
    engine.saved()
    engine.llm.llm_engine.engine_core.shutdown()
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
