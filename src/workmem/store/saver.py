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
from workmem.store.frames import Frame
from workmem.store.outbox import run_callback
from workmem.store.pool import Pool
from workmem.store.tiers.page_header import PageHeader, pack

log = logging.getLogger(__name__)

_ROOM_WAIT_S = 1.0
"""How long a page waits for the disk to free room before it is dropped."""


class SaverThread:
    """A bounded queue and the thread that empties it. `done` of every page is called exactly once."""

    def __init__(self, pool: Pool, sink: EventSink, pages_max: int) -> None:
        self._pool = pool
        self._sink = sink
        self._pages_max = pages_max
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[tuple[Space, PageWrite] | PageWrite] = deque()
        """A bare PageWrite was refused and only has to be told so, on this thread as promised."""
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
                self._queue.extend(refused)
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
        for item in left:
            _tell(item if isinstance(item, PageWrite) else item[1], SaveState.DROPPED)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while True:
            with self._lock:
                self._busy = False
                self._wake.notify_all()
                while not self._queue:
                    if self._closed:
                        return
                    self._wake.wait()
                item = self._queue.popleft()
                self._busy = True
                if not isinstance(item, PageWrite):
                    self._waiting -= 1
            if isinstance(item, PageWrite):
                _tell(item, SaveState.DROPPED)
                continue
            space, page = item
            try:
                state = self._save(space, page)
            except Exception:  # thread main: one page is lost, the thread and the others are not
                log.exception("saving a page met a bug of ours")
                state = SaveState.DROPPED
            _tell(page, state)

    def _save(self, space: Space, page: PageWrite) -> SaveState:
        begun = self._pool.begin_save(space, page.block, _ROOM_WAIT_S, page.workflow)
        if isinstance(begun, SaveState):
            return begun
        try:
            self._fill(space, page, begun)
        except Exception as error:  # noqa: BLE001  # plugin boundary: the copy is the caller's code
            log.warning("a page could not be copied: %s", error)
            self._pool.abort_save(space, page.block, begun)
            self._sink(BoundReached(name="store.save_copy", limit=0, detail=f"copy_into raised {error!r}"))
            return SaveState.DROPPED
        return self._pool.commit_save(space, page.block, begun)

    def _fill(self, space: Space, page: PageWrite, frame: Frame) -> None:
        with self._pool.state.arena.writable(frame.offset, frame.size) as whole:
            fill(space, page, whole)


def fill(space: Space, page: PageWrite, whole: memoryview) -> None:
    """Write a page into its frame: the payload first, then the header that vouches for it (R2)."""
    start, end = space.header_bytes, space.header_bytes + space.layout.page_bytes
    with whole[start:end] as payload:
        page.copy_into(payload)
        checksums = tuple(xxhash.xxh3_64_intdigest(payload[begin:stop]) for begin, stop in space.spans)
    # The rest of the frame goes to disk along with the page: nothing of a former page may.
    whole[end:] = bytes(len(whole) - end)
    block = page.block
    header = PageHeader(space.root, block.key, block.parent, block.depth, block.tokens, checksums)
    with whole[:start] as place:
        pack(header, space.layout, place)


def _tell(page: PageWrite, state: SaveState) -> None:
    run_callback(lambda: page.done(state))
