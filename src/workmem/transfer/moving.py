"""A batch on its way, and the thread that moves those of one peer, one after another."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from workmem.transfer.contract import Outcome

_QUEUED_MAX = 256


class Moving:
    """A batch of parts. `wait` says what to believe; `is_over` says when local memory is one's own again."""

    def __init__(self, count: int, within_s: float) -> None:
        self.deadline = time.monotonic() + within_s
        self._count = count
        self._outcomes: tuple[Outcome, ...] | None = None
        self._changed = threading.Condition()
        self._is_over = False

    @property
    def outcomes(self) -> tuple[Outcome, ...] | None:
        """One for each part; None while they may still become DONE."""
        with self._changed:
            if self._outcomes is None and time.monotonic() >= self.deadline:
                self._settle_locked((Outcome.TIMED_OUT,) * self._count)
            return self._outcomes

    @property
    def is_over(self) -> bool:
        """Whether nothing of it touches memory of this process any more."""
        return self._is_over

    def wait(self) -> tuple[Outcome, ...]:
        """The outcomes, at the deadline at the latest."""
        with self._changed:
            while self._outcomes is None and (left := self.deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        found = self.outcomes
        assert found is not None
        return found

    def wait_over(self, within_s: float) -> bool:
        """`is_over`, waited for."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over, within_s)

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """The first to say stays right: what comes after the deadline changes nothing."""
        with self._changed:
            late = time.monotonic() >= self.deadline
            self._settle_locked((Outcome.TIMED_OUT,) * self._count if late else tuple(outcomes))

    def settle_all(self, outcome: Outcome) -> None:
        """The same for every part."""
        self.settle((outcome,) * self._count)

    def end(self) -> None:
        """Memory is free."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _settle_locked(self, outcomes: tuple[Outcome, ...]) -> None:
        if self._outcomes is None:
            self._outcomes = outcomes
            self._changed.notify_all()


class Work(NamedTuple):
    """A batch, and what moves it."""

    moving: Moving
    run: Callable[[], None]


class Lane:
    """A thread for the batches of one peer: one that does not answer holds up its own and nobody else's."""

    def __init__(self, name: str) -> None:
        self._queue: deque[Work] = deque()
        self._changed = threading.Condition()
        self._under_way: Moving | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def is_late(self) -> bool:
        """Whether the batch under way is past its deadline: the peer costs that once, and others nothing."""
        moving = self._under_way
        return moving is not None and not moving.is_over and time.monotonic() >= moving.deadline

    def put(self, work: Work) -> bool:
        """False where it is closed, or the queue full."""
        with self._changed:
            if self._closing or len(self._queue) >= _QUEUED_MAX:
                return False
            self._queue.append(work)
            self._changed.notify()
        return True

    def close(self) -> None:
        """End after what is queued."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, within_s: float) -> bool:
        """Whether it has ended, waited for."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                work = self._queue.popleft()
                self._under_way = work.moving
            work.run()
            self._under_way = None
