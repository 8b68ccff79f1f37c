"""LMDB in this process: in memory (a file in tmpfs, no sync), or on disk (a commit is durable)."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from driver import Client, Memory, Store, key_of, serve


class Lmdb(Store):
    """LMDB evicts nothing: what exceeds the capacity is deleted here, oldest first, in the transaction that adds."""

    def __init__(self, options: dict[str, Any]) -> None:
        version = f"{lmdb.__version__}, LMDB {lmdb.version()}"
        super().__init__(version=version, durable=options["medium"] == "ssd")
        self._on_disk = options["medium"] == "ssd"
        self._folder = Path(options["folder"] if self._on_disk else "/dev/shm") / f"lmdb-{os.getpid()}"
        self._capacity_bytes: int = options["dram_bytes"] if not self._on_disk else 16 << 30
        self._env: lmdb.Environment | None = None
        self.reads_once = self._on_disk

    def open(self, memory: Memory) -> None:
        """See `Store.open`."""
        self.memory = memory
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self.blocks_max = self._capacity_bytes // memory.size
        self.order: list[int] = []
        self.oldest = 0
        self.lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._env = lmdb.open(
            str(self._folder),
            # What a transaction deletes is free for others once the next ones are done: a batch may be half of it all.
            map_size=4 * self._capacity_bytes,
            sync=self._on_disk,
            metasync=self._on_disk,
            readahead=self._on_disk,
            # The faster way where a crash may lose all: dirty pages are the file itself.
            writemap=not self._on_disk,
        )

    def renew(self) -> None:
        """See `Store.renew`."""
        if not self._on_disk:
            return
        # The page cache is all the memory it has: dropped, or no byte would come from disk.
        assert self._env is not None
        self._env.close()
        handle = os.open(self._folder / "data.mdb", os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
        self._start()

    def client(self) -> Client:
        """See `Store.client`."""
        assert self._env is not None
        return Caller(self, self._env)

    def close(self) -> None:
        """See `Store.close`."""
        if self._env is not None:
            self._env.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Caller:
    """One transaction per call."""

    def __init__(self, owner: Lmdb, env: lmdb.Environment) -> None:
        self._owner = owner
        self._env = env

    def read(self, blocks: range, row: int) -> int:
        """See `Client.read`."""
        moved = 0
        target = self._owner.memory.target
        with self._env.begin(buffers=True) as txn:
            for i, block in enumerate(blocks):
                value = txn.get(key_of(block))
                if value is not None:
                    np.copyto(target[row + i], np.frombuffer(value, dtype=np.uint8))
                    moved += 1
        return moved

    def write(self, blocks: range) -> int:
        """See `Client.write`."""
        owner, source = self._owner, self._owner.memory.source
        # One writer at a time is LMDB's own rule; the lock keeps the order of deletion to it.
        with owner.lock, self._env.begin(write=True) as txn:
            for block in blocks:
                if len(owner.order) - owner.oldest >= owner.blocks_max:
                    txn.delete(key_of(owner.order[owner.oldest]))
                    owner.oldest += 1
                owner.order.append(block)
                with memoryview(source[block % owner.memory.rows]) as row:
                    txn.put(key_of(block), row)
        return len(blocks)


if __name__ == "__main__":
    serve(Lmdb)
