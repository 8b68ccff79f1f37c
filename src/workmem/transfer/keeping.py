"""The thread of an endpoint that lets others in, and does what is due later."""

from __future__ import annotations

import heapq
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from itertools import count

_TICK_S = 0.05
_FIRST = count()
"""Of two that are due at one time."""


class Keeping:
    """Runs until `close`. `tick` says whether it wants to be called again soon."""

    def __init__(
        self, listener: socket.socket, accept: Callable[[socket.socket], None], tick: Callable[[], bool]
    ) -> None:
        self._listener, self._accept, self._tick = listener, accept, tick
        listener.setblocking(False)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._main, name="workmem-transfer-keep", daemon=True)
        self._thread.start()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it then."""
        with self._lock:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(_FIRST), call))
        self.nudge()

    def nudge(self) -> None:
        """Tick now."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the thread. What was to be done later is not."""
        self._closing = True
        self.nudge()
        self._thread.join()
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def _main(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        wants_more = False
        while not self._closing:
            for fd, _ in poll.poll(self._wait_ms(_TICK_S if wants_more else None)):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._let_in()
            for call in self._ripe():
                call()
            wants_more = self._tick()

    def _wait_ms(self, at_most_s: float | None) -> int | None:
        with self._lock:
            due_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
        waits = [wait for wait in (due_s, at_most_s) if wait is not None]
        return int(min(waits) * 1000) + 1 if waits else None

    def _ripe(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        with self._lock:
            while self._due and self._due[0][0] <= time.monotonic():
                found.append(heapq.heappop(self._due)[2])
        return found

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # It has hung up again, or there is no descriptor left: the next may have better luck.
        self._accept(connection)
