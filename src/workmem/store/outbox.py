"""The pool's lock, and a way to tell things only when it is open again (R1)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from workmem.core.events import Event, EventSink, discard

log = logging.getLogger(__name__)


class _Changed(threading.Condition):
    """A condition that is told of every page that comes or goes, and mostly nobody waits for."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__(lock)
        self._waiting = 0

    def wait(self, timeout: float | None = None) -> bool:
        """See `Condition.wait`. The lock is held."""
        self._waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self._waiting -= 1

    def notify_all(self) -> None:
        """See `Condition.notify_all`. The lock is held."""
        if self._waiting:
            super().notify_all()


class Outbox:
    """The pool's lock, and what is to be told once it is open again."""

    def __init__(self, sink: EventSink) -> None:
        self.lock = threading.Lock()
        self.changed = _Changed(self.lock)
        """Notified when a frame or a place in the write queue may have come free."""
        self.is_heard = sink is not discard
        """False where nobody listens: what is told once per page need not be made then."""
        self._sink = sink
        self._events: list[Event] = []
        self._calls: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if not self._events and not self._calls:
            self.lock.release()
            return
        events, self._events = self._events, []
        calls, self._calls = self._calls, []
        self.lock.release()
        for event in events:
            self._sink(event)
        for call in calls:
            run_callback(call)

    def tell(self, event: Event) -> None:
        """Emit `event` once the lock is open."""
        self._events.append(event)

    def call(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Run `callbacks` once the lock is open."""
        self._calls.extend(callbacks)


def run_callback(call: Callable[[], None]) -> None:
    """Run a caller's callback on our thread; its bug must not end the thread."""
    try:
        call()
    except Exception:  # plugin boundary: the callback is the caller's code
        log.exception("a callback given to the store raised")
