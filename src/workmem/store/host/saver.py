"""The saver thread of a client: pages are copied into frames of the server's arena, in place."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from workmem.core.errors import TransferError
from workmem.core.events import BoundReached, EventSink
from workmem.store.catalog import Space
from workmem.store.contract import PageWrite, SaveState
from workmem.store.host import messages
from workmem.store.host.link import Link
from workmem.store.host.wire import PAGES_MAX, Kind, Refused
from workmem.store.outbox import run_callback
from workmem.store.saver import fill

log = logging.getLogger(__name__)

_BATCH_BYTES_MAX = 64 * 2**20
_ARENA_SHARE = 16
"""A batch takes at most one part in so many of the arena, so that it does not push out what it adds."""


class _Job(msgspec.Struct, frozen=True):
    space: Space
    page: PageWrite
    refused: bool
    """The queue was full; told so on the saver's thread, as promised."""

    @property
    def kin(self) -> tuple[bytes, str, bool]:
        """What jobs that go in one message have in common."""
        return self.space.root, self.page.workflow, self.refused


class _Filled(msgspec.Struct, frozen=True):
    id: int
    page: PageWrite


class HostSaver:
    """A bounded queue and the thread that empties it. `done` of every page is called exactly once."""

    def __init__(self, connect: Callable[[], Link], sink: EventSink, pages_max: int) -> None:
        self.counts: Counter[str] = Counter()
        self._connect = connect
        self._link: Link | None = None
        self._sink = sink
        self._pages_max = pages_max
        self._wake = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._waiting = 0
        self._busy = False
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="workmem-host-save", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Pages waiting to be copied."""
        return self._waiting

    def put(self, space: Space, pages: Sequence[PageWrite]) -> None:
        """Queue pages; those past the bound are told DROPPED."""
        with self._wake:
            closed = self._closed
            room = 0 if closed else max(0, self._pages_max - self._waiting)
            if not closed:
                self._queue.extend(_Job(space, page, index >= room) for index, page in enumerate(pages))
                self._waiting += min(room, len(pages))
                self._wake.notify_all()
        if len(pages) > room:
            self._dropped(len(pages) - room, "the store is closed" if closed else "the queue is full")
        if closed:
            _tell(pages, SaveState.DROPPED)

    def drain(self, timeout_s: float) -> bool:
        """Wait until the queue is empty and the last page is done."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drop what still waits, telling each; end the thread. False if a page's copy never returns."""
        with self._wake:
            self._closed = True
            left = [job.page for job in self._queue]
            self._queue.clear()
            waiting, self._waiting = self._waiting, 0
            self._wake.notify_all()
        if waiting:
            self._dropped(waiting, "the store is closed")
        _tell(left, SaveState.DROPPED)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        while batch := self._next():
            pages = [job.page for job in batch]
            told: list[PageWrite] = []
            try:
                if not batch[0].refused:
                    self._save(batch[0].space, pages, told)
            except TransferError as error:
                self._dropped(len(pages) - len(told), str(error))
                if self._link is not None and isinstance(error, Refused):
                    # It does not know the namespace: a new connection declares it.
                    self._link.lose()
            except Exception:  # thread main: one batch is lost, the thread and the others are not
                log.exception("saving pages met a bug of ours")
            done = {id(page) for page in told}
            _tell([page for page in pages if id(page) not in done], SaveState.DROPPED)
        if self._link is not None:
            # Nothing is being written any more, so nothing needs to be stranded.
            self._link.tell(Kind.GOODBYE, b"")
            self._link.close()

    def _next(self) -> list[_Job]:
        """The next pages of one namespace, at most a batch; empty when the thread is to end."""
        with self._wake:
            self._busy = False
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._queue or self._closed)
            batch: list[_Job] = []
            queue = self._queue
            while queue and len(batch) < self._batch_pages(queue[0].space):
                if batch and queue[0].kin != batch[0].kin:
                    break
                batch.append(queue.popleft())
            self._waiting -= sum(not job.refused for job in batch)
            self._busy = bool(batch)
            return batch

    def _batch_pages(self, space: Space) -> int:
        share = _BATCH_BYTES_MAX
        if self._link is not None:
            share = min(share, self._link.welcome.arena_bytes // _ARENA_SHARE)
        return max(1, min(PAGES_MAX, share // space.frame_bytes))

    def _save(self, space: Space, pages: Sequence[PageWrite], told: list[PageWrite]) -> None:
        """Reserve, fill, commit. Pages that have been told how they ended go into `told`."""

        def tell(page: PageWrite, state: SaveState) -> None:
            told.append(page)
            _tell([page], state)

        link = self._attached()
        began = time.monotonic()
        body = messages.pack_reserve(space.root, [page.block for page in pages], pages[0].workflow)
        reserved = messages.unpack_reserved(link.ask(Kind.RESERVE, body), len(pages))
        filled: list[_Filled] = []
        for index, page in enumerate(pages):
            state = reserved.states[index]
            if state is not None:
                self.counts["saves_refused"] += state is SaveState.DROPPED
                tell(page, state)
                continue
            number = reserved.first + index
            # Held up, or stopped, for too long, the frame is no longer ours to fill.
            in_time = time.monotonic() - began < reserved.ttl_s
            if not in_time or not self._fill(link, space, page, reserved.offsets[index]):
                link.tell(Kind.ABORT, messages.pack_ids([number]))
                self._dropped(1, "a page could not be copied in time")
                tell(page, SaveState.DROPPED)
                continue
            filled.append(_Filled(number, page))
            if time.monotonic() - began > reserved.ttl_s / 4:
                self._commit(link, filled, tell)
                filled = []
        self._commit(link, filled, tell)

    def _fill(self, link: Link, space: Space, page: PageWrite, offset: int) -> bool:
        with link.arena.at(offset, space.frame_bytes) as frame:
            try:
                fill(space, page, frame)
            except Exception as error:  # noqa: BLE001  # plugin boundary: the copy is the caller's code
                log.warning("a page could not be copied: %s", error)
                detail = f"copy_into raised {error!r}"
                self._sink(BoundReached(name="store.save_copy", limit=0, detail=detail))
                return False
        return True

    def _commit(
        self, link: Link, filled: Sequence[_Filled], tell: Callable[[PageWrite, SaveState], None]
    ) -> None:
        if not filled:
            return
        reply = link.ask(Kind.COMMIT, messages.pack_ids([entry.id for entry in filled]))
        for entry, state in zip(filled, messages.unpack_states(reply, len(filled)), strict=True):
            self.counts["saves_refused"] += state is SaveState.DROPPED
            tell(entry.page, state)

    def _attached(self) -> Link:
        """The link, made anew where it was lost. Raises TransferError without one."""
        if self._link is not None and not self._link.is_usable:
            self._link.close()
            self._link = None
        if self._link is None:
            self._link = self._connect()
        return self._link

    def _dropped(self, count: int, why: str) -> None:
        self.counts["saves_refused"] += count
        detail = f"{count} pages were not saved: {why}"
        self._sink(BoundReached(name="store.host.save", limit=self._pages_max, detail=detail))


def _tell(pages: Sequence[PageWrite], state: SaveState) -> None:
    for page in pages:
        run_callback(lambda page=page: page.done(state))
