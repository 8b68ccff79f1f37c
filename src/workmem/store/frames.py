"""Frames: page-sized places in the arena, cut out of slabs, and the exact ledger of who holds what.

The arena is cut into slabs of equal size. A slab (or a run of them, for pages larger than one) serves
frames of a single size while any of them is in use and goes back when none is, so that layouts of
several models share one arena. Rules cited as R1-R10 are in docs/internals/buffer-rules.md.

No lock here: only the pool calls this, under its own (R1).
"""

from __future__ import annotations

from enum import Enum

from workmem.core.errors import InvariantError
from workmem.store.arena import ALIGNMENT_BYTES

SLAB_BYTES_MAX = 16 * 2**20
_SLABS_MIN = 32
"""A small arena is cut finer, so that one layout cannot take it in a few slabs."""

NO_OWNER = -1


class FrameState(Enum):
    """Where a frame is in its life."""

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


class Frame:
    """A place for one page. `pins` counts holds (R3); `generation` grows each time it gives its page up."""

    __slots__ = ("generation", "offset", "owner", "pins", "size", "slab", "state")

    def __init__(self, slab: Slab, offset: int, size: int) -> None:
        self.slab = slab
        self.offset = offset
        self.size = size
        self.state = FrameState.FREE
        self.pins = 0
        self.generation = 0
        self.owner = NO_OWNER
        """Row of the block whose page it holds."""


class Slab:
    """A run of arena slabs that serves frames of one size."""

    __slots__ = ("first", "frames", "free", "is_closing", "span")

    def __init__(self, first: int, span: int, slab_bytes: int, frame_bytes: int) -> None:
        self.first = first
        self.span = span
        count = span * slab_bytes // frame_bytes
        self.frames: list[Frame] = [
            Frame(self, first * slab_bytes + index * frame_bytes, frame_bytes) for index in range(count)
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
        self._slabs: dict[int, dict[int, Slab]] = {}
        self.ledger: dict[FrameState, int] = dict.fromkeys(FrameState, 0)
        self.ledger[FrameState.FREE] = capacity_bytes
        self.reached_bytes = 0
        """End of the highest slab ever taken."""
        self.in_use = 0
        """Frames that are not FREE."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all frames that are not FREE."""
        return self.capacity_bytes - self.ledger[FrameState.FREE]

    def holdable_bytes(self, frame_bytes: int) -> int:
        """Bytes of frames of this size that an empty arena offers."""
        span = self._span(frame_bytes)
        return self.slab_count // span * (span * self.slab_bytes // frame_bytes) * frame_bytes

    def reserve(self, frame_bytes: int) -> Frame | None:
        """FREE -> RESERVED, or None when neither a frame of this size nor a vacant slab is left."""
        slab = self._slab_with_room(frame_bytes)
        if slab is None:
            return None
        frame = slab.free.pop()
        self.in_use += 1
        self.move(frame, FrameState.RESERVED)
        return frame

    def move(self, frame: Frame, state: FrameState) -> None:
        """Change state and ledger together. Raises InvariantError on a step the machine lacks."""
        if state not in _NEXT[frame.state]:
            raise InvariantError(
                f"frame at {frame.offset}: {frame.state.value} -> {state.value} is no legal step"
            )
        if frame.pins and state in (FrameState.EVICTING, FrameState.FREE):
            raise InvariantError(f"frame at {frame.offset}: {state.value} with {frame.pins} pins (R3)")
        self.ledger[frame.state] -= frame.size
        self.ledger[state] += frame.size
        frame.state = state

    def free(self, frame: Frame) -> None:
        """Give a frame back through the one path there is (R5); an empty slab goes back with it."""
        self.move(frame, FrameState.FREE)
        frame.generation += 1
        frame.owner = NO_OWNER
        self.in_use -= 1
        slab = frame.slab
        slab.free.append(frame)
        if slab.used == 0:
            del self._slabs[frame.size][slab.first]
            for index in range(slab.first, slab.first + slab.span):
                self._map[index] = None

    def cheapest_window(self, frame_bytes: int) -> list[Slab] | None:
        """The slabs to empty so that a frame of this size fits, those with the fewest bytes to move.

        Only slabs whose pages can all move: unheld, resident, and with free frames of their size
        elsewhere. None when there is no such run yet.
        """
        span = self._span(frame_bytes)
        loose = sum(len(slab.free) * size for size, slabs in self._slabs.items() for slab in slabs.values())
        if loose < span * self.slab_bytes:
            return None
        best: list[Slab] | None = None
        best_bytes = self.capacity_bytes + 1
        for first in range(self.slab_count - span + 1):
            window = list(
                {slab.first: slab for slab in self._map[first : first + span] if slab is not None}.values()
            )
            cost = sum(slab.used * slab.frames[0].size for slab in window)
            if cost < best_bytes and self._can_empty(window, frame_bytes):
                best, best_bytes = window, cost
        return best

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

    def _can_empty(self, window: list[Slab], frame_bytes: int) -> bool:
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
            outside = (slab for slab in self._slabs[size].values() if slab.first not in inside)
            if sum(len(slab.free) for slab in outside) < count:
                return False
        return True

    def _span(self, frame_bytes: int) -> int:
        return -(-frame_bytes // self.slab_bytes)

    def _slab_with_room(self, frame_bytes: int) -> Slab | None:
        slabs = self._slabs.setdefault(frame_bytes, {})
        # The newest slab is the likely one to have room; older ones fill up behind it.
        for slab in reversed(slabs.values()):
            if slab.free and not slab.is_closing:
                return slab
        first = self._vacant_run(self._span(frame_bytes))
        if first is None:
            return None
        slab = Slab(first, self._span(frame_bytes), self.slab_bytes, frame_bytes)
        for index in range(first, first + slab.span):
            self._map[index] = slab
        self.reached_bytes = max(self.reached_bytes, (first + slab.span) * self.slab_bytes)
        slabs[first] = slab
        return slab

    def _vacant_run(self, span: int) -> int | None:
        run = 0
        for index, slab in enumerate(self._map):
            run = run + 1 if slab is None else 0
            if run == span:
                return index - span + 1
        return None


def _slab_bytes(capacity_bytes: int) -> int:
    fine = max(ALIGNMENT_BYTES, capacity_bytes // _SLABS_MIN // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    return min(SLAB_BYTES_MAX, fine)
