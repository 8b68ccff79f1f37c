"""Saving pages, whoever's thread it is on: frames are taken, filled and made visible some pages at a time.

The pool's lock is taken twice for all of them together, and what the steps of one page have warmed up in the
processor's caches is still there for the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from workmem.core.events import BoundReached, EventSink
from workmem.store.catalog import Space
from workmem.store.contract import BlockId, SaveState
from workmem.store.frames import Frame
from workmem.store.pool import Pool

log = logging.getLogger(__name__)

ROOM_WAIT_S = 1.0
"""How long a page waits for the disk to free room before it is dropped."""
_BATCH_BYTES_MAX = 4 * 2**20
"""Some milliseconds of copying: so long is a page that is ready kept from sight."""
_ARENA_SHARE = 16
"""A batch takes at most one part in so many of the arena, so that it does not push out what it adds."""

Write = Callable[[memoryview], tuple[int, ...]]
"""Fills the payload of a page; returns the checksum of each slice."""


class NewPage(msgspec.Struct, frozen=True):
    """A page to be saved."""

    block: BlockId
    write: Write
    workflow: str = ""


def pages_together(space: Space, arena_bytes: int) -> int:
    """How many pages are saved at a time."""
    return max(1, min(_BATCH_BYTES_MAX, arena_bytes // _ARENA_SHARE) // space.frame_bytes)


def save_pages(pool: Pool, sink: EventSink, space: Space, pages: Sequence[NewPage]) -> list[SaveState]:
    """Copy pages into dram and make them visible, parents before children. How each of them ended."""
    if len(pages) == 1:
        return [_save_one(pool, sink, space, pages[0])]
    states: list[SaveState] = []
    step = pages_together(space, pool.state.arena.capacity_bytes)
    while len(states) < len(pages):
        batch = pages[len(states) : len(states) + step]
        workflows = [page.workflow for page in batch]
        begun = pool.begin_saves(space, [page.block for page in batch], workflows)
        if not begun:
            begun = [pool.begin_save(space, batch[0].block, ROOM_WAIT_S, batch[0].workflow)]
        states += _fill_all(pool, sink, space, batch[: len(begun)], begun)
    return states


def _save_one(pool: Pool, sink: EventSink, space: Space, page: NewPage) -> SaveState:
    begun = pool.begin_save(space, page.block, ROOM_WAIT_S, page.workflow)
    if isinstance(begun, SaveState):
        return begun
    if not _fill(pool, sink, space, page, begun):
        return SaveState.DROPPED
    return pool.commit_save(space, page.block, begun)


def write_page(space: Space, page: NewPage, whole: memoryview) -> None:
    """Write a page into its frame: the payload first, then the header that vouches for it (R2)."""
    end = space.header_bytes + space.page_bytes
    with whole[space.header_bytes : end] as payload:
        checksums = page.write(payload)
    if end < space.frame_bytes:
        # The rest of the frame goes to disk along with the page: nothing of a former page may.
        whole[end:] = bytes(space.frame_bytes - end)
    block = page.block
    space.form.write(whole, space.root, block.key, block.parent, block.depth, block.tokens, checksums)


def _fill_all(
    pool: Pool, sink: EventSink, space: Space, pages: Sequence[NewPage], begun: Sequence[Frame | SaveState]
) -> list[SaveState]:
    """Fill the frames that were begun and commit them together."""
    states = [begin if isinstance(begin, SaveState) else SaveState.DROPPED for begin in begun]
    filled: list[tuple[BlockId, Frame]] = []
    places: list[int] = []
    for index, frame in enumerate(begun):
        if not isinstance(frame, Frame):
            continue
        try:
            is_filled = _fill(pool, sink, space, pages[index], frame)
        except BaseException:
            for at, left in enumerate(begun[index + 1 :], index + 1):
                if isinstance(left, Frame):
                    filled.append((pages[at].block, left))
            for block, left in filled:
                pool.abort_save(space, block, left)
            raise
        if is_filled:
            filled.append((pages[index].block, frame))
            places.append(index)
    if filled:
        for index, state in zip(places, pool.commit_saves(space, filled), strict=True):
            states[index] = state
    return states


def _fill(pool: Pool, sink: EventSink, space: Space, page: NewPage, frame: Frame) -> bool:
    whole = pool.state.arena.writable(frame.offset, frame.size)
    try:
        write_page(space, page, whole)
    except Exception as error:  # noqa: BLE001  # plugin boundary: the copy is the caller's code
        log.warning("a page could not be copied: %s", error)
        pool.abort_save(space, page.block, frame)
        sink(BoundReached(name="store.save_copy", limit=0, detail=f"copy_into raised {error!r}"))
        return False
    except BaseException:
        # Ctrl-C on a caller's own thread: nobody else knows of the frame, and it must not stay FILLING for ever.
        pool.abort_save(space, page.block, frame)
        raise
    finally:
        whole.release()
    return True
