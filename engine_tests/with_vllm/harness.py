"""vLLM in this process, over a store that this process serves: a test can look into both, and damage either."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workmem.core.events import Event
from workmem.store.arena import ALIGNMENT_BYTES
from workmem.store.catalog import NO_SEGMENT
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.host.server import HostServer
from workmem.store.host.session import HostLimits
from workmem.store.store import Store
from workmem.store.tiers.segments import segment_path
from workmem.testing.faulty_device import FaultPlan, FaultyDevice
from workmem.testing.tiny_models import build_model

WAIT_S = 60.0


class Host:
    """A store and its server, which can be stopped and started."""

    def __init__(self, folder: Path, faults: FaultPlan | None = None) -> None:
        """`faults`: what its disk does wrong."""
        self.folder = folder
        self.socket = folder / "s.sock"
        self._device = None if faults is None else FaultyDevice(faults)
        self.events: list[Event] = []
        self.dram = "256MiB"
        self.store: Store | None = None
        self._server: HostServer | None = None

    def start(self) -> None:
        tier = SsdConfig(path=str(self.folder / "ssd"), bytes="1GiB", scrub_bytes_per_s=0, keep_free=0)
        config = StoreConfig(dram=DramConfig(bytes=self.dram), ssd=tier)
        self.store = Store(config, self.events.append, device=self._device)
        self._server = HostServer(self.store, self.socket, HostLimits(), self.events.append)

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        if self.store is not None:
            self.store.audit()
            self.store.close()
        self.store = self._server = None

    def restart(self) -> None:
        """What is in dram is gone; what is on the ssd is there."""
        self.settle()
        self.stop()
        self.start()

    def settle(self) -> None:
        """All pages given to it are in their last tier."""
        assert self.store is not None
        assert self.store.flush(WAIT_S)

    def damage(self, key: bytes) -> None:
        """Turn a bit of the page that dram holds under `key`."""
        assert self.store is not None
        catalog = self.store.pool.state.catalog
        row = self._row(key)
        frame = None if row is None else catalog.frame[row]
        assert frame is not None, "dram does not hold that block"
        with self.store.arena.writable(frame.offset, frame.size) as memory:
            memory[catalog.space[row].header_bytes + 1000] ^= 1

    def on_disk(self, key: bytes) -> tuple[Path, int]:
        """The file that has the page under `key`, and where it begins in it."""
        assert self.store is not None
        catalog = self.store.pool.state.catalog
        row = self._row(key)
        assert row is not None
        number = catalog.segment[row]
        assert number != NO_SEGMENT, "the ssd does not hold that block"
        (path,) = (self.folder / "ssd").rglob(segment_path(self.folder, number).name)
        return path, catalog.offset[row] * ALIGNMENT_BYTES

    def damage_disk(self, key: bytes) -> None:
        """Turn a bit of the page that the ssd holds under `key`."""
        path, offset = self.on_disk(key)
        with path.open("r+b", buffering=0) as file:
            # Behind its header and the padding, in its first slice.
            file.seek(offset + 2 * ALIGNMENT_BYTES)
            old = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([old[0] ^ 1]))
            os.fsync(file.fileno())

    def holds(self, keys: list[bytes]) -> bool:
        """Whether a tier has each of these blocks, whoever's they are."""
        return all(self._row(key) is not None for key in keys)

    def census(self, name: str) -> float:
        """What the server counts of its clients, under `store_host_` and this name."""
        assert self._server is not None
        return self._server._census()[f"store_host_{name}"]

    def _row(self, key: bytes) -> int | None:
        assert self.store is not None
        catalog = self.store.pool.state.catalog
        for row, frame in enumerate(catalog.frame):
            if catalog.key[row] == key and (frame is not None or catalog.segment[row] != NO_SEGMENT):
                return row
        return None


class Engine:
    """An `LLM` with the connector, and what its two sides know."""

    def __init__(self, host: Host, model: Path, **more: Any) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        # Left by an engine of before in this process.
        ensure_kv_transfer_shutdown()
        self.host = host
        settings = {
            "store.host.socket": str(host.socket),
            "vllm.start_store": "false",
            **more.pop("settings", {}),
        }
        transfer = {
            "kv_connector": "WorkmemConnector",
            "kv_connector_module_path": "workmem.plugins.vllm",
            "kv_role": more.pop("kv_role", "kv_both"),
            "kv_connector_extra_config": settings,
        }
        self.llm = LLM(
            **{
                "model": str(model),
                "max_model_len": 2048,
                "dtype": "bfloat16",
                "enforce_eager": True,
                "block_size": 32,
                "num_gpu_blocks_override": 256,
                "kv_transfer_config": transfer,
                "enable_prefix_caching": True,
                "prefix_caching_hash_algo": "sha256_cbor",
                **more,
            }
        )
        self.core = self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def ask(self, *prompts: list[int], n: int = 8, salt: str | None = None, **more: Any) -> list[Any]:
        """Greedy answers, as vLLM gives them."""
        from vllm import SamplingParams

        inputs = [{"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for ids in prompts]
        return self.llm.generate(
            inputs, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more), use_tqdm=False
        )

    def tokens(self, prompt: list[int], **more: Any) -> list[int]:
        return list(self.ask(prompt, **more)[0].outputs[0].token_ids)

    def reset(self) -> None:
        """Forget the local prefix cache; pages being saved first reach the store."""
        self.saved()
        assert self.llm.reset_prefix_cache()

    def saved(self) -> None:
        until = time.monotonic() + WAIT_S
        while len(self.worker._worker._pending) and time.monotonic() < until:
            time.sleep(0.01)
        self.host.settle()


def until(holds: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    """Return once `holds`; fail with `what` where that takes too long."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def wait_until_attached(engine: Engine) -> None:
    """Clients come back to a store that was started anew by themselves; each side has one."""
    until = time.monotonic() + WAIT_S
    while not (engine.connector._store.is_attached and engine.worker._store.is_attached):
        assert time.monotonic() < until, "never attached again"
        time.sleep(0.05)


def sources(answer: Any) -> dict[str, int]:
    """Prompt tokens by where they came from."""
    return answer.kv_transfer_params["workmem"]["tokens"]


def series(engine: Engine, name: str) -> dict[str, float]:
    """Of one of our metrics: value of its label to what it is at. Needs `disable_log_stats=False`."""
    own = {"model_name", "engine"}
    return {
        "".join(value for label, value in metric.labels.items() if label not in own): metric.value
        for metric in engine.llm.get_metrics()
        if metric.name == f"vllm:workmem_{name}"
    }


def tiny_model(folder: Path, seed: int = 0) -> Path:
    """Weights drawn by chance, for the prompts that are made here. Its heads divide by two, and are of a size that vLLM takes."""
    return build_model(
        folder,
        seed=seed,
        hidden_size=128,
        intermediate_size=128,
        max_position_embeddings=2048,
        vocab_size=40960,
    )


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40000) for _ in range(length)]
