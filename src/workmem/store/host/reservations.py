"""The frames that a client is filling: each with a deadline, none given to anybody else while it may be written.

A reservation ends in one of four ways: committed in time; given up by its writer; given back because
its writer's process has ended; or *stranded*, when the deadline passed or the connection was lost while
the process may still write. A stranded frame is QUARANTINED until the writer says that it is done (by a
late commit, which is refused, or an abort) or is known dead.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from workmem.core.clock import Clock
from workmem.core.errors import IntegrityError
from workmem.core.events import BoundReached, EventSink
from workmem.store.catalog import Space
from workmem.store.contract import BlockId, SaveState
from workmem.store.frames import Frame
from workmem.store.host.frame_page import check_written
from workmem.store.pool import Pool


class Reservation:
    """A FILLING frame and for which block; QUARANTINED once it is stranded."""

    __slots__ = ("block", "deadline", "frame", "space")

    def __init__(self, space: Space, block: BlockId, frame: Frame, deadline: float) -> None:
        self.space = space
        self.block = block
        self.frame = frame
        self.deadline = deadline


class Reservations:
    """Those of one client. Called by its session's thread and by the server's watch."""

    def __init__(self, pool: Pool, clock: Clock, sink: EventSink, *, ttl_s: float, limit: int) -> None:
        self._pool = pool
        self._clock = clock
        self._sink = sink
        self._ttl_s = ttl_s
        self._limit = limit
        self._lock = threading.Lock()
        self._live: dict[int, Reservation] = {}
        self._stranded: dict[int, Reservation] = {}
        self._next = 1

    @property
    def count(self) -> int:
        """Frames held by this client, stranded ones included."""
        return len(self._live) + len(self._stranded)

    @property
    def stranded(self) -> int:
        """Frames that wait for their writer to be done or dead."""
        return len(self._stranded)

    def reserve(
        self, space: Space, blocks: Sequence[BlockId], wait_s: float, workflow: str = ""
    ) -> tuple[int, list[SaveState | None], list[int]]:
        """Frames for `blocks`: (id of the first, how each ended at once or None, offsets in the arena).

        Waits for room up to `wait_s` in all.
        """
        until = self._clock.monotonic() + wait_s
        with self._lock:
            first = self._next
            self._next += len(blocks)
        states: list[SaveState | None] = []
        offsets: list[int] = []
        for number, block in enumerate(blocks, first):
            if self.count >= self._limit:
                self._refuse()
                begun = SaveState.DROPPED
            else:
                left = max(0.0, until - self._clock.monotonic())
                begun = self._pool.begin_save(space, block, left, workflow)
            if isinstance(begun, SaveState):
                states.append(begun)
                offsets.append(0)
                continue
            states.append(None)
            offsets.append(begun.offset)
            with self._lock:
                deadline = self._clock.monotonic() + self._ttl_s
                self._live[number] = Reservation(space, block, begun, deadline)
        return first, states, offsets

    def commit(self, number: int) -> SaveState:
        """The page is in its frame, header and all: make it visible (R2). DROPPED when it comes too late."""
        with self._lock:
            entry = self._live.pop(number, None)
        if entry is None:
            # Too late, but it tells that the frame is not written any more.
            self.abort(number)
            return SaveState.DROPPED
        if self._clock.monotonic() > entry.deadline or not self._is_written(entry):
            self._pool.abort_save(entry.space, entry.block, entry.frame)
            return SaveState.DROPPED
        return self._pool.commit_save(entry.space, entry.block, entry.frame)

    def abort(self, number: int) -> None:
        """The writer gives the frame up and will not write it again (R5). Unknown ids pass."""
        with self._lock:
            entry = self._live.pop(number, None)
            left = self._stranded.pop(number, None)
        if entry is not None:
            self._pool.abort_save(entry.space, entry.block, entry.frame)
        if left is not None:
            self._pool.free_stranded(left.frame)

    def strand_overdue(self) -> None:
        """Take the blocks whose deadline has passed out of their writer's hands; it may still write the frames."""
        now = self._clock.monotonic()
        with self._lock:
            overdue = [number for number, entry in self._live.items() if entry.deadline < now]
        self._strand(overdue, "the deadline passed")

    def strand_all(self) -> None:
        """The connection is lost and the process may live: nothing can be committed any more."""
        self._strand(list(self._live), "the connection was lost")

    def free_all(self) -> None:
        """The writer is known dead: its frames are nobody's (R3)."""
        for number in [*self._live, *self._stranded]:
            self.abort(number)

    def _strand(self, numbers: Sequence[int], why: str) -> None:
        stranded = 0
        for number in numbers:
            with self._lock:
                entry = self._live.pop(number, None)
                if entry is None:
                    continue
                # Before the lock opens, so that a commit that comes now finds it here.
                self._pool.strand_save(entry.space, entry.block, entry.frame)
                self._stranded[number] = entry
            stranded += 1
        if stranded:
            detail = f"{stranded} frames wait for their writer to be done or dead: {why}"
            self._sink(BoundReached(name="store.host.stranded", limit=0, detail=detail))

    def _is_written(self, entry: Reservation) -> bool:
        """Whether the frame says that it holds the block it was reserved for: clients are trusted, not believed."""
        place = self._pool.state.arena.readable(entry.frame.offset, entry.space.header_bytes)
        with place as header:
            try:
                problem = check_written(header, entry.space, entry.block)
            except IntegrityError as error:
                problem = str(error)
        if problem:
            self._sink(
                BoundReached(name="store.host.commit", limit=0, detail=f"a page was refused: {problem}")
            )
        return not problem

    def _refuse(self) -> None:
        detail = "a client reserves more frames than it commits"
        self._sink(BoundReached(name="store.host.reservations", limit=self._limit, detail=detail))
