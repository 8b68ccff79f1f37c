"""The saver thread: pages that an engine offers are copied into frames, behind the engine."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

import xxhash

from workmem.core.events import BoundReached, EventSink
from workmem.store.catalog import Space
from workmem.store.contract import PageWrite, SaveState
from workmem.store.outbox import run_callback
from workmem.store.pool import Pool
from workmem.store.saving import NewPage, Write, pages_together, save_pages, write_page

log = logging.getLogger(__name__)

_Offer = tuple[Space | None, PageWrite]
"""Without a space, the page was refused and only has to be told so, on the saver's thread as promised."""


class SaverThread:
    """A bounded queue and the thread that empties it. `done` of every page is called exactly once."""

    def __init__(self, pool: Pool, sink: EventSink, pages_max: int) -> None:
        self._pool = pool
        self._sink = sink
        self._pages_max = pages_max
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[_Offer] = deque()
        self._waiting = 0
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="workmem-save", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Pages waiting to be copied."""
        return self._waiting

    def put(self, space: Space, pages: Sequence[PageWrite]) -> None:
        """Queue pages; those past the bound are told DROPPED."""
        with self._lock:
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
        self._drop(len(refused), closed=closed)
        if closed:
            for page in refused:
                _tell(page, SaveState.DROPPED)

    def _drop(self, count: int, *, closed: bool) -> None:
        self._pool.count("saves_dropped", count)
        detail = f"{count} pages refused" + (", the store is closed" if closed else "")
        self._sink(BoundReached(name="store.save_queue", limit=self._pages_max, detail=detail))

    def drain(self, timeout_s: float) -> bool:
        """Wait until the queue is empty and the last page is done."""
        with self._lock:
            return self._wake.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drop what still waits, telling each; end the thread. False if a page's copy never returns."""
        with self._lock:
            self._closed = True
            left = list(self._queue)
            self._queue.clear()
            waiting, self._waiting = self._waiting, 0
            self._wake.notify_all()
        if waiting:
            self._drop(waiting, closed=True)
        for _, page in left:
            _tell(page, SaveState.DROPPED)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while batch := self._next():
            pages = [page for _, page in batch]
            states = [SaveState.DROPPED] * len(batch)
            space = batch[0][0]
            if space is not None:
                try:
                    states = self._save(space, pages)
                except Exception:  # thread main: these pages are lost, the thread and the others are not
                    log.exception("saving pages met a bug of ours")
            for page, state in zip(pages, states, strict=True):
                _tell(page, state)

    def _next(self) -> list[_Offer]:
        """The next pages of one namespace that are saved together; empty when the thread is to end."""
        queue = self._queue
        with self._lock:
            if not queue:
                self._busy = False
                self._wake.notify_all()
            while not queue:
                if self._closed:
                    return []
                self._wake.wait()
            space = queue[0][0]
            most = 1 if space is None else pages_together(space, self._pool.state.arena.capacity_bytes)
            batch = [queue.popleft()]
            while queue and len(batch) < most and queue[0][0] is space:
                batch.append(queue.popleft())
            self._busy = True
            if space is not None:
                self._waiting -= len(batch)
        return batch

    def _save(self, space: Space, pages: Sequence[PageWrite]) -> list[SaveState]:
        return save_pages(
            self._pool,
            self._sink,
            space,
            [NewPage(page.block, writing(space, page), page.workflow) for page in pages],
        )


def writing(space: Space, page: PageWrite) -> Write:
    """How an offered page is copied: by the caller's code, and then read for its checksums if that took none."""

    def write(payload: memoryview) -> tuple[int, ...]:
        sums = page.copy_into(payload)
        if sums is not None:
            return sums
        return tuple([xxhash.xxh3_64_intdigest(payload[begin:stop]) for begin, stop in space.spans])

    return write


def fill(space: Space, page: PageWrite, whole: memoryview) -> None:
    """Write an offered page into its frame, header and all."""
    write_page(space, NewPage(page.block, writing(space, page)), whole)


def _tell(page: PageWrite, state: SaveState) -> None:
    run_callback(lambda: page.done(state))
