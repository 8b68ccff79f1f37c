"""The queue between whoever offers pages and the thread that saves them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from workmem.store.catalog import Space
from workmem.store.contract import PageWrite, SaveState
from workmem.store.outbox import run_callback

_CLOSED = "the store is closed"


class SaveQueue:
    """Bounded. A page that is put is taken, or told that it was dropped: exactly one of them, exactly once.

    `dropped` is called with the number of pages that are refused and why, once for all of a call.
    """

    def __init__(self, pages_max: int, dropped: Callable[[int, str], None]) -> None:
        self._pages_max = pages_max
        self._dropped = dropped
        self._wake = threading.Condition()
        self._queue: deque[tuple[Space | None, PageWrite]] = deque()
        """Without a space, the page was refused and only has to be told so, on the saver's thread as promised."""
        self._waiting = 0
        self._busy = False
        self._closed = False
        self._is_nudged = False

    @property
    def depth(self) -> int:
        """Pages waiting to be copied."""
        return self._waiting

    @property
    def is_closed(self) -> bool:
        """Whether nothing is taken in any more."""
        return self._closed

    def nudge(self) -> None:
        """Have `take` return without pages once there are none, for its caller to look up."""
        with self._wake:
            self._is_nudged = True
            self._wake.notify_all()

    def put(self, space: Space, pages: Sequence[PageWrite]) -> None:
        """Queue pages; those past the bound are told DROPPED."""
        with self._wake:
            closed = self._closed
            room = 0 if closed else max(0, self._pages_max - self._waiting)
            taken, refused = pages[:room], pages[room:]
            if not closed:
                self._queue.extend((space, page) for page in taken)
                self._waiting += len(taken)
                self._queue.extend((None, page) for page in refused)
                self._wake.notify_all()
        if not refused:
            return
        self._dropped(len(refused), _CLOSED if closed else "the queue is full")
        if closed:
            for page in refused:
                tell(page, SaveState.DROPPED)

    def take(self, together: Callable[[Space], int]) -> tuple[Space | None, list[PageWrite]]:
        """The next pages of one namespace and workflow, at most `together`; waits for one.

        Whoever takes them tells them how they ended before the next call. Without a namespace they were
        refused; no pages at all is the end, or a nudge where the queue is not closed.
        """
        queue = self._queue
        with self._wake:
            if not queue:
                self._busy = False
                self._wake.notify_all()
            while not queue:
                if self._closed or self._is_nudged:
                    self._is_nudged = False
                    return None, []
                self._wake.wait()
            space = queue[0][0]
            most = len(queue) if space is None else together(space)
            pages = [queue.popleft()[1]]
            workflow = pages[0].workflow
            while queue and len(pages) < most and queue[0][0] is space and queue[0][1].workflow == workflow:
                pages.append(queue.popleft()[1])
            self._busy = True
            if space is not None:
                self._waiting -= len(pages)
        return space, pages

    def drain(self, timeout_s: float) -> bool:
        """Wait until the queue is empty and the pages taken last are done. False where they are not in time."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def close(self) -> None:
        """Drop what still waits, telling each; `take` comes to its end."""
        with self._wake:
            self._closed = True
            left = [page for _, page in self._queue]
            self._queue.clear()
            waiting, self._waiting = self._waiting, 0
            self._wake.notify_all()
        if waiting:
            self._dropped(waiting, _CLOSED)
        for page in left:
            tell(page, SaveState.DROPPED)


def tell(page: PageWrite, state: SaveState) -> None:
    """Call its `done`, which is the caller's code: what it raises is logged."""
    run_callback(lambda: page.done(state))
