"""Compaction of the arena: pages move together, so that what is FREE here and there is a place for any size again.

Two ways. A size that has no slab has slabs side by side emptied for it, or gaps between others closed, whichever
moves fewer bytes. And where too much lies FREE inside slabs, the emptiest gives its pages to others of its size,
some at a time. With one frame size in the arena neither ever happens.

Only pages that nobody holds move, so no address that a reader knows ever changes (R3). Every method is called
with the pool's lock held (R1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice

from workmem.store.arena import Arena
from workmem.store.catalog import Catalog, Space
from workmem.store.frames import Frame, FrameState, FrameTable, Slab
from workmem.store.tiers.page_header import GENERATION_BYTES, set_generation
from workmem.store.windows import WindowSearch, is_movable

PACKED_SHARE = 1 / 32
"""Of the arena: as much may be fragmented before pages move for that alone. What is lost behind frames counts."""
STEP_BYTES = 2**20
"""Bytes moved for that under one hold of the lock, or one page: some tenths of a millisecond."""
_SLABS_WEIGHED = 64
"""Slabs of a size that are looked at to find the emptiest."""
_FREED_BETWEEN_TRIES = 2**20
"""A search that found nothing is not repeated before so many bytes have come free."""


class Compaction:
    """Moves pages. `moved` is told the offset from which a page went, and the one to which it did."""

    def __init__(
        self,
        arena: Arena,
        frames: FrameTable,
        catalog: Catalog,
        counts: defaultdict[str, int],
        start_filling: Callable[[Frame, Space], None],
        moved: Callable[[int, int], None],
    ) -> None:
        self._arena = arena
        self._frames = frames
        self._catalog = catalog
        self._counts = counts
        self._start_filling = start_filling
        self._moved = moved
        self._search = WindowSearch(frames)
        self._closing: Slab | None = None
        """Slab whose pages are on their way to others."""
        self._next_pack = 0
        """How many bytes must have come free in all before a slab is looked for again."""

    def make_room(self, frame_bytes: int) -> None:
        """Make a run of slabs vacant for a frame of this size, if that takes no more than moving pages.

        Without it a new layout could only get one by evicting whatever else lies there.
        """
        if self._frames.freed_bytes >= self._next_pack:
            self._pack(STEP_BYTES)
        if self._frames.has_room(frame_bytes):
            return
        found = self._search.cheapest(frame_bytes)
        if found is None:
            return
        # All at once, for the frame is wanted now. What that copies the search has bounded.
        if found.is_emptied:
            self._empty(found.slabs)
        else:
            at = found.first
            for slab in found.slabs:
                self._shift(slab, at)
                at += slab.span

    def tend(self) -> int:
        """Do a step of what no eviction asked for: something else has left, or is no longer held. Bytes moved."""
        return self._pack(STEP_BYTES) if len(self._frames.runs) > 1 else 0

    def _pack(self, bytes_max: int) -> int:
        """Move up to `bytes_max`, or one page, out of sparse slabs where too much is fragmented. Bytes moved."""
        frames, moved = self._frames, 0
        limit = frames.capacity_bytes * PACKED_SHARE
        while moved < bytes_max and (self._closing is not None or frames.fragmented_bytes > limit):
            slab = self._closing or self._emptiest()
            if slab is None:
                self._next_pack = frames.freed_bytes + _FREED_BETWEEN_TRIES
                break
            slab.is_closing = self._goes_on(slab)
            self._closing = slab if slab.is_closing else None
            if self._closing is not None:
                frame = next(frame for frame in slab.frames if frame.state is not FrameState.FREE)
                moved += frame.size
                self._move_page(frame)
        return moved

    def _empty(self, slabs: Sequence[Slab]) -> None:
        for slab in slabs:
            slab.is_closing = True
        pages = [frame for slab in slabs for frame in slab.frames if frame.state is not FrameState.FREE]
        if not all(map(self._move_page, pages)):
            # What came free on the way was cut otherwise than foreseen, and the last do not fit.
            for slab in slabs:
                slab.is_closing = False

    def _goes_on(self, slab: Slab) -> bool:
        """Whether a slab that is to be emptied has pages left, which may move and for which there is room."""
        size = slab.frames[0].size
        if self._frames.slabs[slab.first] is not slab or not is_movable(slab):
            return False
        return len(slab.frames) * size <= self._frames.loose_bytes[size]

    def _emptiest(self) -> Slab | None:
        """The slab with the smallest part in use, of those whose pages all fit into others of their size."""
        best: Slab | None = None
        least = 1.0
        for size, loose in self._frames.loose_bytes.items():
            runs = self._frames.open.get(size)
            if not runs:
                continue
            weighed = list(islice(runs.values(), _SLABS_WEIGHED))
            if loose < len(weighed[0].frames) * size:
                continue
            for slab in sorted(weighed, key=_use):
                if _use(slab) >= least:
                    break
                if is_movable(slab):
                    best, least = slab, _use(slab)
                    break
                # Behind the others: what comes next goes into slabs that cannot be emptied anyway.
                runs[slab.first] = runs.pop(slab.first)
        return best

    def _move_page(self, old: Frame) -> bool:
        """Move one page to another slab. False where there is no room for it."""
        row, new = old.owner, self._frames.reserve(old.size)
        if new is None:
            return False
        space = self._catalog.space[row]
        self._start_filling(new, space)
        header = space.header_bytes
        with (
            self._arena.writable(new.offset, new.size) as to,
            self._arena.readable(old.offset, old.size) as source,
        ):
            to[header:] = source[header:]
            to[: header - GENERATION_BYTES] = source[: header - GENERATION_BYTES]
        self._frames.move(new, FrameState.RESIDENT)
        new.owner = row
        self._catalog.frame[row] = new
        self._frames.move(old, FrameState.EVICTING)
        self._moved(old.offset, new.offset)
        # Nobody would know of the bytes here when the page is purged (R9).
        self._arena.clear(old.offset, old.size)
        self._frames.free(old)
        self._counts["dram_moved_bytes"] += old.size
        return True

    def _shift(self, slab: Slab, first: int) -> None:
        """Move a run with all its pages down to slab `first`, maybe onto a part of itself."""
        if slab.first == first:
            return
        before = [frame.offset for frame in slab.frames]
        size = slab.frames[0].size
        self._frames.shift(slab, first)
        for frame, offset in zip(slab.frames, before, strict=True):
            if frame.state is not FrameState.FREE:
                # The generation first: who still reads there is to know, whatever bytes it sees after (R3).
                with self._arena.writable(offset, self._catalog.space[frame.owner].header_bytes) as header:
                    set_generation(header, frame.generation)
                # Lowest first: a place may be the former one of the page before.
                self._moved(offset, frame.offset)
        with (
            self._arena.writable(slab.frames[0].offset, len(before) * size) as to,
            self._arena.readable(before[0], len(before) * size) as source,
        ):
            to[:] = source
        left = max(before[0], slab.frames[-1].offset + size)
        self._arena.clear(left, before[-1] + size - left)
        self._counts["dram_moved_bytes"] += slab.used * size


def _use(slab: Slab) -> float:
    return slab.used / len(slab.frames)
