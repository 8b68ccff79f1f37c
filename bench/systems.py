"""Systems under test as stopped processes: only the one being measured may use the cores."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

IDLE_S, IDLE_SHARE = 0.25, 0.1
"""A process that uses less than a tenth of a core for so long has nothing left to do."""
WORKERS = Path(__file__).parent / "workers"


class System(NamedTuple):
    """How to start one: a worker script, the Python that has the library, and the options it takes."""

    name: str
    python: Path
    script: str
    options: dict[str, Any]


class WorkerFailed(Exception):
    """The worker ended, or ran out of its time."""


class Worker:
    """A running system. Starts on creation; `pause` and `resume` around everything that others measure."""

    def __init__(self, system: System, log: Path, start_timeout_s: float) -> None:
        self.system = system
        self._log = log
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        # Each system's own way of asking for threads, all with the same number.
        environment |= {"OMP_NUM_THREADS": str(system.options["threads"]), "PYTHONWARNINGS": "ignore"}
        environment |= system.options.get("environment", {})
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [system.python, WORKERS / system.script, json.dumps(system.options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        try:
            self.versions: dict[str, Any] = self._read(start_timeout_s)["ready"]
        except WorkerFailed:
            self.close()
            raise

    def run(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, timeout_s: float
    ) -> list[tuple[float, int, int]]:
        """Events of one run (see `workers/protocol.py`). Raises WorkerFailed."""
        answer = self._answer({"prompts": list(prompts), "max_tokens": max_tokens}, timeout_s)
        return [(seconds, index, tokens) for seconds, index, tokens in answer["events"]]

    def ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """One request to a worker that does several things, its answer. Raises WorkerFailed."""
        return self._answer(request, timeout_s)["done"]

    def pause(self) -> None:
        """Stop all its threads."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def wait_until_idle(self, timeout_s: float) -> None:
        """Until neither it nor its servers compute or write any more, whatever they do behind their answers."""
        until, busy_s = time.monotonic() + timeout_s, self._busy_s()
        while time.monotonic() < until:
            time.sleep(IDLE_S)
            before, busy_s = busy_s, self._busy_s()
            if busy_s - before < IDLE_SHARE * IDLE_S:
                return

    def _busy_s(self) -> float:
        """Seconds of processor that its process group has used."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                # Behind the name, which may hold anything: state, parent, group, ...
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._process.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(f"ended: {_last_line(self._log)}") from None
        answer = self._read(timeout_s)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerFailed(f"no answer within {timeout_s:.0f} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise WorkerFailed(f"ended: {_last_line(self._log)}")
                line += piece
        return json.loads(line)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "without a word"
