"""What these tests share: a server in this process, and processes of its own kind around it."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from workmem.core.events import Event
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.host.client import HostStore
from workmem.store.host.server import HostServer
from workmem.store.host.session import HostLimits
from workmem.store.store import Store
from workmem.testing.waiting import wait_until

WAIT_S = 30.0


class Host:
    """A store and its server in this process, and clients of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "store.sock"
        self.events: list[Event] = []
        self._clients: list[HostStore] = []
        self._servers: list[HostServer] = []
        self._stores: list[Store] = []

    def serve(
        self, *, dram="2MiB", dram_path="", ssd="16MiB", limits: HostLimits | None = None, **settings: Any
    ) -> HostServer:
        """A server on a store of its own."""
        tier = SsdConfig(enabled=bool(ssd), path=str(self.folder / "ssd"), bytes=ssd)
        self._stores.append(
            Store(StoreConfig(dram=DramConfig(bytes=dram, path=dram_path), ssd=tier), self.events.append)
        )
        limits = limits or HostLimits(**settings)
        self._servers.append(HostServer(self._stores[-1], self.socket, limits, self.events.append))
        return self._servers[-1]

    @property
    def store(self) -> Store:
        """The store served last."""
        return self._stores[-1]

    def stop(self) -> None:
        """Stop the server served last, and its store."""
        self._servers.pop().close()
        store = self._stores.pop()
        store.audit()
        store.close()

    def client(self, **settings: Any) -> HostStore:
        """A client; closed at the end of the test at the latest."""
        self._clients.append(HostStore(self.socket, self.events.append, **settings))
        return self._clients[-1]

    def bounds(self) -> set[str]:
        """Names of the bounds reached so far."""
        return {event.name for event in list(self.events) if hasattr(event, "name")}

    def close(self) -> None:
        """Close what is open."""
        for client in self._clients:
            client.close()
        while self._servers:
            self.stop()


class Nursery:
    """Processes, see nursery.py. A pid means the last one that had it; they are signalled by handles, which never
    mean a stranger that got the pid of one of ours."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nursery.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._born: queue.Queue[int] = queue.Queue()
        self._births = 0
        self._birth_of: dict[int, int] = {}
        self._handles: dict[int, int | None] = {}
        """Of each pid; None where it had ended before it could be taken."""
        self._said: dict[int, queue.Queue[dict[str, Any]]] = {}
        """By birth."""
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, do: str, **settings: Any) -> int:
        """A process that does `do`; its pid."""
        stream = self._process.stdin
        self._births += 1
        said = {"do": do, "birth": self._births}
        stream.write(
            json.dumps(said | {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}) + "\n"
        )
        stream.flush()
        return self._born.get(timeout=WAIT_S)

    def heard(self, pid: int) -> dict[str, Any]:
        """The next report of `pid`."""
        return self._of(self._birth_of[pid]).get(timeout=WAIT_S)

    def serve(self, socket: Path, folder: Path, **settings: Any) -> int:
        """A server that is ready; its pid."""
        pid = self.start("serve", socket=socket, folder=folder, **settings)
        assert self.heard(pid).get("ready"), self.errors
        return pid

    def kill(self, pid: int, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill one of ours and wait until it is gone."""
        self.signal(pid, how)
        self.wait_gone(pid)

    def signal(self, pid: int, how: signal.Signals) -> None:
        """Send a signal to one of ours, which may have met its fate already."""
        handle = self._handles[pid]
        if handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, how)

    def wait_gone(self, pid: int, timeout_s: float = WAIT_S) -> None:
        """Wait for the end of `pid`."""
        wait_until(lambda: not self.lives(pid), timeout_s)

    def wait_for_a_death_among(self, pids: list[int]) -> None:
        """Return once one of `pids` has ended."""
        wait_until(lambda: not all(self.lives(pid) for pid in pids), 60)

    def lives(self, pid: int) -> bool:
        """Whether `pid` has not ended with all its threads: until then its locks are held and its files open."""
        handle = self._handles[pid]
        if handle is None:
            return False
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        return not ended.poll(0)

    def close(self) -> None:
        """Kill what still lives."""
        for pid in self._handles:
            self.signal(pid, signal.SIGKILL)
        self._process.stdin.close()
        self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        self._process.stdout.close()
        for handle in self._handles.values():
            if handle is not None:
                os.close(handle)

    def _read(self) -> None:
        for line in self._process.stdout:
            report = json.loads(line)
            if "child" in report:
                self._adopt(report["child"], report["birth"])
                self._born.put(report["child"])
                continue
            if "error" in report:
                self.errors.append(report["error"])
            self._of(report["birth"]).put(report)

    def _adopt(self, pid: int, birth: int) -> None:
        before = self._handles.get(pid)
        if before is not None:
            os.close(before)
        try:
            self._handles[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._handles[pid] = None
        self._birth_of[pid] = birth

    def _of(self, birth: int) -> queue.Queue[dict[str, Any]]:
        return self._said.setdefault(birth, queue.Queue())


@pytest.fixture
def host(tmp_path: Path):
    made = Host(tmp_path)
    yield made
    made.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("workmem-")]
    assert left == [], f"threads left behind: {left}"


@pytest.fixture(scope="module")
def any_nursery():
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def nursery(any_nursery):
    """The module's nursery, for one test: it fails with what its processes report as wrong."""
    any_nursery.errors.clear()
    yield any_nursery
    assert any_nursery.errors == []
