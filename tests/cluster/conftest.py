"""`workmem cluster` as people run it: commands of the guide, on ports that nobody has."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from workmem.cli.main import main
from workmem.cluster.view import ClusterView, look
from workmem.testing.mooncake import free_port
from workmem.testing.waiting import wait_until

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "cluster.md").read_text(encoding="utf-8")
END_S = 60.0


def commands(heading: str) -> list[str]:
    """Commands under a heading of the guide, in order."""
    section = GUIDE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```console\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


class Part:
    """A process that another started, by a handle: its number may come again."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def kill(self) -> None:
        signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    @property
    def has_ended(self) -> bool:
        return bool(select.select([self._handle], [], [], 0)[0])


class Up:
    """A `workmem cluster up` that runs."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self._heard = folder / f"err{len(list(folder.iterdir()))}"
        self._printed = self._heard.with_suffix(".toml")
        with self._heard.open("wb") as err, self._printed.open("wb") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=err)

    def hear(self, text: str, times: int = 1) -> str:
        """Wait until it has said so, so often."""
        wait_until(lambda: self.said.count(text) >= times or self.process.poll() is not None, timeout_s=END_S)
        assert self.said.count(text) >= times, self.said
        return self.said

    @property
    def said(self) -> str:
        return self._heard.read_text(encoding="utf-8")

    @property
    def printed(self) -> str:
        return self._printed.read_text(encoding="utf-8")

    def part(self, name: str) -> Part:
        """The last one of the processes that it named so; it runs."""
        return Part(int(re.findall(rf"^  {name} .*process (\d+)", self.said, re.MULTILINE)[-1]))

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(END_S)


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Hosts:
    """Hosts of the guide, at addresses of 127.0.0.0/8 that stand for theirs."""

    def __init__(
        self, folder: Path, captured: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.folder = folder
        self._captured = captured
        self.port, self.admin_port = free_port(), free_port()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("WORKMEM__CLUSTER__PORT", str(self.port))
        monkeypatch.setenv("WORKMEM__CLUSTER__ADMIN_PORT", str(self.admin_port))
        self.running: list[Up] = []

    def look(self) -> ClusterView:
        """What the master on 127.0.0.1 says."""
        return look([f"http://127.0.0.1:{self.admin_port}"])

    def commands(self, heading: str) -> list[str]:
        return commands(heading)

    def _words(self, command: str, **changes: str) -> list[str]:
        for name, value in {**changes, "10.0.0.": "127.0.0.", ":50051": f":{self.port}"}.items():
            command = command.replace(name, value)
        program, *words = shlex.split(command)
        assert program == "workmem"
        return [sys.executable, "-m", "workmem", *words]

    def up(self, command: str, **changes: str) -> Up:
        self.running.append(Up(self._words(command, **changes), self.folder))
        self.running[-1].hear("Ctrl-C stops")
        return self.running[-1]

    def run(self, command: str) -> Done:
        """A command that ends, in this process: another would take longer to start than the command takes."""
        code = main(self._words(command)[3:])
        out, err = self._captured.readouterr()
        return Done(code, out, err)

    def end(self) -> None:
        for one in reversed(self.running):
            if one.process.poll() is None:
                one.end()


@pytest.fixture
def hosts(tmp_path, capsys, monkeypatch):
    made = Hosts(tmp_path, capsys, monkeypatch)
    yield made
    made.end()
