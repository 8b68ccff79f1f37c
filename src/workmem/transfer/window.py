"""A window as its owner has it: who may reach it, what has arrived, and whether the memory is the owner's again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto

import xxhash

from workmem.transfer.contract import Access, Outcome
from workmem.transfer.messages import Revoke
from workmem.transfer.peer import Peer
from workmem.transfer.spans import Spans


class _State(Enum):
    OPEN = auto()
    QUARANTINED = auto()
    """Closed, and its peer may still write."""
    FREE = auto()


class Window:
    """A stretch of one's own memory for one peer. `ticket` goes to that peer. `close` it in the end."""

    def __init__(
        self,
        number: int,
        memory: memoryview,
        access: Access,
        ticket: bytes,
        freed: Callable[[Window], None],
        nudge: Callable[[], None],
    ) -> None:
        self._nudge = nudge
        self.number = number
        self.ticket = ticket
        self.access = access
        self.size = len(memory)
        self.peer: Peer | None = None
        """Who has opened it."""
        self._memory = memory
        self._freed = freed
        self._changed = threading.Condition()
        self._state = _State.OPEN
        self._is_finished = False
        self._arrived = Spans()
        self._corrupt = Spans()

    @property
    def is_free(self) -> bool:
        """Whether it is closed and nobody else writes there any more."""
        return self._state is _State.FREE

    @property
    def is_quarantined(self) -> bool:
        """Whether it is closed and somebody might."""
        return self._state is _State.QUARANTINED

    def wait(self, offset: int, size: int, within_s: float) -> Outcome:
        """Whether these bytes were written and are what was sent: for who computes as they come."""
        until = time.monotonic() + within_s
        if offset < 0 or size <= 0 or offset + size > self.size or self.access is not Access.WRITE:
            return Outcome.REFUSED
        with self._changed:
            while True:
                if self._state is not _State.OPEN:
                    return Outcome.REFUSED
                if self._corrupt.touches(offset, size):
                    return Outcome.CORRUPT
                if self._arrived.covers(offset, size):
                    return Outcome.DONE
                if self.peer is not None and self.peer.is_gone:
                    return Outcome.PEER_GONE
                left = until - time.monotonic()
                if left <= 0:
                    return Outcome.TIMED_OUT
                self._changed.wait(left)

    def close(self, within_s: float) -> Outcome:
        """Let nobody in any more. DONE when the memory is free; TIMED_OUT when it stays quarantined until `is_free`.

        Called again it asks the peer again.
        """
        with self._changed:
            if self._state is _State.OPEN:
                self._state = _State.QUARANTINED
                self._changed.notify_all()
        peer = self.peer
        # A reader does no harm to this memory; what it reads from here on does not pass its check.
        if peer is None or self.access is Access.READ or self._is_finished:
            self._free()
        elif peer.is_gone:
            self._nudge()
        else:
            peer.tell(Revoke(self.number))
        with self._changed:
            self._changed.wait_for(lambda: self.is_free, within_s)
            return Outcome.DONE if self.is_free else Outcome.TIMED_OUT

    def take(self, peer: Peer) -> bool:
        """Endpoint: `peer` opens it. False where it is closed, or another has."""
        with self._changed:
            if self._state is not _State.OPEN or self.peer is not None:
                return False
            self.peer = peer
            return True

    def check(self, peer: Peer, spans: Sequence[tuple[int, int, int]]) -> list[Outcome]:
        """Endpoint: `peer` says that it wrote these."""
        return [self._check(peer, *span) for span in spans]

    def sums(self, peer: Peer, spans: Sequence[tuple[int, int]]) -> list[int] | None:
        """Endpoint: checksums of what `peer` has read; None where it may not have."""
        if peer is not self.peer or self.access is not Access.READ:
            return None
        found: list[int] = []
        for offset, size in spans:
            if not self._is_inside(offset, size):
                return None
            found.append(xxhash.xxh3_64_intdigest(self._memory[offset : offset + size]))
        # Closed meanwhile: it may have been of another use when it was read.
        return found if self._state is _State.OPEN else None

    def finish(self, peer: Peer) -> None:
        """Endpoint: `peer` writes there no more, and nothing is under way."""
        if peer is self.peer:
            self._is_finished = True
            if self.is_quarantined:
                self._free()

    def look(self, drain_s: float) -> None:
        """Endpoint, now and then: the peer may have ended. Wakes who waits for what will not come."""
        peer = self.peer
        if peer is None or not peer.is_gone:
            return
        with self._changed:
            self._changed.notify_all()
        if self.is_quarantined and peer.has_ended(drain_s):
            self._free()

    def _check(self, peer: Peer, offset: int, size: int, wanted: int) -> Outcome:
        if peer is not self.peer or self.access is not Access.WRITE or not self._is_inside(offset, size):
            return Outcome.REFUSED
        if self._state is not _State.OPEN or self._is_finished:
            return Outcome.REFUSED
        is_right = xxhash.xxh3_64_intdigest(self._memory[offset : offset + size]) == wanted
        with self._changed:
            if self._state is not _State.OPEN:
                return Outcome.REFUSED
            (self._arrived if is_right else self._corrupt).add(offset, size)
            self._changed.notify_all()
        return Outcome.DONE if is_right else Outcome.CORRUPT

    def _is_inside(self, offset: int, size: int) -> bool:
        return offset >= 0 and size > 0 and offset + size <= self.size

    def _free(self) -> None:
        with self._changed:
            if self._state is _State.FREE:
                return
            self._state = _State.FREE
            self._memory = memoryview(b"")
            self._changed.notify_all()
        self._freed(self)
