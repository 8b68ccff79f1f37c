"""An endpoint in a process of its own, that does what it is told on stdin, and dies or freezes in the middle."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from workmem.transfer.contract import Access, Memory, Moved, Mover, Outcome, Part
from workmem.transfer.endpoint import Endpoint
from workmem.transfer.mooncake_engine import MooncakeMover
from workmem.transfer.region import RemoteWindow
from workmem.transfer.shared_memory import SharedMemoryMover, allocate

WAIT_S = 20.0
CALL_BYTES = 8 * 2**20
"""Of Mooncake: less than its own, so that less has to be moved for a batch to have a middle."""


class InTheMiddle:
    """Calls `then` once, when a mover asks for the `at`th time whether to stop: between two pieces of a batch."""

    def __init__(self, mover: Mover, at: int, then: Callable[[], None]) -> None:
        self._inner, self._at, self._then = mover, at, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def move(
        self,
        access: Access,
        target: object,
        start: int,
        memory: Memory,
        parts: Sequence[Part],
        stop: Callable[[], bool],
    ) -> Moved:
        """As the mover inside."""

        def asked() -> bool:
            self._at -= 1
            if self._at == 0:
                self._then()
            return stop()

        return self._inner.move(access, target, start, memory, parts, asked)


def new_mover(kind: str) -> Mover:
    """One of its own: `shared` or `mooncake`."""
    return SharedMemoryMover() if kind == "shared" else MooncakeMover("127.0.0.1", call_bytes=CALL_BYTES)


def new_endpoint(kind: str, mover: Mover) -> Endpoint:
    """Over that mover."""
    return Endpoint(mover, host="" if kind == "shared" else "127.0.0.1")


class Started(NamedTuple):
    """The process. `ask` and `tell` it; `end` it in any case."""

    process: subprocess.Popen[str]

    def tell(self, **words: object) -> None:
        """Have it do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What it says next."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def send(self, number: signal.Signals) -> None:
        """Stop it, kill it, or have it go on."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill it, frozen or not."""
        self.process.kill()
        self.process.communicate()


def start(kind: str, size: int, *, middle: str = "") -> Started:
    """A process with `size` bytes; `middle` is the signal that it sends itself in the middle of its first batch."""
    words = [sys.executable, "-m", "workmem.testing.transfer_peer", kind, str(size), middle]
    return Started(
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own
    )


def _main(kind: str, size: int, middle: str) -> None:
    mover = new_mover(kind)
    if middle:
        mover = cast(
            "Mover",
            InTheMiddle(mover, 2, lambda: signal.pthread_kill(threading.get_ident(), signal.Signals[middle])),
        )
    endpoint = new_endpoint(kind, mover)
    memory = allocate(size)
    region = endpoint.register(memory)
    for line in sys.stdin:
        words = json.loads(line)
        if "grant" in words:
            window = endpoint.grant(region, 0, words["grant"], Access(words["access"]))
            _say(ticket=base64.b64encode(window.ticket).decode())
        else:
            _say(outcome=_write(endpoint, words))


def _write(endpoint: Endpoint, words: dict[str, Any]) -> str:
    """Into the window of a ticket, all of it, from memory that is full of one byte."""
    window = endpoint.open(base64.b64decode(words["ticket"]), WAIT_S)
    if not isinstance(window, RemoteWindow):
        return window.value
    memory = allocate(window.size)
    memory.view[:] = bytes([words["fill"]]) * window.size
    region = endpoint.register(memory)
    (outcome,) = endpoint.write(window, region, [Part(0, 0, window.size)], WAIT_S).wait()
    if outcome is Outcome.DONE:
        endpoint.finish(window)
    return outcome.value


def _say(**words: str) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
