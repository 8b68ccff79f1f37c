"""The saver thread: pages that an engine offers are copied into frames, behind the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import xxhash

from workmem.core.events import BoundReached, EventSink
from workmem.store.aside import step_aside
from workmem.store.catalog import Space
from workmem.store.contract import PageWrite, SaveState
from workmem.store.pool import Pool
from workmem.store.save_queue import SaveQueue, tell
from workmem.store.saving import NewPage, Write, pages_together, save_pages, write_page

log = logging.getLogger(__name__)


class SaverThread:
    """A bounded queue and the thread that empties it. `done` of every page is called exactly once."""

    def __init__(self, pool: Pool, sink: EventSink, pages_max: int) -> None:
        self._pool = pool
        self._sink = sink
        self._pages_max = pages_max
        self._queue = SaveQueue(pages_max, self._dropped)
        self._thread = threading.Thread(target=self._main, name="workmem-save", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Pages waiting to be copied."""
        return self._queue.depth

    def put(self, space: Space, pages: Sequence[PageWrite]) -> None:
        """See `SaveQueue.put`."""
        self._queue.put(space, pages)

    def drain(self, timeout_s: float) -> bool:
        """See `SaveQueue.drain`."""
        return self._queue.drain(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drop what still waits, telling each; end the thread. False if a page's copy never returns."""
        self._queue.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _dropped(self, count: int, why: str) -> None:
        self._pool.count("saves_dropped", count)
        detail = f"{count} pages refused: {why}"
        self._sink(BoundReached(name="store.save_queue", limit=self._pages_max, detail=detail))

    def _main(self) -> None:
        step_aside()
        while True:
            space, pages = self._queue.take(self._together)
            if not pages:
                return
            states = [SaveState.DROPPED] * len(pages)
            if space is not None:
                try:
                    states = self._save(space, pages)
                except Exception:  # thread main: these pages are lost, the thread and the others are not
                    log.exception("saving pages met a bug of ours")
            for page, state in zip(pages, states, strict=True):
                tell(page, state)

    def _together(self, space: Space) -> int:
        return pages_together(space, self._pool.state.arena.capacity_bytes)

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
