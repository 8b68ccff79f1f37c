"""What a transfer promises, whichever way the bytes go.

**Who owns memory.** Whoever registers memory owns it, from `register` to `unregister`, and keeps it mapped. A *window*
is a stretch of it that one peer may write to, or read from; its ticket, some hundred bytes, goes to that peer by any
way there is. A window serves one peer, once. Each byte of it is written once: to try again, ask for another window.

**Outcomes are values.** What a part came to is an `Outcome`. DONE says that the bytes are there and were checked: of a
write the owner has compared its memory with the writer's checksum, of a read the reader has compared its copy with the
owner's. Anything else says nothing about the bytes, and nothing is to be read from them.

**A deadline** bounds how long somebody waits, and nothing else. At the deadline the outcome is TIMED_OUT, and stays
that whatever happens later. The bytes may still move. So there are two questions, with two answers:

- *May I believe it?* The outcome.
- *May I give this memory to others?* On the side that moves: `Moving.is_over`. On the side that owns the window:
  `Window.is_free`, after `close`. A window whose peer has written and does not answer stays quarantined until that
  peer says that nothing of it is under way, or is known to have ended. Quarantined bytes are counted, and past a bound
  no further windows are granted.

**Late bytes.** A writer that was frozen goes on where it stopped. It writes into memory that is still quarantined, finds
the window closed, and says so; then the window is free. A window's number is never used again, so that a late word about
an old one is about nothing.

**Notices** arrive at most once, and those of one peer in the order they were sent. DONE says that one has arrived;
TIMED_OUT that it may have.

**Refused outright**: memory whose items are not single bytes (an engine that takes lengths for sizes moves a part of it),
or that is not contiguous; what lies outside a region or a window; a second write of the same bytes; a full queue.

A process that has a ticket is trusted as far as its window. Data planes are not locks: Mooncake's accepts what anybody
sends. The network has to keep strangers away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum, unique
from typing import NamedTuple, Protocol

import msgspec

from workmem.core.errors import TransferError


@unique
class Outcome(StrEnum):
    """What became of a part, a notice or a wait."""

    DONE = "done"
    TIMED_OUT = "timed_out"
    PEER_GONE = "peer_gone"
    """The other end has closed, died, or was never there."""
    NOT_REGISTERED = "not_registered"
    """The region, here or there, is none, or none any more."""
    REFUSED = "refused"
    """Out of bounds, written before, closed by its owner, or one too many."""
    CORRUPT = "corrupt"
    """The bytes arrived and are not what was sent."""
    FAILED = "failed"
    """The transport says no, and the peer is there."""


@unique
class Access(StrEnum):
    """What the peer may do in a window."""

    READ = "read"
    WRITE = "write"


class Memory(msgspec.Struct, frozen=True, eq=False):
    """Memory to be registered. Stays mapped, at its place, until it is unregistered."""

    view: memoryview
    fd: int = -1
    """Of the file that `view` maps from its start; -1 where there is none. Without it no process of this host can map it."""
    place: str = "*"
    """Where it lies, as `cpu:0` for that NUMA node: what a network card is chosen by. `*`: found out, or any."""


class Part(NamedTuple):
    """A stretch to move: offsets in the region here and in the window there, and bytes."""

    here: int
    there: int
    size: int


class Described(msgspec.Struct, frozen=True, array_like=True):
    """A region as its peer is told of it."""

    segment: str
    """What the mover calls the process that owns it."""
    base: int
    size: int


class Moved(NamedTuple):
    """How a mover's call ended."""

    outcome: Outcome
    is_clean: bool = True
    """Nothing of it is under way any more. Where that is not known, `Mover.settle_s` is waited for."""


class Mover(Protocol):
    """A way for bytes. Its methods may be called from any thread; `move` blocks, and lets other threads run."""

    @property
    def name(self) -> str:
        """As in `transports.known_transports`. Ends of two names do not talk."""
        ...

    @property
    def settle_s(self) -> float:
        """How long after a call that failed something of it may still arrive."""
        ...

    @property
    def drain_s(self) -> float:
        """How long after a peer's connection ended something of it may still arrive; 0 where its end is known exactly."""
        ...

    def register(self, memory: Memory) -> Described:
        """Raises TransferError where that cannot be."""
        ...

    def unregister(self, memory: Memory) -> None:
        """Nothing is under way in it."""
        ...

    def reach(self, region: Described, fd: int, access: Access) -> object:
        """The region of a peer, for `move`. Takes over `fd`, which is -1 unless the peer sent one. Raises TransferError."""
        ...

    def move(
        self,
        access: Access,
        target: object,
        start: int,
        memory: Memory,
        parts: Sequence[Part],
        stop: Callable[[], bool],
    ) -> Moved:
        """Move `parts` between `memory` and the window at `start` of `target`. Ends early where `stop` says so."""
        ...

    def close(self) -> None:
        """Nothing is under way."""
        ...


def check_memory(memory: Memory) -> None:
    """Raises TransferError unless it is plain, contiguous bytes that may be written to."""
    view = memory.view
    if view.itemsize != 1 or not view.c_contiguous or view.ndim != 1:
        raise TransferError(
            f"memory to register has items of {view.itemsize} bytes in {view.ndim} dimensions; hand over plain bytes: "
            "memoryview(x).cast('B')"
        )
    if view.readonly or not view.nbytes:
        raise TransferError(
            "memory to register is empty or read-only; a transfer needs some that it may write to"
        )
