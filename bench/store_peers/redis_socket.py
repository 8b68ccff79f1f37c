"""Redis over a Unix socket, through a client that receives into the caller's memory and sends from it.

The usual Python client copies every value twice more; this one is the best case.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from driver import Client, Memory, Store, key_of, serve

WINDOW_BYTES = 16 << 20
"""Outstanding replies of a batch: what waits in the server counts against its memory."""


class Redis(Store):
    """One server, one connection per client."""

    def __init__(self, options: dict[str, Any]) -> None:
        shown = subprocess.run([options["server"], "--version"], capture_output=True, text=True, check=True)
        super().__init__(version=shown.stdout.split()[2])
        self._folder = Path(options["folder"]) / "redis"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._path = str(self._folder / "socket")
        bounds = f"--maxmemory {options['dram_bytes']} --maxmemory-policy allkeys-lru".split()
        command = [options["server"], "--port", "0", "--appendonly", "no", "--save", "", *bounds]
        command += ["--unixsocket", self._path]
        self._server = subprocess.Popen([*command, "--dir", str(self._folder)], stdout=subprocess.DEVNULL)
        self.pids = [self._server.pid]

    def open(self, memory: Memory) -> None:
        """See `Store.open`."""
        self._memory = memory
        until = time.monotonic() + 10
        while not Path(self._path).exists() and time.monotonic() < until:
            time.sleep(0.01)
        Caller(self._path, memory).flush()

    def client(self) -> Client:
        """See `Store.client`."""
        return Caller(self._path, self._memory)

    def close(self) -> None:
        """See `Store.close`."""
        self._server.terminate()
        self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Caller:
    """A connection."""

    def __init__(self, path: str, memory: Memory) -> None:
        self._memory = memory
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._left = b""
        self._window = max(1, WINDOW_BYTES // memory.size)

    def flush(self) -> None:
        """Empty the server."""
        self._socket.sendall(b"*1\r\n$8\r\nFLUSHALL\r\n")
        self._line()

    def read(self, blocks: range, row: int) -> int:
        """See `Client.read`."""
        moved = 0
        for at in range(0, len(blocks), self._window):
            some = blocks[at : at + self._window]
            self._socket.sendall(b"".join(map(_get, some)))
            moved += sum(self._receive(row + at + i) for i in range(len(some)))
        return moved

    def write(self, blocks: range) -> int:
        """See `Client.write`."""
        for block in blocks:
            self._send(block)
        return sum(self._line() == b"+OK" for _ in blocks)

    def _send(self, block: int) -> None:
        value = self._memory.source[block % self._memory.rows]
        head = b"*3\r\n$3\r\nSET\r\n$32\r\n%b\r\n$%d\r\n" % (key_of(block), len(value))
        self._socket.sendall(head)
        self._socket.sendall(value)
        self._socket.sendall(b"\r\n")

    def _receive(self, row: int) -> int:
        head = self._line()
        if head == b"$-1":
            return 0
        target = memoryview(self._memory.target[row])
        have = self._left[: len(target)]
        target[: len(have)] = have
        self._left = self._left[len(have) :]
        at = len(have)
        while at < len(target):
            at += self._socket.recv_into(target[at:])
        self._line()
        return 1

    def _line(self) -> bytes:
        while (end := self._left.find(b"\r\n")) < 0:
            self._left += self._socket.recv(4096)
        line, self._left = self._left[:end], self._left[end + 2 :]
        return line


def _get(block: int) -> bytes:
    return b"*2\r\n$3\r\nGET\r\n$32\r\n%b\r\n" % key_of(block)


if __name__ == "__main__":
    serve(Redis)
