"""The store that the connector starts outlives the engine, whatever the engine does to its children at its end."""

import os
import signal
import socket
import struct
import tempfile
from pathlib import Path

import pytest

from workmem.engines.vllm.store_process import ensure_store
from workmem.store.host.place import is_served
from workmem.testing.waiting import wait_until


@pytest.fixture
def place():
    # Not pytest's folder: the address of a socket is short.
    with tempfile.TemporaryDirectory(prefix="wm-") as folder:
        yield Path(folder)


def settings(place) -> dict[str, str]:
    return {"store.dram.bytes": "16MiB", "store.ssd.path": str(place / "ssd")}


def server_of(path: Path) -> int:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        return struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def test_the_store_is_no_child_of_the_engine(place):
    """vLLM ends by killing every process below its own."""
    path = place / "s.sock"
    assert ensure_store(path, settings(place), place / "run" / "store.log", 120) == ""
    store = server_of(path)
    try:
        parent = int(Path(f"/proc/{store}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != os.getpid()
        assert os.getsid(store) != os.getsid(0)
        assert ensure_store(path, {}, place / "run" / "store.log", 0.1) == "", "there is one already"
    finally:
        os.kill(store, signal.SIGTERM)
        wait_until(lambda: not is_served(path), timeout_s=60)


def test_a_store_that_does_not_start_says_why(place):
    place.chmod(0o755)
    why = ensure_store(place / "s.sock", settings(place), place / "store.log", 120)
    assert "is open to other users" in why
    assert str(place / "store.log") in why
