"""What moves pages out of an engine's blocks and into them, whatever memory these are in.

A device does what it is told later and in queues. So it is told what comes before what: a *mark* is a point in the
engine's own queue, a *fence* is passed when a block has been read and may be written to again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from workmem.core.layout import KVLayout

Mark = Any
Fence = Any
"""Whatever the device's own are."""


class Reading(Protocol):
    """One block on its way out. `end` is called exactly once, whatever happened before."""

    @property
    def fence(self) -> Fence | None:
        """Set once the engine can be made to wait by itself; before, the block is read only when `copy_into` is over."""
        ...

    def issue(self) -> None:
        """Tell the device to read the block, where it has not been told yet. On any thread; may wait for room."""
        ...

    def copy_into(self, into: memoryview) -> tuple[int, ...]:
        """Wait for the copy and bring it into a page; the checksum of each slice of what is there (R2)."""
        ...

    def end(self) -> None:
        """The room that the copy took is free."""
        ...


class Filling(Protocol):
    """Pages on their way into blocks. Of one thread at a time."""

    def copy_in(self, block: int, source: memoryview) -> tuple[int, ...]:
        """Bring a page on its way into a block; the checksum of each slice of what goes there (R3).

        `source` is not read any more when this returns.
        """
        ...

    def clear(self, block: int) -> None:
        """Zero a block: half a page of somebody's bytes may read as NaN."""
        ...

    def end(self) -> None:
        """Aside: wait until all is in place. In a step: the engine's queue goes on behind it, the caller at once."""
        ...


class EngineBlocks(Protocol):
    """The KV blocks of one worker."""

    @property
    def layout(self) -> KVLayout:
        """Of a page."""
        ...

    def mark(self) -> Mark:
        """Behind all that the engine has been told to do. On the engine's thread."""
        ...

    def begin_out(self, block: int, after: Mark) -> Reading:
        """Read a block once the engine is past `after`. Never waits."""
        ...

    def begin_in(self, after: Mark, fences: Iterable[Fence], *, is_aside: bool) -> Filling:
        """Write to blocks once the engine is past `after`, and reads of them past `fences`.

        `is_aside`: on a thread of the caller's, for requests that wait aside; else on the engine's, for this step.
        """
        ...

    def hold(self, fences: Iterable[Fence]) -> None:
        """What the engine is told to do from now on comes after `fences`. On the engine's thread, which does not wait."""
        ...
