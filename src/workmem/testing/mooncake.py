"""A real Mooncake on 127.0.0.1: a master, and processes that give memory to its pool."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_START_S = 20.0
_OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print(code, store.get_hostname(), flush=True)
sys.stdin.read()
store.close()
"""


def folder() -> Path:
    """Where Mooncake is installed. Raises ModuleNotFoundError where it is not."""
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("mooncake")
    return Path(next(iter(found.submodule_search_locations)))


class Owner:
    """A process that gives memory to a pool, and does nothing else."""

    def __init__(self, master: str, size: int) -> None:
        self._process = subprocess.Popen(  # noqa: S603  our own words
            [sys.executable, "-c", _OWNER, master, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline().split()
        if not said or said[0] != "0":
            self.kill()
            raise RuntimeError(f"an owner of memory does not start: {said}")
        self.segment_name = said[1]

    @property
    def cpu_s(self) -> float:
        """Seconds of processor that it has used."""
        # Behind the name, which may hold anything: state, parent, group, ...
        fields = (
            Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        )
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def send(self, number: signal.Signals) -> None:
        """Stop it, or have it go on."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """As a host that dies."""
        self._process.kill()
        self._process.communicate()


class Master:
    """A `mooncake_master`, at `address`."""

    def __init__(self, port: int = 0, /, **flags: int | str) -> None:
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        more = {"client_ttl": 10, "enable_metric_reporting": "false", **flags}
        program = folder() / "mooncake_master"
        self._process = subprocess.Popen(  # noqa: S603  an installed program
            [
                str(program),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self.port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={free_port()}",
                *(f"--{name}={value}" for name, value in more.items()),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 0.2).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > until:
                    self.kill()
                    raise
                time.sleep(0.01)
            else:
                break

    def send(self, number: signal.Signals) -> None:
        """Stop it, or have it go on."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """As a host that dies."""
        self._process.kill()
        self._process.wait()


@contextmanager
def pool(size: int, *, lease_ms: int = 5000, **flags: int | str) -> Generator[Master]:
    """A master that holds what is read for `lease_ms`, and one owner of `size` bytes."""
    master = Master(default_kv_lease_ttl=lease_ms, **flags)
    try:
        owner = Owner(master.address, size)
        try:
            yield master
        finally:
            owner.kill()
    finally:
        master.kill()


def free_port() -> int:
    """A port that nobody has at this moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
