"""A store in a process of its own, killed and stopped in the middle: under the connector and under vLLM's own offload."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import WAIT_S, Engine, Host, prompt, sources

from workmem.store.host.client import HostStore
from workmem.store.host.place import is_served

LENGTH = 257
CHUNK = 64
STANDS_STILL_S = 25.0
"""More than any request waits for a store that does not answer, however busy the machine; less than `vllm.load_s`."""


class Apart(Host):
    """A store served by another process."""

    process: subprocess.Popen[bytes]

    def start(self) -> None:
        said = {
            "store.host.socket": self.socket,
            "store.dram.bytes": "256MiB",
            "store.ssd.path": self.folder / "ssd",
            "store.ssd.bytes": "1GiB",
            "store.ssd.keep_free": "0",
        }
        sets = [word for path, value in said.items() for word in ("--set", f"{path}={value}")]
        self.process = subprocess.Popen([sys.executable, "-m", "workmem", "store", "serve", *sets])
        until = time.monotonic() + WAIT_S
        while not is_served(self.socket):
            assert time.monotonic() < until, "the store does not start"
            time.sleep(0.1)

    def end(self, how: int) -> None:
        self.process.send_signal(how)
        self.process.wait(WAIT_S)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.end(signal.SIGTERM)

    def settle(self) -> None:
        with HostStore(self.socket) as client:
            assert client.flush(WAIT_S)


class Both(Engine):
    """Ours first; behind it vLLM's tiered offload, with the same store below it."""

    def __init__(self, host: Apart, model: Path) -> None:
        store = {"store.host.socket": str(host.socket), "vllm.start_store": "false"}
        ours = {
            "kv_connector": "WorkmemConnector",
            "kv_connector_module_path": "workmem.plugins.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": store,
        }
        theirs = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 512 * 2**20,
                "blocks_per_chunk": 2,
                "spec_name": "WorkmemCpuSpec",
                "spec_module_path": "workmem.plugins.vllm_offload",
                "secondary_tiers": [
                    {"type": "WorkmemTier", "module_path": "workmem.plugins.vllm_offload", **store}
                ],
            },
        }
        super().__init__(
            host,
            model,
            # So that tokens are equal whatever the split.
            dtype="float32",
            max_num_batched_tokens=256,
            num_gpu_blocks_override=64,
            max_model_len=1024,
            # Without a word on failed loads, which vLLM takes for `fail`.
            kv_transfer_config={
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [ours, theirs]},
            },
        )

    @property
    def ours(self) -> Any:
        return self.connector._connectors[0]

    @property
    def side(self) -> Any:
        return self.worker._connectors[0]._worker

    @property
    def tier(self) -> Any:
        return self.connector._connectors[1].connector_scheduler.manager.secondary_tiers[0]

    def saved(self) -> None:
        until = time.monotonic() + WAIT_S
        while len(self.side._pending) or self.connector.has_pending_push_work():
            assert time.monotonic() < until, "never saved"
            self.llm.llm_engine.step()
            time.sleep(0.005)
        self.host.settle()

    def forget(self) -> None:
        """Only the store has anything."""
        self.reset()
        self.connector._connectors[1].connector_scheduler.manager.primary_tier.reset_cache()

    def attached(self) -> None:
        until = time.monotonic() + WAIT_S
        stores = (self.ours._store, self.worker._connectors[0]._store, self.tier._store)
        while not all(store.is_attached for store in stores):
            assert time.monotonic() < until, "never attached again"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    made = Apart(tmp_path_factory.mktemp("s"))
    made.socket.parent.chmod(0o700)
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def engine(host: Apart, smollm2: Path) -> Iterator[Both]:
    made = Both(host, smollm2)
    yield made
    made.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(autouse=True)
def all_is_well(engine: Both) -> Iterator[None]:
    yield
    assert engine.ours._guard.off == ""
    assert engine.worker._connectors[0]._guard.off == ""
    assert engine.tier._guard.off == ""
    assert not engine.ours._scheduler._requests
    assert len(engine.tier._jobs) == 0


def first_time(patch: pytest.MonkeyPatch, target: object, name: str, what: Callable[[], object]) -> None:
    """Do `what` when `target.name` is called first."""
    real, done = getattr(target, name), threading.Event()

    def called(*args: Any, **kwargs: Any) -> Any:
        if not done.is_set():
            done.set()
            what()
        return real(*args, **kwargs)

    patch.setattr(target, name, called)


def one_loads(engine: Both, way: str, patch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """Who of the two loads: what copies its pages, and how many tokens it brings of a prompt."""
    if way == "connector":
        return engine.side, LENGTH - 1
    patch.setattr(engine.ours._scheduler, "_may_load", False)
    return engine.tier._side, LENGTH // CHUNK * CHUNK


@pytest.mark.parametrize("way", ["connector", "offload"])
@pytest.mark.parametrize("moment", ["before the lease", "between lease and copy"])
def test_a_store_killed_in_the_middle_of_a_load(engine: Both, way: str, moment: str, monkeypatch):
    ids = prompt(LENGTH, 10 + len(way) + len(moment))
    wanted = engine.tokens(ids)
    engine.forget()
    with monkeypatch.context() as patch:
        loader, _ = one_loads(engine, way, patch)
        at = (
            (loader._store, "lease")
            if moment == "before the lease"
            else (getattr(loader, "_loading", loader), "_copied")
        )
        first_time(patch, *at, lambda: engine.host.end(signal.SIGKILL))
        assert engine.tokens(ids) == wanted
    assert engine.host.process.poll() is not None, "nothing was loaded"
    # Without a store all is computed; with its successor what was on the ssd is there.
    other = prompt(LENGTH, 99)
    assert len(engine.tokens(other)) == 8
    engine.host.start()
    engine.attached()
    time.sleep(2.1)
    engine.forget()
    with monkeypatch.context() as patch:
        _, brought = one_loads(engine, way, patch)
        (again,) = engine.ask(ids)
    assert list(again.outputs[0].token_ids) == wanted
    assert again.num_cached_tokens >= brought - CHUNK
    found = sources(again)
    assert sum(found.values()) == LENGTH
    assert ("peer" in found) == (way == "offload")


@pytest.mark.parametrize("way", ["connector", "offload"])
def test_a_store_that_stands_still_in_the_middle_of_a_load(engine: Both, way: str, monkeypatch):
    """Nobody hangs up, nothing is answered: as a machine that swaps, or a process under a debugger."""
    ids = prompt(LENGTH, 30 + len(way))
    began = time.monotonic()
    wanted = engine.tokens(ids)
    computed_s = time.monotonic() - began
    engine.forget()
    began = time.monotonic()
    with monkeypatch.context() as patch:
        loader, brought = one_loads(engine, way, patch)
        first_time(patch, loader._store, "lease", lambda: os.kill(engine.host.process.pid, signal.SIGSTOP))
        assert engine.tokens(ids) == wanted
        assert time.monotonic() - began < computed_s + STANDS_STILL_S
        # Who comes next does not wait for it at all, but for who asks first.
        assert len(engine.tokens(prompt(LENGTH, 98))) == 8
        os.kill(engine.host.process.pid, signal.SIGCONT)
        engine.attached()
        time.sleep(2.1)
        engine.forget()
        (again,) = engine.ask(ids)
    assert list(again.outputs[0].token_ids) == wanted
    assert again.num_cached_tokens >= brought - CHUNK


def test_an_abort_while_its_blocks_are_being_saved(engine: Both, monkeypatch):
    """Others get its blocks: what is saved under its name must be its own all the same."""
    from vllm import SamplingParams

    ids, pending = prompt(LENGTH, 40), engine.side._pending
    wanted = engine.tokens(ids)
    engine.forget()
    engine.ours._scheduler.start_epoch(1, is_empty=True)
    copy, waits = engine.side._blocks.copy_out, pending.waits

    def held(block: int, into: memoryview) -> tuple[int, ...]:
        until = time.monotonic() + WAIT_S
        # Until the engine wants a block of it back.
        while pending.waits == waits and time.monotonic() < until:
            time.sleep(0.01)
        return copy(block, into)

    llm = engine.llm.llm_engine
    with monkeypatch.context() as patch:
        patch.setattr(engine.side._blocks, "copy_out", held)
        llm.add_request("x", {"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=20))
        while not len(pending):
            llm.step()
        llm.abort_request(["x"])
        # All but those that it had are in use: who comes next gets them.
        pool = engine.core.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - 8)
        engine.ask(prompt(200, 50), n=1)
        pool.free_blocks(taken)
    assert pending.waits > waits
    engine.forget()
    (again,) = engine.ask(ids)
    assert list(again.outputs[0].token_ids) == wanted
    assert sources(again)["dram"] >= 224


def test_pins_hold_and_give_way_beside_another_connector(engine: Both):
    """A `MultiConnector` hands the pool to both."""
    ids = prompt(200, 60)
    pin = {"action_id": "a", "action_type": "Pin", "payload": {"ttl_s": 3000}}
    said = {"kv_transfer_params": {"workmem": {"session_id": "s", "actions": [pin]}}}
    (first,) = engine.ask(ids, n=2, extra_args=said)
    assert first.kv_transfer_params["workmem"]["hints"] == [{"id": "a", "outcome": "accepted"}]
    pins = engine.ours._scheduler.levers.pins
    assert pins.held == 6
    for seed in range(61, 64):
        engine.ask(prompt(980, seed), n=1)
    (again,) = engine.ask(ids, n=2)
    assert sources(again)["vram"] == 192
    # Two that want nearly all of the pool have their turn.
    answers = engine.ask(prompt(980, 70), prompt(980, 71), n=2)
    assert all(len(answer.outputs[0].token_ids) == 2 for answer in answers)
    assert pins.held == 0
    engine.ask(ids, n=2, extra_args=said)
    assert pins.held == 6
    assert engine.llm.reset_prefix_cache()
    assert pins.held == 0
