"""Where in the arena slabs side by side come free for the fewest bytes of pages moved.

By emptying a window: what lies in it goes into frames that are FREE, or runs that are vacant, elsewhere. Or by
closing gaps: what lies between vacant slabs moves down, until those are side by side.

No lock here, and nothing is moved: only `Compaction` asks, under the pool's lock (R1).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from heapq import nsmallest
from itertools import accumulate
from typing import NamedTuple

from workmem.store.frames import FrameState, FrameTable, Slab

_SECTION_RUNS = 256
"""Searched at a time: in a large arena a search of all takes too long."""
_RUNS_SEARCHED = 1024
_TRIED = 12
"""Of the places that look cheap in a section, which pages that are held may spoil."""
_GAPS_RUNS_MAX = 4
"""Runs' worth of bytes that are moved to close gaps: more is dearer than the pages that leave meanwhile."""
_GAPS_BYTES_MAX = 16 * 2**20
"""And some milliseconds of copying, unless it is one run."""
_NEVER = 2**60
"""Cost of what cannot move."""
_TRIES_PER_RUN = 4
"""A search that found nothing is repeated so often while a run's worth of pages leaves."""


class Found(NamedTuple):
    """What to move."""

    slabs: list[Slab]
    """In the order in which they are to."""
    first: int
    """Where they begin."""
    is_emptied: bool
    """Their pages go elsewhere; if not, they themselves go down to `first` and what follows it."""


class Section(NamedTuple):
    """What has slabs in a part of the arena, lowest first."""

    begin: int
    end: int
    slabs: list[Slab]


_Place = tuple[int, int, list[Slab] | None]
"""Bytes to move, where, and what moves down there; None for a window, which is emptied."""


class WindowSearch:
    """Looks in one section of the arena after the other."""

    def __init__(self, frames: FrameTable) -> None:
        self._frames = frames
        self._hand = 0
        self._next_try: dict[int, int] = {}
        """By frame size: how many bytes must have come free in all before it is looked again."""

    def cheapest(self, frame_bytes: int) -> Found | None:
        """What to move so that a frame of this size fits, few bytes of pages that nobody holds; None if nothing does.

        Until the frame is reserved, what comes free is kept from other sizes.
        """
        frames, span = self._frames, self._frames.span(frame_bytes)
        frames.keep(frame_bytes, 0, 0)
        room = sum(frames.loose_bytes.values()) + frames.vacant * frames.slab_bytes
        if room < span * frames.slab_bytes or frames.freed_bytes < self._next_try.get(frame_bytes, 0):
            return None
        runs = slabs_seen = 0
        while runs < _RUNS_SEARCHED and slabs_seen < frames.slab_count:
            section = self._section()
            runs += len(section.slabs) + 1
            slabs_seen += section.end - section.begin
            # So many of each: most windows may be cheaper than any gaps, and have nowhere to put their pages.
            windows = nsmallest(_TRIED, self._windows(section, span, frame_bytes), key=_cost)
            gaps = nsmallest(_TRIED, self._between_gaps(section, span), key=_cost)
            for _, first, slabs in sorted(windows + gaps, key=_cost):
                found = self._emptied(first, span) if slabs is None else _closed(first, slabs)
                if found is not None:
                    end = first if slabs is None else first + sum(slab.span for slab in slabs)
                    frames.keep(frame_bytes, end, end + span)
                    return found
            self._hand = section.end if section.end < frames.slab_count else 0
        self._next_try[frame_bytes] = frames.freed_bytes + span * frames.slab_bytes // _TRIES_PER_RUN
        return None

    def _section(self) -> Section:
        frames = self._frames
        begin, end = self._hand, frames.slab_count
        slabs: list[Slab] = []
        at = begin
        while (at := frames.is_taken.find(1, at)) >= 0:
            slab = frames.slabs[at]
            assert slab is not None
            at = slab.first + slab.span
            slabs.append(slab)
            if len(slabs) == _SECTION_RUNS:
                end = at
                break
        return Section(begin, end, slabs)

    def _windows(self, section: Section, span: int, frame_bytes: int) -> Iterator[_Place]:
        """Runs of `span` slabs to be emptied.

        Only those that begin or end where what has slabs does: between them nothing is cheaper.
        """
        starts = [slab.first for slab in section.slabs]
        ends = [slab.first + slab.span for slab in section.slabs]
        # There is no room for frames of this size, or it would not be made.
        before = [0, *accumulate(_page_bytes(slab, stays=frame_bytes) for slab in section.slabs)]
        latest = section.end - span
        for first in {section.begin, *ends, *(start - span for start in starts)}:
            if section.begin <= first <= latest:
                cost = before[bisect_left(starts, first + span)] - before[bisect_right(ends, first)]
                if cost < _NEVER:
                    yield cost, first, None

    def _emptied(self, first: int, span: int) -> Found | None:
        """What has slabs in a window, large frames first, if all its pages can move to where there is room."""
        frames = self._frames
        window = {slab.first: slab for slab in frames.slabs[first : first + span] if slab is not None}
        need: Counter[int] = Counter()
        for slab in window.values():
            if not is_movable(slab):
                return None
            need[slab.frames[0].size] += slab.used
        is_taken = frames.is_taken[:]
        is_taken[first : first + span] = b"\1" * span
        # In the order in which they will move, so that the runs found here are those that will be taken.
        for size in sorted(need, reverse=True):
            outside = frames.open.get(size, {}).values()
            room = sum(len(slab.free) for slab in outside if slab.first not in window and not slab.is_closing)
            run = frames.span(size)
            for _ in range(-(-max(0, need[size] - room) // (run * frames.slab_bytes // size))):
                at = is_taken.find(bytes(run))
                if at < 0:
                    return None
                is_taken[at : at + run] = b"\1" * run
        slabs = sorted(window.values(), key=lambda slab: slab.frames[0].size, reverse=True)
        return Found(slabs, first, is_emptied=True)

    def _between_gaps(self, section: Section, span: int) -> Iterator[_Place]:
        """Slabs between gaps, which move down so that `span` vacant ones are side by side behind them."""
        slabs = section.slabs
        before = [0, *accumulate(map(_page_bytes, slabs))]
        run_bytes = span * self._frames.slab_bytes
        limit = max(run_bytes, min(_GAPS_RUNS_MAX * run_bytes, _GAPS_BYTES_MAX))
        begins = [section.begin, *(slab.first + slab.span for slab in slabs)]
        ends = [*(slab.first for slab in slabs), section.end]
        gaps = [max(0, end - begin) for begin, end in zip(begins, ends, strict=True)]
        """Vacant slabs before each, and behind the last."""
        vacant, upto = gaps[0], 0
        for lowest, gap in enumerate(gaps):
            while vacant < span and upto < len(slabs):
                upto += 1
                vacant += gaps[upto]
            if vacant < span:
                return
            cost = before[upto] - before[lowest]
            if gap and upto > lowest and cost <= limit:
                yield cost, begins[lowest], slabs[lowest:upto]
            vacant -= gap


def _closed(first: int, slabs: list[Slab]) -> Found | None:
    return Found(slabs, first, is_emptied=False) if all(map(is_movable, slabs)) else None


def _page_bytes(slab: Slab, *, stays: int = 0) -> int:
    """Bytes to move, or far too many. `stays`: pages in frames of this size do not."""
    size = slab.frames[0].size
    return _NEVER if slab.is_closing or size == stays else slab.used * size


def _cost(place: _Place) -> int:
    return place[0]


def is_movable(slab: Slab) -> bool:
    """Whether nobody holds a page of it and none is on its way in or out."""
    return all(
        frame.state is FrameState.FREE or (frame.state is FrameState.RESIDENT and not frame.pins)
        for frame in slab.frames
    )
