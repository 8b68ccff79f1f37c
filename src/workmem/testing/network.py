"""Hosts with addresses of their own, on one machine: network namespaces of Linux around a bridge.

Each `Host` has its own interfaces, its own 127.0.0.1 and its own ports; between hosts go real packets. Nothing has a name
outside, and all of it ends with the processes that hold it. No rights are needed where users may have user namespaces.
Needs `ip`, `unshare` and `nsenter` (Debian's iproute2 and util-linux).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_BRIDGE = "hub"
_POST = """
import json, sys, urllib.error, urllib.request
url, body, wait_s = sys.argv[1], sys.stdin.buffer.read(), float(sys.argv[2])
request = urllib.request.Request(url, body or None, {"content-type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=wait_s) as answer:
        print(answer.read().decode())
except urllib.error.HTTPError as error:
    sys.exit(f"{error.code}: {error.read().decode()}")
except OSError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


class Unreached(Exception):
    """A request that got no answer, or another than 200."""


class _Namespace:
    """A network namespace, which lasts as long as the process that holds it."""

    def __init__(self, within: _Namespace | None = None) -> None:
        """A new one; in the user namespace of `within`, or else with one of its own."""
        unshare = ["unshare", "--net"] if within else ["unshare", "--user", "--map-root-user", "--net"]
        # It ends with its input, so also when whoever made it is killed.
        hold = [*unshare, "sh", "-c", "echo ready; exec cat"]
        self._holder = subprocess.Popen(  # noqa: S603  fixed words
            within.inside(hold) if within else hold,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise RuntimeError("no network namespace can be made here: user namespaces are not allowed")

    @property
    def holder(self) -> int:
        """Process id by which others find the namespace."""
        return self._holder.pid

    def inside(self, words: Sequence[str]) -> list[str]:
        """`words` as a command that runs in it."""
        enter = ["nsenter", f"--target={self.holder}", "--user", "--preserve-credentials", "--net"]
        return [*enter, *words]

    def set_up(self, line: str) -> None:
        """Run `ip` with `line`."""
        subprocess.run(self.inside(["ip", *line.split()]), check=True, capture_output=True)  # noqa: S603

    def end(self) -> None:
        """Kill all that runs in it: also what a process of it started apart from itself."""
        mine = _network_of(self.holder)
        for found in Path("/proc").glob("[0-9]*"):
            pid = int(found.name)
            if pid != self.holder and _network_of(pid) == mine:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._holder.communicate()


def _network_of(pid: int) -> str:
    """Name of a process's network namespace; empty where it has ended, or is another user's."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


class Host:
    """One host of a `Network`. `folder` is its home: its caches, its sockets, its `workmem.toml`."""

    def __init__(self, namespace: _Namespace, hub: _Namespace, address: str, port: str, folder: Path) -> None:
        self.address = address
        self.folder = folder
        self._namespace = namespace
        self._hub = hub
        self._port = port
        self._running: list[subprocess.Popen[bytes]] = []
        folder.mkdir()

    def start(self, words: Sequence[str], *, out: Path, err: Path) -> subprocess.Popen[bytes]:
        """Run `words` there, what they print added to `out` and `err`. Ends with the host."""
        home = ["env", "-u", "XDG_RUNTIME_DIR", f"XDG_CACHE_HOME={self.folder}", f"HOME={self.folder}"]
        with out.open("ab") as printed, err.open("ab") as said:
            process = subprocess.Popen(  # noqa: S603  the caller's own words
                self._namespace.inside([*home, *words]),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=said,
                cwd=self.folder,
                # A group of its own, so that a signal can be sent to all of it.
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def ask(self, url: str, body: object, *, wait_s: float = 60.0) -> Any:
        """The JSON that is answered to `body`, posted from this host. Raises Unreached."""
        return json.loads(self.fetch(url, body, wait_s=wait_s))

    def fetch(self, url: str, body: object = None, *, wait_s: float = 60.0) -> str:
        """What is answered to a request from this host: POST with `body`, GET without. Raises Unreached."""
        done = subprocess.run(  # noqa: S603  our own words
            self._namespace.inside([sys.executable, "-IS", "-c", _POST, url, str(wait_s)]),
            input=b"" if body is None else json.dumps(body).encode(),
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise Unreached(done.stderr.decode().strip())
        return done.stdout.decode()

    def cut(self) -> None:
        """As a cable that is pulled: nothing comes or goes, and nobody is told."""
        self._hub.set_up(f"link set {self._port} down")

    def mend(self) -> None:
        """The end of `cut`."""
        self._hub.set_up(f"link set {self._port} up")

    def die(self) -> None:
        """As a host that loses power: the cable first, so that no process says goodbye, then all processes."""
        self.cut()
        self.end()

    def end(self) -> None:
        """Kill all that runs on it."""
        self._namespace.end()
        for process in self._running:
            process.wait()
        self._running.clear()


class Network:
    """Hosts that reach each other, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hub = _Namespace()
        self._hub.set_up(f"link add {_BRIDGE} type bridge")
        self._hub.set_up(f"link set {_BRIDGE} up")
        self._hosts: list[Host] = []

    def host(self, address: str) -> Host:
        """One more host, at `address` of a network of 24 bits."""
        port = f"host{len(self._hosts)}"
        made = _Namespace(self._hub)
        self._hub.set_up(f"link add {port} type veth peer name eth0 netns {made.holder}")
        self._hub.set_up(f"link set {port} master {_BRIDGE} up")
        made.set_up("link set lo up")
        made.set_up(f"addr add {address}/24 dev eth0")
        made.set_up("link set eth0 up")
        self._hosts.append(Host(made, self._hub, address, port, self._folder / port))
        return self._hosts[-1]

    def end(self) -> None:
        """End all hosts."""
        for host in self._hosts:
            host.end()
        self._hub.end()


@contextmanager
def network(folder: Path) -> Generator[Network]:
    """A `Network` whose hosts have their homes in `folder`; ended on the way out."""
    made = Network(folder)
    try:
        yield made
    finally:
        made.end()
