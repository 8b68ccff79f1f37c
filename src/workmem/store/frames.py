"""Frames: page-sized places in the arena, cut out of slabs, and the exact ledger of who holds what.

The arena is cut into slabs of equal size. A slab (or a run of them, for pages larger than one) serves
frames of a single size while any of them is in use and goes back when none is, so that layouts of
several models share one arena. Rules cited as R1-R10 are in docs/internals/buffer-rules.md.

No lock here: only the pool calls this, under its own (R1).
"""

from __future__ import annotations

from enum import StrEnum
from heapq import nsmallest
from itertools import accumulate

from workmem.core.errors import InvariantError
from workmem.store.arena import ALIGNMENT_BYTES

SLAB_BYTES_MAX = 16 * 2**20
_SLABS = 2048
"""How finely an arena is cut: what a layout leaves free in its last slabs nobody else can use meanwhile."""
_SLAB_BYTES_MIN = 64 * 2**10
_SLABS_FEW = 32
"""Of a small arena, which is then cut finer than that."""
_TAIL_SHARE_MAX = 1 / 40
"""Of a run of slabs, behind its last frame: those bytes are lost for as long as the run is there."""
_RUNS_MIN = 32
"""Runs of one size that an arena has room for at least, lest one layout take it in a few."""
_WINDOWS_TRIED = 24
_FREES_BETWEEN_TRIES = 16
"""A search for a window that found none is not repeated after every single page that leaves."""

NO_OWNER = -1


class FrameState(StrEnum):
    """Where a frame is in its life. Strings, whose hash is free: several steps per page are looked up by it."""

    FREE = "free"
    RESERVED = "reserved"
    FILLING = "filling"
    RESIDENT = "resident"
    EVICTING = "evicting"
    QUARANTINED = "quarantined"


_NEXT: dict[FrameState, frozenset[FrameState]] = {
    FrameState.FREE: frozenset({FrameState.RESERVED}),
    FrameState.RESERVED: frozenset({FrameState.FILLING, FrameState.FREE}),
    FrameState.FILLING: frozenset({FrameState.RESIDENT, FrameState.QUARANTINED, FrameState.FREE}),
    FrameState.RESIDENT: frozenset({FrameState.EVICTING, FrameState.QUARANTINED}),
    FrameState.EVICTING: frozenset({FrameState.FREE}),
    FrameState.QUARANTINED: frozenset({FrameState.FREE}),
}
_UNPINNED = frozenset({FrameState.EVICTING, FrameState.FREE})
_RESIDENT, _FILLING = FrameState.RESIDENT, FrameState.FILLING


class Frame:
    """A place for one page. `pins` counts holds (R3); `generation` grows each time it gives its page up."""

    __slots__ = ("generation", "offset", "owner", "pins", "size", "slab", "state")

    def __init__(self, slab: Slab, offset: int, size: int, generation: int) -> None:
        self.slab = slab
        self.offset = offset
        self.size = size
        self.state = FrameState.FREE
        self.pins = 0
        self.generation = generation
        self.owner = NO_OWNER
        """Row of the block whose page it holds."""


class Slab:
    """A run of arena slabs that serves frames of one size."""

    __slots__ = ("first", "frames", "free", "is_closing", "span")

    def __init__(self, first: int, span: int, slab_bytes: int, frame_bytes: int, generation: int) -> None:
        self.first = first
        self.span = span
        count = span * slab_bytes // frame_bytes
        self.frames: list[Frame] = [
            Frame(self, first * slab_bytes + index * frame_bytes, frame_bytes, generation)
            for index in range(count)
        ]
        # Popped from the end: low addresses first, so that neighbours in a prefix are neighbours in memory.
        self.free = self.frames[::-1]
        self.is_closing = False
        """Its pages are being moved out: it takes no new ones."""

    @property
    def used(self) -> int:
        """Frames that are not FREE."""
        return len(self.frames) - len(self.free)


class FrameTable:
    """All frames of an arena. `reserve` takes one, `free` gives it back, `move` checks every step."""

    def __init__(self, capacity_bytes: int) -> None:
        self.slab_bytes = _slab_bytes(capacity_bytes)
        self.slab_count = capacity_bytes // self.slab_bytes
        self.capacity_bytes = capacity_bytes
        self._map: list[Slab | None] = [None] * self.slab_count
        """Who has each slab of the arena."""
        self._vacant = self.slab_count
        self._slabs: dict[int, dict[int, Slab]] = {}
        self._open: dict[int, dict[int, Slab]] = {}
        """Of those, the ones with a FREE frame."""
        self._spans: dict[int, int] = {}
        self._loose_bytes = 0
        """FREE frames inside slabs that are taken."""
        self._frees = 0
        self._kept = (0, 0, 0)
        """Frame size that slabs from the first to before the second number are kept for."""
        self._next_try: dict[int, int] = {}
        """By frame size: how many frees there must have been before a window is looked for again."""
        self.ledger: dict[FrameState, int] = dict.fromkeys(FrameState, 0)
        self.ledger[FrameState.FREE] = capacity_bytes
        self.reached_bytes = 0
        """End of the highest slab ever taken."""
        self.in_use = 0
        """Frames that are not FREE."""
        self._generation = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all frames that are not FREE."""
        return self.capacity_bytes - self.ledger[FrameState.FREE]

    @property
    def fragmented_bytes(self) -> int:
        """Bytes without a page that no other size can have: FREE frames of slabs in use, and what is behind frames."""
        return self.ledger[FrameState.FREE] - self._vacant * self.slab_bytes

    def holdable_bytes(self, frame_bytes: int) -> int:
        """Bytes of frames of this size that an empty arena offers."""
        span = self._span(frame_bytes)
        return self.slab_count // span * (span * self.slab_bytes // frame_bytes) * frame_bytes

    def reserve(self, frame_bytes: int) -> Frame | None:
        """FREE -> RESERVED, or None when neither a frame of this size nor a vacant slab is left."""
        if self._vacant < self._spans.get(frame_bytes, 0) and not self._open.get(frame_bytes):
            return None  # As it mostly is once an arena is full, and this is asked for every page.
        slab = self._slab_with_room(frame_bytes)
        if slab is None:
            return None
        frame = slab.free.pop()
        if not slab.free:
            del self._open[frame_bytes][slab.first]
        self._loose_bytes -= frame_bytes
        self.in_use += 1
        self.move(frame, FrameState.RESERVED)
        return frame

    def move(self, frame: Frame, state: FrameState) -> None:
        """Change state and ledger together. Raises InvariantError on a step the machine lacks."""
        before, ledger, size = frame.state, self.ledger, frame.size
        if state not in _NEXT[before]:
            raise InvariantError(f"frame at {frame.offset}: {before.value} -> {state.value} is no legal step")
        if frame.pins and state in _UNPINNED:
            raise InvariantError(f"frame at {frame.offset}: {state.value} with {frame.pins} pins (R3)")
        ledger[before] -= size
        ledger[state] += size
        frame.state = state

    def free(self, frame: Frame) -> None:
        """Give a frame back through the one path there is (R5); an empty slab goes back with it."""
        self.move(frame, FrameState.FREE)
        # Counted for the whole table: a slab that is cut anew must not repeat what a reader may remember.
        self._generation += 1
        frame.generation = self._generation
        frame.owner = NO_OWNER
        self.in_use -= 1
        slab = frame.slab
        slab.free.append(frame)
        self._open[frame.size].setdefault(slab.first, slab)
        self._loose_bytes += frame.size
        self._frees += 1
        if slab.used == 0:
            self._give_back(slab, frame.size)

    def reuse(self, frame: Frame) -> Frame:
        """RESIDENT -> EVICTING -> FREE -> RESERVED -> FILLING: a victim's place for a page of its size (R5).

        All in one go: once an arena is full every page that comes in does this, and nobody could see the steps between.
        """
        if frame.state is not _RESIDENT or frame.pins:
            self.move(frame, FrameState.EVICTING)  # Says what is wrong.
        ledger, size = self.ledger, frame.size
        ledger[_RESIDENT] -= size
        ledger[_FILLING] += size
        self._frees += 1
        self._generation = generation = self._generation + 1
        frame.state, frame.generation, frame.owner = _FILLING, generation, NO_OWNER
        return frame

    def cheapest_window(self, frame_bytes: int) -> list[Slab] | None:
        """The slabs to empty so that a frame of this size fits, those with the fewest bytes to move.

        Only slabs whose pages can all move: unheld, resident, and with room for their size elsewhere.
        None when there is no such run yet. Until the frame is reserved, the run is kept from other sizes.
        """
        span = self._span(frame_bytes)
        self._kept = (frame_bytes, 0, 0)
        room = self._loose_bytes + self._vacant * self.slab_bytes
        if room < span * self.slab_bytes or self._frees < self._next_try.get(frame_bytes, 0):
            return None
        for first in self._cheap_starts(span):
            window = list(
                {slab.first: slab for slab in self._map[first : first + span] if slab is not None}.values()
            )
            vacant = self._vacant - self._map[first : first + span].count(None)
            if self._can_empty(window, vacant, frame_bytes):
                self._kept = (frame_bytes, first, first + span)
                return window
        self._next_try[frame_bytes] = self._frees + _FREES_BETWEEN_TRIES
        return None

    def audit(self) -> None:
        """Recount every frame. Raises InvariantError unless the ledger is exact to the byte."""
        count = dict.fromkeys(FrameState, 0)
        in_use = 0
        for slabs in self._slabs.values():
            for slab in slabs.values():
                for frame in slab.frames:
                    count[frame.state] += frame.size
                    in_use += frame.state is not FrameState.FREE
        used = sum(held for state, held in count.items() if state is not FrameState.FREE)
        count[FrameState.FREE] = self.capacity_bytes - used
        if count != self.ledger or in_use != self.in_use:
            raise InvariantError(
                f"ledger {self.ledger} with {self.in_use} frames, counted {count} with {in_use}"
            )
        loose = sum(len(slab.free) * size for size, slabs in self._slabs.items() for slab in slabs.values())
        is_open = {
            size: {first for first, slab in slabs.items() if slab.free} for size, slabs in self._slabs.items()
        }
        stated = {size: set(self._open.get(size, ())) for size in self._slabs}
        vacant = self._map.count(None)
        if (loose, vacant) != (self._loose_bytes, self._vacant) or is_open != stated:
            raise InvariantError(
                f"{self._loose_bytes} bytes loose and {self._vacant} slabs vacant, counted {loose} and {vacant}"
            )

    def _can_empty(self, window: list[Slab], vacant: int, frame_bytes: int) -> bool:
        """Whether all pages of `window` can move, to frames that are free or into `vacant` slabs elsewhere."""
        need: dict[int, int] = {}
        for slab in window:
            size = slab.frames[0].size
            if size == frame_bytes:
                return False
            for frame in slab.frames:
                if frame.state is FrameState.FREE:
                    continue
                if frame.pins or frame.state is not FrameState.RESIDENT:
                    return False
            need[size] = need.get(size, 0) + slab.used
        inside = {slab.first for slab in window}
        for size, count in need.items():
            outside = (slab for slab in self._open.get(size, {}).values() if slab.first not in inside)
            missing = count - sum(len(slab.free) for slab in outside)
            if missing > 0:
                span = self._span(size)
                vacant -= -(-missing // (span * self.slab_bytes // size))
                # Vacant slabs need not lie side by side.
                if span > 1 or vacant < 0:
                    return False
        return True

    def _cheap_starts(self, span: int) -> list[int]:
        """Where the runs of `span` slabs begin that hold the fewest bytes of pages, the best first."""
        used = [0] * self.slab_count
        for size, slabs in self._slabs.items():
            for slab in slabs.values():
                share = slab.used * size // slab.span
                used[slab.first : slab.first + slab.span] = [share] * slab.span
        upto = [0, *accumulate(used)]
        starts = range(self.slab_count - span + 1)
        return nsmallest(_WINDOWS_TRIED, starts, key=lambda first: upto[first + span] - upto[first])

    def _span(self, frame_bytes: int) -> int:
        """Slabs of the shortest run that frames of this size fill well enough; the best filled, where none does."""
        span = self._spans.get(frame_bytes)
        if span is None:
            shortest = -(-frame_bytes // self.slab_bytes)
            longest = max(shortest, self.slab_count // _RUNS_MIN)
            span = self._spans[frame_bytes] = min(
                range(shortest, longest + 1),
                key=lambda run: max(
                    _TAIL_SHARE_MAX, run * self.slab_bytes % frame_bytes / (run * self.slab_bytes)
                ),
            )
        return span

    def _slab_with_room(self, frame_bytes: int) -> Slab | None:
        # The newest slab is the likely one to have room; older ones fill up behind it.
        for slab in reversed(self._open.setdefault(frame_bytes, {}).values()):
            if not slab.is_closing:
                return slab
        first = self._vacant_run(self._span(frame_bytes), frame_bytes)
        if first is None:
            return None
        slab = Slab(first, self._span(frame_bytes), self.slab_bytes, frame_bytes, self._generation)
        self._map[first : first + slab.span] = [slab] * slab.span
        self._vacant -= slab.span
        if self._kept[0] == frame_bytes:
            self._kept = (0, 0, 0)
        self._loose_bytes += len(slab.frames) * frame_bytes
        self.reached_bytes = max(self.reached_bytes, (first + slab.span) * self.slab_bytes)
        self._slabs.setdefault(frame_bytes, {})[first] = self._open[frame_bytes][first] = slab
        return slab

    def _give_back(self, slab: Slab, frame_bytes: int) -> None:
        """None of its frames is used: its place is for any size again."""
        del self._slabs[frame_bytes][slab.first], self._open[frame_bytes][slab.first]
        self._map[slab.first : slab.first + slab.span] = [None] * slab.span
        self._vacant += slab.span
        self._loose_bytes -= len(slab.frames) * frame_bytes

    def _vacant_run(self, span: int, frame_bytes: int) -> int | None:
        if self._vacant < span:
            return None
        kept_for, kept_from, kept_to = self._kept
        if kept_for == frame_bytes:
            kept_from = kept_to = 0
        run = 0
        for index, slab in enumerate(self._map):
            run = run + 1 if slab is None and not kept_from <= index < kept_to else 0
            if run == span:
                return index - span + 1
        return None


def _slab_bytes(capacity_bytes: int) -> int:
    fine = max(ALIGNMENT_BYTES, capacity_bytes // _SLABS_FEW // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    fitting = max(_SLAB_BYTES_MIN, capacity_bytes // _SLABS // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    return min(SLAB_BYTES_MAX, fine, fitting)
