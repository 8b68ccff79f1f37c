"""Registered memory, and a window of somebody else's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from workmem.transfer.contract import Access, Described, Memory, Outcome, Part
from workmem.transfer.peer import Peer
from workmem.transfer.spans import Spans


class Region:
    """Memory of one's own, from `Endpoint.register` to `Endpoint.unregister`."""

    def __init__(self, number: int, memory: Memory, described: Described) -> None:
        self.number = number
        self.memory = memory
        self.described = described
        self.size = len(memory.view)
        self._uses = 0
        self._is_registered = True
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Use it: for a window, or a batch. False where it is registered no more."""
        with self._lock:
            self._uses += self._is_registered
            return self._is_registered

    def give_back(self) -> None:
        """The use is over."""
        with self._lock:
            self._uses -= 1

    def retire(self) -> Outcome:
        """DONE where nobody uses it, and nobody will. REFUSED where somebody does."""
        with self._lock:
            if not self._is_registered:
                return Outcome.NOT_REGISTERED
            if self._uses:
                return Outcome.REFUSED
            self._is_registered = False
            return Outcome.DONE


class RemoteWindow:
    """A window that a ticket opened. `finish` gives it back; its owner may close it at any time."""

    def __init__(
        self,
        number: int,
        peer: Peer,
        access: Access,
        size: int,
        target: object,
        start: int,
        finished: Callable[[RemoteWindow], None],
    ) -> None:
        self.number = number
        self._finished = finished
        self.peer = peer
        self.access = access
        self.size = size
        self.target = target
        self.start = start
        self._written = Spans()
        self._under_way = 0
        self._is_closed = False
        self._is_told = False
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """By either side: nothing more begins, and what is under way stops where it can."""
        return self._is_closed

    def take(self, parts: Sequence[Part]) -> bool:
        """A batch begins. False where it is closed, a part lies outside, or would be written twice."""
        with self._lock:
            if self._is_closed or any(
                part.there < 0 or part.size <= 0 or part.there + part.size > self.size for part in parts
            ):
                return False
            if self.access is Access.WRITE and not self._claim(parts):
                return False
            self._under_way += 1
            return True

    def give_back(self) -> None:
        """Nothing of that batch is under way any more."""
        with self._lock:
            self._under_way -= 1
        self._tell()

    def finish(self) -> None:
        """Nothing more begins. Its owner hears of it as soon as nothing is under way."""
        with self._lock:
            self._is_closed = True
        self._tell()

    def _claim(self, parts: Sequence[Part]) -> bool:
        new = Spans()
        for part in parts:
            if self._written.touches(part.there, part.size) or new.touches(part.there, part.size):
                return False
            new.add(part.there, part.size)
        # Whatever comes of it: what was under way once may arrive late.
        for part in parts:
            self._written.add(part.there, part.size)
        return True

    def _tell(self) -> None:
        with self._lock:
            if self._is_told or not self._is_closed or self._under_way:
                return
            self._is_told = True
        self._finished(self)
