"""Mooncake Store: the caller's own segment (`local`), or one in another process over TCP (`tcp`)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from driver import Client, Memory, Store, key_of, serve

NO_ROOM = -200
RETRIES_MAX = 200
LOCAL_BUFFER_BYTES = 640 << 20


class Mooncake(Store):
    """Master, where wanted a second process that owns the segment, and a client in this one."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(version=metadata.version("mooncake-transfer-engine-non-cuda"))
        self._log = Path(options["folder"]) / "mooncake.log"
        self._children: list[subprocess.Popen[bytes]] = []
        port, metrics = _free_port(), _free_port()
        # Early eviction: with the default watermark a burst of puts fails (-200) while the evictor wakes up.
        flags = {
            "rpc_port": port,
            "rpc_address": "127.0.0.1",
            "metrics_port": metrics,
            "metrics_host": "127.0.0.1",
            "logtostderr": "true",
            "eviction_high_watermark_ratio": "0.7",
            "eviction_ratio": "0.25",
            "default_kv_lease_ttl": "5000",
        }
        binary = Path(sys.prefix) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "mooncake"
        self._run([str(binary / "mooncake_master"), *(f"--{k}={v}" for k, v in flags.items())])
        _wait_for(port)
        self._master = f"127.0.0.1:{port}"
        segment = options["dram_bytes"]
        if options["path"] == "tcp":
            self._run([sys.executable, __file__, "segment", self._master, str(segment)], wait_for=b"ready")
        self.store = _connect(self._master, segment if options["path"] == "local" else 0)
        self.pids = [child.pid for child in self._children]
        self.about["retried_puts"] = 0

    def _run(self, command: list[str], wait_for: bytes = b"") -> None:
        with self._log.open("ab") as log:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if wait_for else log, stderr=log
            )
        self._children.append(child)
        if wait_for:
            assert child.stdout is not None
            if wait_for not in child.stdout.readline():
                raise RuntimeError(f"the segment's process ended, see {self._log}")

    def open(self, memory: Memory) -> None:
        """See `Store.open`."""
        self.memory = memory
        for ring in (memory.source, memory.target):
            if self.store.register_buffer(ring.ctypes.data, ring.nbytes) != 0:
                raise RuntimeError("register_buffer refused the caller's memory")

    def client(self) -> Client:
        """See `Store.client`."""
        return Caller(self)

    def close(self) -> None:
        """See `Store.close`."""
        self.store.close()
        for child in reversed(self._children):
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            child.kill()
        self._log.unlink(missing_ok=True)


class Caller:
    """Reads into and writes from registered memory, without a copy of its own."""

    def __init__(self, owner: Mooncake) -> None:
        self._owner = owner
        self._store = owner.store
        self._size = owner.memory.size
        self._from = owner.memory.source.ctypes.data
        self._into = owner.memory.target.ctypes.data

    def read(self, blocks: range, row: int) -> int:
        """See `Client.read`."""
        if len(blocks) == 1:
            place = self._into + row * self._size
            return int(self._store.get_into(_name(blocks[0]), place, self._size) == self._size)
        places = [self._into + (row + i) * self._size for i in range(len(blocks))]
        sizes = self._store.batch_get_into(list(map(_name, blocks)), places, [self._size] * len(blocks))
        return sum(size == self._size for size in sizes)

    def write(self, blocks: range) -> int:
        """See `Client.write`."""
        left = list(blocks)
        for _ in range(RETRIES_MAX):
            places = [self._from + block % self._owner.memory.rows * self._size for block in left]
            if len(left) == 1:
                codes = [self._store.put_from(_name(left[0]), places[0], self._size)]
            else:
                codes = self._store.batch_put_from(list(map(_name, left)), places, [self._size] * len(left))
            left = [block for block, code in zip(left, codes, strict=True) if code == NO_ROOM]
            if not left:
                break
            self._owner.about["retried_puts"] += len(left)
            time.sleep(0.001)
        return len(blocks) - len(left)


def _name(block: int) -> str:
    return key_of(block).hex()


def _connect(master: str, segment_bytes: int) -> Any:
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - the first line of this is not for stdout

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
    if code != 0:
        raise RuntimeError(f"setup answered {code}")
    return store


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port: int) -> None:
    until = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            return


def _own_segment(master: str, segment_bytes: int) -> None:
    """The other process: holds the segment until its stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    store = _connect(master, segment_bytes)
    answers.write("ready\n")
    answers.flush()
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    if sys.argv[1] == "segment":
        _own_segment(sys.argv[2], int(sys.argv[3]))
    else:
        serve(Mooncake)
