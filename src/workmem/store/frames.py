"""Frames: page-sized places in the arena, cut out of slabs, and the exact ledger of who holds what.

The arena is cut into slabs of equal size. A slab (or a run of them, for pages larger than one) serves
frames of a single size while any of them is in use and goes back when none is, so that layouts of
several models share one arena. Rules cited as R1-R10 are in docs/internals/buffer-rules.md.

No lock here: only the pool calls this, under its own (R1).
"""

from __future__ import annotations

from enum import StrEnum

from workmem.core.errors import InvariantError
from workmem.store.slab_sizes import slab_bytes_of, slabs_per_run

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
_AT_REST = frozenset({FrameState.RESIDENT, FrameState.FREE})


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
        self.slab_bytes = slab_bytes_of(capacity_bytes)
        self.slab_count = capacity_bytes // self.slab_bytes
        self.capacity_bytes = capacity_bytes
        self.slabs: list[Slab | None] = [None] * self.slab_count
        """Who has each slab of the arena."""
        self.is_taken = bytearray(self.slab_count)
        """The same in a form in which a run of vacant ones is found at once."""
        self.vacant = self.slab_count
        self.runs: dict[int, dict[int, Slab]] = {}
        """By frame size, and there by the first slab of each run."""
        self.open: dict[int, dict[int, Slab]] = {}
        """Of those, the ones with a FREE frame."""
        self.loose_bytes: dict[int, int] = {}
        """FREE frames inside slabs that are taken, by size."""
        self.freed_bytes = 0
        """Of all frames that were ever given back."""
        self._spans: dict[int, int] = {}
        self._kept = (0, 0, 0)
        """Frame size that slabs from the first to before the second number are kept for."""
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
        return self.ledger[FrameState.FREE] - self.vacant * self.slab_bytes

    def holdable_bytes(self, frame_bytes: int) -> int:
        """Bytes of frames of this size that an empty arena offers."""
        span = self.span(frame_bytes)
        return self.slab_count // span * (span * self.slab_bytes // frame_bytes) * frame_bytes

    def reserve(self, frame_bytes: int) -> Frame | None:
        """FREE -> RESERVED, or None when neither a frame of this size nor a vacant slab is left."""
        if self.vacant < self._spans.get(frame_bytes, 0) and not self.open.get(frame_bytes):
            return None  # As it mostly is once an arena is full, and this is asked for every page.
        slab = self._slab_with_room(frame_bytes)
        if slab is None:
            return None
        frame = slab.free.pop()
        if not slab.free:
            del self.open[frame_bytes][slab.first]
        self.loose_bytes[frame_bytes] -= frame_bytes
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
        self.open[frame.size].setdefault(slab.first, slab)
        self.loose_bytes[frame.size] += frame.size
        self.freed_bytes += frame.size
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
        self.freed_bytes += size
        self._generation = generation = self._generation + 1
        frame.state, frame.generation, frame.owner = _FILLING, generation, NO_OWNER
        return frame

    def may_reuse(self, frame: Frame) -> bool:
        """Whether a victim's place may go to a page of its size at once: its slab would not come free otherwise.

        An empty slab goes back first, for it may be wanted by another size, unless there is none.
        """
        return frame.slab.used > 1 or len(self.runs) == 1

    def has_room(self, frame_bytes: int) -> bool:
        """Whether `reserve` would find a frame of this size."""
        if any(not slab.is_closing for slab in self.open.get(frame_bytes, {}).values()):
            return True
        return self._vacant_run(self.span(frame_bytes), frame_bytes) is not None

    def shift(self, slab: Slab, first: int) -> None:
        """Let a run begin at `first`, below where it does, with its frames. Between lie vacant slabs only.

        No page of it may be held (R3): the caller copies the bytes. Each frame has a new generation.
        """
        size, down = slab.frames[0].size, (slab.first - first) * self.slab_bytes
        is_open = self.open[size].pop(slab.first, None) is not None
        del self.runs[size][slab.first]
        for there, who in ((slab.first, None), (first, slab)):
            self.slabs[there : there + slab.span] = [who] * slab.span
            self.is_taken[there : there + slab.span] = bytes((who is not None,)) * slab.span
        slab.first = first
        self.runs[size][first] = slab
        if is_open:
            self.open[size][first] = slab
        for frame in slab.frames:
            if frame.pins or frame.state not in _AT_REST:
                raise InvariantError(
                    f"frame at {frame.offset}: {frame.state} with {frame.pins} pins, cannot move"
                )
            self._generation += 1
            frame.generation = self._generation
            frame.offset -= down

    def keep(self, frame_bytes: int, first: int, end: int) -> None:
        """Slabs from `first` to before `end` are for frames of this size, until one is reserved or others are kept."""
        self._kept = (frame_bytes, first, end)

    def audit(self) -> None:
        """Recount every frame. Raises InvariantError unless the ledger is exact to the byte."""
        count = dict.fromkeys(FrameState, 0)
        in_use = 0
        for slabs in self.runs.values():
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
        self._audit_slabs()

    def _audit_slabs(self) -> None:
        loose = {
            size: sum(len(slab.free) for slab in slabs.values()) * size for size, slabs in self.runs.items()
        }
        stated = {size: loose for size, loose in self.loose_bytes.items() if loose or size in self.runs}
        if loose != stated:
            raise InvariantError(f"{stated} bytes loose by frame size, counted {loose}")
        is_open = {
            size: {first for first, slab in slabs.items() if slab.free} for size, slabs in self.runs.items()
        }
        if is_open != {size: set(self.open[size]) for size in self.runs}:
            raise InvariantError("a slab with a free frame is not open, or one without is")
        taken = bytearray(slab is not None for slab in self.slabs)
        if taken != self.is_taken or taken.count(0) != self.vacant:
            raise InvariantError(f"{self.vacant} slabs vacant, counted {taken.count(0)}")

    def span(self, frame_bytes: int) -> int:
        """Slabs in a row that frames of this size take at a time."""
        span = self._spans.get(frame_bytes)
        if span is None:
            span = self._spans[frame_bytes] = slabs_per_run(self.capacity_bytes, frame_bytes)
        return span

    def _slab_with_room(self, frame_bytes: int) -> Slab | None:
        # The newest slab is the likely one to have room; older ones fill up behind it.
        for slab in reversed(self.open.setdefault(frame_bytes, {}).values()):
            if not slab.is_closing:
                return slab
        span = self.span(frame_bytes)
        first = self._vacant_run(span, frame_bytes)
        if first is None:
            return None
        slab = Slab(first, span, self.slab_bytes, frame_bytes, self._generation)
        self.slabs[first : first + span] = [slab] * span
        self.is_taken[first : first + span] = b"\1" * span
        self.vacant -= span
        if self._kept[0] == frame_bytes:
            self._kept = (0, 0, 0)
        self.loose_bytes[frame_bytes] = self.loose_bytes.get(frame_bytes, 0) + len(slab.frames) * frame_bytes
        self.reached_bytes = max(self.reached_bytes, (first + span) * self.slab_bytes)
        self.runs.setdefault(frame_bytes, {})[first] = self.open[frame_bytes][first] = slab
        return slab

    def _give_back(self, slab: Slab, frame_bytes: int) -> None:
        """None of its frames is used: its place is for any size again."""
        del self.runs[frame_bytes][slab.first], self.open[frame_bytes][slab.first]
        if not self.runs[frame_bytes]:
            del self.runs[frame_bytes]
        self.slabs[slab.first : slab.first + slab.span] = [None] * slab.span
        self.is_taken[slab.first : slab.first + slab.span] = bytes(slab.span)
        self.vacant += slab.span
        self.loose_bytes[frame_bytes] -= len(slab.frames) * frame_bytes

    def _vacant_run(self, span: int, frame_bytes: int) -> int | None:
        if self.vacant < span:
            return None
        kept_for, kept_from, kept_to = self._kept
        if kept_for == frame_bytes:
            kept_from = kept_to = 0
        wanted = bytes(span)
        first = self.is_taken.find(wanted, 0, kept_from)
        if first < 0:
            first = self.is_taken.find(wanted, kept_to)
        return first if first >= 0 else None
