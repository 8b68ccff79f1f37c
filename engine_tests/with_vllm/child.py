"""A process with an engine, for test_processes: `child.py FOLDER MODEL LINES`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING")
from harness import Engine, Host, prompt, sources


class Served(Host):
    """A store in a process of its own, which the connector starts."""

    def settle(self) -> None:
        assert made.worker._store.flush(60)


folder, model, lines = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
host = Served(folder)
made = Engine(
    host,
    model,
    max_num_batched_tokens=256,
    settings={
        "vllm.start_store": "true",
        "store.dram.bytes": "256MiB",
        "store.ssd.path": str(folder / "ssd"),
        "store.ssd.keep_free": "0",
        "vllm.start_s": "120",
    },
)


def ask(length: int, seed: int) -> None:
    (answer,) = made.ask(prompt(length, seed))
    said = {"tokens": sources(answer), "ids": list(answer.outputs[0].token_ids)}
    print("answer", json.dumps(said), flush=True)


def saved() -> None:
    made.saved()


def audit() -> None:
    made.worker._store.audit()


def slow_saves() -> None:
    blocks = made.worker._worker._blocks
    copy = blocks.copy_out

    def late(block: int, into: memoryview) -> tuple[int, ...]:
        time.sleep(0.3)
        return copy(block, into)

    blocks.copy_out = late


exec(lines)
made.llm.llm_engine.engine_core.shutdown()
