"""LMCache's storage backends, driven directly: LocalCPUBackend, and LocalDiskBackend with O_DIRECT.

A put allocates in its pinned pool (evicting by its own rule), copies and submits; a get copies out of what it returns.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

# A line of its log for each eviction would be measured along.
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"

import numpy as np
import torch
from driver import Client, Memory, Store, key_of, serve
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

STAGING_GIB = 1
DISK_GIB = 16


class LMCache(Store):
    """One backend, and the pinned pool that both of them take their memory from."""

    def __init__(self, options: dict[str, Any]) -> None:
        # What goes to disk is synced by nobody: neither the file nor the folder.
        super().__init__(version=metadata.version("lmcache"))
        self.on_disk: bool = options["medium"] == "ssd"
        self._folder = Path(options["folder"]) / "lmcache"
        self._dram_bytes: int = options["dram_bytes"]
        self.cpu: LocalCPUBackend | None = None
        self.disk: LocalDiskBackend | None = None

    def open(self, memory: Memory) -> None:
        """See `Store.open`."""
        self.memory = memory
        self.shape = torch.Size([2, 1, 16, memory.size // 64])
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        settings: dict[str, Any] = {
            "local_cpu": not self.on_disk,
            "max_local_cpu_size": STAGING_GIB if self.on_disk else self._dram_bytes / 2**30,
        }
        if self.on_disk:
            settings |= {"local_disk": str(self._folder), "max_local_disk_size": DISK_GIB}
            settings |= {"extra_config": {"use_odirect": True, "disk_io_threads": 3}}
        config = LMCacheEngineConfig.from_defaults(**settings)
        shape = (1, 2, 16, 1, memory.size // 64)
        about = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=16)
        self.cpu = LocalCPUBackend(config, about, "cpu")
        if self.on_disk:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True).start()
            self.disk = LocalDiskBackend(config, loop, self.cpu, "cpu", metadata=about)

    def client(self) -> Client:
        """See `Store.client`."""
        return Caller(self)

    def close(self) -> None:
        """See `Store.close`."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Caller:
    """Copies between the caller's memory and the pool's."""

    def __init__(self, owner: LMCache) -> None:
        assert owner.cpu is not None
        self._owner = owner
        self._cpu = owner.cpu
        self._backend = owner.disk or owner.cpu
        self._memory = owner.memory

    def read(self, blocks: range, row: int) -> int:
        """See `Client.read`."""
        keys = list(map(_key, blocks))
        return self._copy_out(self._backend.batched_get_blocking(keys), row)

    def _copy_out(self, found: list[MemoryObj | None], row: int) -> int:
        moved = 0
        for i, entry in enumerate(found):
            if entry is not None:
                np.copyto(self._memory.target[row + i], np.frombuffer(entry.byte_array, dtype=np.uint8))
                entry.ref_count_down()
                moved += 1
        return moved

    def write(self, blocks: range) -> int:
        """See `Client.write`."""
        entries: list[MemoryObj] = []
        for block in blocks:
            entry = self._cpu.allocate(
                self._owner.shape, torch.bfloat16, MemoryFormat.KV_2LTD, busy_loop=False
            )
            if entry is None:
                break
            np.copyto(
                np.frombuffer(entry.byte_array, dtype=np.uint8),
                self._memory.source[block % self._memory.rows],
            )
            entries.append(entry)
        left = threading.Semaphore(0)
        keys = [_key(block) for block in blocks][: len(entries)]
        if self._owner.disk is None:
            self._cpu.batched_submit_put_task(keys, entries)
        else:
            self._owner.disk.batched_submit_put_task(
                keys, entries, on_complete_callback=lambda _: left.release()
            )
            for _ in keys:
                if not left.acquire(timeout=60.0):
                    raise RuntimeError("a put was not done after a minute")
        for entry in entries:
            entry.ref_count_down()
        return len(entries)


def _key(block: int) -> CacheEngineKey:
    return CacheEngineKey("bench", 1, 0, int.from_bytes(key_of(block)[:8], "big"), torch.bfloat16)


if __name__ == "__main__":
    serve(LMCache)
