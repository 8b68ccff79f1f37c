"""A device that does nothing until somebody waits for it, and then what its queues leave open in the worst order."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.is_past = False

    @classmethod
    def past(cls, device: LateDevice) -> LateEvent:
        """One that nobody has to wait for."""
        made = cls(device)
        made.is_past = True
        return made

    def synchronize(self) -> None:
        """As little is done as the event takes, in an order by chance."""
        self._device.run_until(lambda: self.is_past)


class LateQueue:
    def __init__(self, device: LateDevice, name: str) -> None:
        self._device = device
        self.name = name
        self.work: deque[Callable[[], object] | LateEvent] = deque()
        self.ignores_waits = False

    def run(self, work: Callable[[], object]) -> None:
        with self._device.lock:
            self.work.append(work)

    def wait_for(self, event: LateEvent) -> None:
        assert isinstance(event, LateEvent)
        if not self.ignores_waits:
            with self._device.lock:
                self.work.append(event)

    def record(self) -> LateEvent:
        event = LateEvent(self._device)

        def past() -> None:
            event.is_past = True

        self.run(past)
        return event

    @property
    def can_go_on(self) -> bool:
        if not self.work:
            return False
        head = self.work[0]
        return not isinstance(head, LateEvent) or head.is_past

    def step(self) -> None:
        head = self.work.popleft()
        if not isinstance(head, LateEvent):
            head()


class LateDevice:
    """`first`: names of queues that run before all others whenever they can; the rest by chance."""

    def __init__(self, seed: int = 0, first: tuple[str, ...] = ()) -> None:
        self.lock = threading.RLock()
        self.queues = [LateQueue(self, "engine")]
        self._random = random.Random(seed)
        self._first = first

    def engine_queue(self) -> LateQueue:
        return self.queues[0]

    def new_queue(self) -> LateQueue:
        self.queues.append(LateQueue(self, ("out", "in step", "aside")[len(self.queues) - 1]))
        return self.queues[-1]

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while True:
            with self.lock:
                if is_done():
                    return
                ready = [queue for queue in self.queues if queue.can_go_on]
                assert ready, "all queues wait for each other"
                liked = [queue for queue in ready if queue.name in self._first]
                self._random.choice(liked or ready).step()

    def run_all(self) -> None:
        self.run_until(lambda: not any(queue.work for queue in self.queues))
