"""The clock thread: what is due although nobody calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

TICK_S = 0.25
"""Lease deadlines and the pause of a tripped tier are kept to this precision."""


class TickerThread:
    """Calls `tick` every TICK_S seconds until closed."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="workmem-store-tick", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """End the thread. False if it does not within `timeout_s`."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while True:
            try:
                self._tick()
            except Exception:  # thread main: the next tick may fare better
                log.exception("a tick of the store met a bug of ours")
            if self._stop.wait(TICK_S):
                return
