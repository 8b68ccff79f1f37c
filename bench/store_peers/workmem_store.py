"""workmem: dram of this process, dram that another process serves, or an ssd tier read past an empty dram."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import driver
import numpy as np
from driver import BATCH, Client, Memory, key_of, serve

import workmem
from workmem.config import cache_dir
from workmem.core.keys import BlockKey
from workmem.core.layout import KVLayout, Namespace
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.contract import BlockId, KVStore, Lease, PageWrite, SaveState
from workmem.store.copying import PageCopy, native_copy, use_native_copy
from workmem.store.store import Store

LAYOUTS = {
    64 << 10: KVLayout(dtype="bf16", layers=8, kv_heads=1, head_dim=128),
    360 << 10: KVLayout(dtype="bf16", layers=30, kv_heads=3, head_dim=64),
    2 << 20: KVLayout(dtype="bf16", layers=32, kv_heads=8, head_dim=128),
    8 << 20: KVLayout(dtype="bf16", layers=64, kv_heads=16, head_dim=128),
}
"""Models whose page has that many bytes; 360 KiB is SmolLM2-135M, 2 MiB an 8B model."""
TTL_S = 60.0
WINDOW = 8
"""Blocks of a batch that are waited for together while they come from disk."""
RAW_BYTES = 256 << 20
RAW_REQUEST_BYTES = 2 << 20


class Workmem(driver.Store):
    """`medium` is what is measured: dram, or ssd. With `host` the arena is another process's."""

    def __init__(self, options: dict[str, Any]) -> None:
        use_native_copy(cache_dir())
        super().__init__(
            version=workmem.__version__,
            checks="get: xxh3-64 of each slice of the copy; put: the sums are made"
            + ("" if native_copy() else "; without a C compiler"),
            durable=options["medium"] == "ssd",
        )
        self._medium: str = options["medium"]
        self._folder = Path(options["folder"]) / "workmem"
        self._dram_bytes: int = options["dram_bytes"]
        self._arena = Path("/dev/shm") / f"workmem-bench-{os.getpid()}"
        self._raw: RawFile | None = None
        self._host: bool = options.get("host", False)
        self._ending = contextlib.ExitStack()
        self._store: KVStore | None = None
        self.reads_once = self._medium == "ssd"

    def open(self, memory: Memory) -> None:
        """See `Store.open`."""
        self._memory = memory
        self._layout = LAYOUTS[memory.size]
        assert self._layout.page_bytes == memory.size
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._medium == "ssd":
            # A file in memory keeps its pages while the store is closed and opened again: what is measured is
            # the disk, not a kernel that clears two gigabytes.
            with self._arena.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._dram_bytes)
        self._start()
        if self._medium == "ssd":
            self._raw = RawFile(self._folder.with_name("raw"), memory)

    def _start(self) -> None:
        self._store = self._attach() if self._host else self._own()
        self._root = self._store.register(Namespace(model_fingerprint="bench", layout=self._layout))

    def _attach(self) -> KVStore:
        from host_server import hosted  # noqa: PLC0415

        from workmem.store.host.client import HostStore  # noqa: PLC0415

        self._folder.mkdir(mode=0o700, exist_ok=True)
        place = self._folder / "socket"
        self.pids = [self._ending.enter_context(hosted(place, self._dram_bytes))]
        return HostStore(place)

    def _own(self) -> KVStore:
        ssd = SsdConfig(enabled=self._medium == "ssd", path=str(self._folder), bytes="64GiB")
        path = str(self._arena) if self._medium == "ssd" else ""
        return Store(StoreConfig(dram=DramConfig(bytes=self._dram_bytes, path=path), ssd=ssd))

    def renew(self) -> None:
        """See `Store.renew`."""
        if self._medium == "ssd":
            # Only the journal is read: dram is empty afterwards.
            assert self._store is not None
            self._store.close()
            self._start()

    def client(self) -> Client:
        """See `Store.client`."""
        assert self._store is not None
        return Caller(
            self._store, self._root, self._layout, self._memory, waits_for_disk=self._medium == "ssd"
        )

    def baselines(self, op: str, clients: int) -> dict[str, Callable[[int], Callable[[], int]]]:
        """See `Store.baselines`."""
        if self._raw is None or op == "mixed":
            return {}
        return self._raw.baselines(op, clients)

    def close(self) -> None:
        """See `Store.close`."""
        if self._store is not None:
            self._store.close()
        self._ending.close()
        self._arena.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.with_name("raw").unlink(missing_ok=True)


class Caller:
    """Leases, copies, checks, releases; saves, and waits until told."""

    def __init__(
        self, store: KVStore, root: bytes, layout: KVLayout, memory: Memory, *, waits_for_disk: bool
    ) -> None:
        self._store = store
        self._root = root
        self._memory = memory
        self._waits_for_disk = waits_for_disk
        self._copy = PageCopy(layout)
        self._tokens = tuple(range(layout.block_tokens))
        self._told: queue.SimpleQueue[SaveState] = queue.SimpleQueue()

    def read(self, blocks: range, row: int) -> int:
        """See `Client.read`."""
        keys = [BlockKey(key_of(block)) for block in blocks]
        # From disk in windows, so that one is copied while the next ones are read.
        window = WINDOW if self._waits_for_disk else BATCH
        leases = [
            self._store.lease(self._root, keys[at : at + window], owner="bench", ttl_s=TTL_S)
            for at in range(0, len(keys), window)
        ]
        return sum(self._copy_all(lease, row + i * window) for i, lease in enumerate(leases))

    def _copy_all(self, lease: Lease, row: int) -> int:
        try:
            if lease.ready < len(lease.keys):
                settled = threading.Event()
                lease.on_settled(settled.set)
                settled.wait()
            ready = lease.ready
            for i in range(ready):
                self._copy.read(lease, i, self._memory.target[row + i])
            return ready
        finally:
            lease.release()

    def write(self, blocks: range) -> int:
        """See `Client.write`."""
        pages, parent = [], self._root
        memory, tokens = self._memory, self._tokens
        for depth, number in enumerate(blocks):
            block = BlockId(BlockKey(key_of(number)), parent, tokens, depth)
            pages.append((block, memory.source[number % memory.rows]))
            parent = block.key
        states = self._stored(pages)
        if self._waits_for_disk and not self._store.flush(60.0):
            raise RuntimeError("not on the ssd after a minute")
        return states.count(SaveState.STORED)

    def _stored(self, pages: list[tuple[BlockId, np.ndarray]]) -> list[SaveState]:
        if isinstance(self._store, Store):
            return self._store.put(self._root, pages)
        # Another process's store takes pages behind the caller, and says when they are there.
        self._store.save(
            self._root, [PageWrite(block, _filling(row), self._told.put) for block, row in pages]
        )
        return [self._told.get() for _ in pages]


def _filling(row: np.ndarray) -> Callable[[memoryview], None]:
    def fill(page: memoryview) -> None:
        np.copyto(np.frombuffer(page, dtype=np.uint8), row)

    return fill


class RawFile:
    """The same disk without a store: O_DIRECT, requests of up to 2 MiB, fdatasync where a put is durable."""

    def __init__(self, path: Path, memory: Memory) -> None:
        self._memory = memory
        self._request = min(memory.size, RAW_REQUEST_BYTES)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        # Not sparse and not zero: holes cost no reading.
        for at in range(0, RAW_BYTES, 16 << 20):
            with mmap.mmap(-1, 16 << 20) as area:
                area.write(os.urandom(1 << 20) * 16)
                os.pwrite(self._handle, area, at)
        os.fsync(self._handle)

    def baselines(self, op: str, clients: int) -> dict[str, Callable[[int], Callable[[], int]]]:
        """See `Store.baselines`."""
        move = self._writing if op.startswith("put") else self._reading
        blocks = BATCH if op.endswith("64") else 1
        found = {"raw": lambda number: move(number, clients, blocks, 1)}
        if blocks * self._memory.size > self._request:
            # As many at a time as the store has readers; the faster of the two is what the disk can do.
            found["raw_3_at_once"] = lambda number: move(number, clients, blocks, 3)
        return found

    def _requests(self, number: int, clients: int, blocks: int) -> Callable[[], list[int]]:
        span = max(1, blocks * self._memory.size // self._request)
        total = RAW_BYTES // self._request
        turn = number

        def some() -> list[int]:
            nonlocal turn
            first, turn = turn * span, turn + clients
            return [(first + i) % total * self._request for i in range(span)]

        return some

    def _reading(self, number: int, clients: int, blocks: int, workers: int) -> Callable[[], int]:
        return self._moving(os.preadv, self._requests(number, clients, blocks), workers)

    def _writing(self, number: int, clients: int, blocks: int, workers: int) -> Callable[[], int]:
        write = self._moving(os.pwritev, self._requests(number, clients, blocks), workers)

        def move() -> int:
            size = write()
            os.fdatasync(self._handle)
            return size

        return move

    def _moving(
        self, call: Callable[..., int], requests: Callable[[], list[int]], workers: int
    ) -> Callable[[], int]:
        """Move some requests, `workers` at a time."""
        areas: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(workers):
            area = mmap.mmap(-1, self._request)
            area.write(os.urandom(self._request))
            areas.put(area)
        pool = ThreadPoolExecutor(workers)

        def one(offset: int) -> int:
            area = areas.get()
            size = call(self._handle, [area], offset)
            areas.put(area)
            return size

        if workers == 1:
            return lambda: sum(one(offset) for offset in requests())
        return lambda: sum(pool.map(one, requests()))


if __name__ == "__main__":
    serve(Workmem)
