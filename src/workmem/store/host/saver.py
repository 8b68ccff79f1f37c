"""The saver thread of a client: pages are copied into frames of the server's arena, in place."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from workmem.core.errors import TransferError
from workmem.core.events import BoundReached, EventSink
from workmem.store.aside import step_aside
from workmem.store.catalog import Space
from workmem.store.contract import PageWrite, SaveState
from workmem.store.host import messages
from workmem.store.host.link import Link
from workmem.store.host.wire import PAGES_MAX, ErrorCode, Kind, Refused
from workmem.store.save_queue import SaveQueue, tell
from workmem.store.saver import fill

log = logging.getLogger(__name__)

_BATCH_BYTES_MAX = 64 * 2**20
_ARENA_SHARE = 16
"""A batch takes at most one part in so many of the arena, so that it does not push out what it adds."""


class _Filled(msgspec.Struct, frozen=True):
    id: int
    page: PageWrite


class HostSaver:
    """A bounded queue and the thread that empties it. `done` of every page is called exactly once."""

    def __init__(
        self, connect: Callable[[], Link], finished: Callable[[Link], None], sink: EventSink, pages_max: int
    ) -> None:
        """`connect` makes a link or raises TransferError; `finished` is told of each on which nothing is written any more."""
        self.counts: Counter[str] = Counter()
        self._connect = connect
        self._finished = finished
        self._link: Link | None = None
        self._sink = sink
        self._pages_max = pages_max
        self._queue = SaveQueue(pages_max, self._dropped)
        self._thread = threading.Thread(target=self._main, name="workmem-host-save", daemon=True)
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

    def let_go(self) -> None:
        """The server is gone, or was: between two batches, give the connection up, and the arena with it.

        A file that is an arena is locked for as long as anybody has it mapped: its next owner waits for that.
        """
        self._queue.nudge()

    def close(self, timeout_s: float) -> bool:
        """Drop what still waits, telling each; end the thread. False if a page's copy never returns."""
        self._queue.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        step_aside()
        while True:
            space, pages = self._queue.take(self._together)
            if not pages:
                if self._queue.is_closed:
                    break
                self._give_link_up()
                continue
            told: list[PageWrite] = []
            try:
                if space is not None:
                    self._save(space, pages, told)
            except TransferError as error:
                self._dropped(len(pages) - len(told), str(error))
                self._give_link_up()
            except Exception:  # thread main: one batch is lost, the thread and the others are not
                log.exception("saving pages met a bug of ours")
                self._give_link_up()
            done = {id(page) for page in told}
            for page in pages:
                if id(page) not in done:
                    tell(page, SaveState.DROPPED)
        if self._link is not None:
            self._link.tell(Kind.GOODBYE, b"")
            self._give_link_up()

    def _give_link_up(self) -> None:
        """Between two batches this thread, the only one that writes, is out of every frame: so says the server's next link."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
            self._finished(link)

    def _together(self, space: Space) -> int:
        share = _BATCH_BYTES_MAX
        if self._link is not None:
            share = min(share, self._link.welcome.arena_bytes // _ARENA_SHARE)
        return max(1, min(PAGES_MAX, share // space.frame_bytes))

    def _save(self, space: Space, pages: Sequence[PageWrite], told: list[PageWrite]) -> None:
        """Reserve, fill, commit. Pages that have been told how they ended go into `told`."""

        def ended(page: PageWrite, state: SaveState) -> None:
            told.append(page)
            tell(page, state)

        link = self._attached()
        began = time.monotonic()
        body = messages.pack_reserve(space.root, [page.block for page in pages], pages[0].workflow)
        try:
            reserved = messages.unpack_reserved(_reserve(link, space, body), len(pages))
        except Refused as error:
            # Of this namespace nothing can be saved; the connection is as good as before for the others.
            self._dropped(len(pages), str(error))
            for page in pages:
                ended(page, SaveState.DROPPED)
            return
        filled: list[_Filled] = []
        given_up = 0
        for index, page in enumerate(pages):
            state = reserved.states[index]
            if state is not None:
                self.counts["saves_refused"] += state is SaveState.DROPPED
                ended(page, state)
                continue
            number = reserved.first + index
            # Held up, or stopped, for too long, the frame is no longer ours to fill.
            in_time = time.monotonic() - began < reserved.ttl_s
            if not in_time or not self._fill(link, space, page, reserved.offsets[index]):
                link.tell(Kind.ABORT, messages.pack_ids([number]))
                given_up += 1
                self._dropped(1, "a page could not be copied in time")
                ended(page, SaveState.DROPPED)
                continue
            filled.append(_Filled(number, page))
            if time.monotonic() - began > reserved.ttl_s / 4:
                self._commit(link, filled, ended)
                filled = []
        if given_up and not filled:
            # A reply says that they were heard: a link found lost only by the next batch would keep their frames.
            link.ask(Kind.COMMIT)
        self._commit(link, filled, ended)

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
        self, link: Link, filled: Sequence[_Filled], ended: Callable[[PageWrite, SaveState], None]
    ) -> None:
        if not filled:
            return
        reply = link.ask(Kind.COMMIT, messages.pack_ids([entry.id for entry in filled]))
        for entry, state in zip(filled, messages.unpack_states(reply, len(filled)), strict=True):
            self.counts["saves_refused"] += state is SaveState.DROPPED
            ended(entry.page, state)

    def _attached(self) -> Link:
        """The link, made anew where it was lost. Raises TransferError without one."""
        if self._link is not None and not self._link.is_usable:
            self._give_link_up()
        if self._link is None:
            self._link = self._connect()
        return self._link

    def _dropped(self, count: int, why: str) -> None:
        self.counts["saves_refused"] += count
        detail = f"{count} pages were not saved: {why}"
        self._sink(BoundReached(name="store.host.save", limit=self._pages_max, detail=detail))


def _reserve(link: Link, space: Space, body: bytes) -> memoryview:
    """The reply to RESERVE. A server that does not know the namespace, or not any more, hears of it."""
    try:
        return link.ask(Kind.RESERVE, body)
    except Refused as error:
        if error.code is not ErrorCode.UNREGISTERED:
            raise
    link.register(space.namespace)
    return link.ask(Kind.RESERVE, body)
