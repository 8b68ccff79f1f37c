"""What the store asks of a tier below dram. Third parties implement `Tier` and name it in `workmem.tiers`.

A tier keeps whole pages, header first, under their names, and never looks inside. The store decides what is kept and what
leaves, knows what is there, checks every byte that comes back (R6), and leaves a tier alone that keeps
failing. How to write one: docs/guides/tiers.md.

Everything is asynchronous and in batches: a call returns at once and `done` is called from any thread, once for each page,
whatever happens. Outcomes are values; a method that raises counts as FAILED for all of its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from workmem.core.layout import Namespace
from workmem.core.outcomes import TierName

ENTRY_POINTS = "workmem.tiers"
"""Entry point group: each loads to a `TierFactory`."""
Options = Mapping[str, str | int | float | bool]
"""What `[store.below.options]` says."""


class Outcome(StrEnum):
    """How it went with one page."""

    DONE = "done"
    ABSENT = "absent"
    """It is not there (any more). No failure: the store forgets it."""
    REFUSED = "refused"
    """No room, or not now. No failure: the page stays where it is."""
    FAILED = "failed"
    """The medium failed. Three in a row, and the tier is left alone for a while."""


class PageName(msgspec.Struct, frozen=True, gc=False):
    """32 bytes each; together they name a page for ever: its content never changes."""

    root: bytes
    key: bytes


class HeldPage(msgspec.Struct, frozen=True, gc=False):
    """A page as a tier that outlives the process remembers it: all that the store must know to ask for it."""

    name: PageName
    namespace: Namespace
    parent: bytes
    depth: int
    length: int
    """Bytes, header included; a multiple of 4096."""
    header_sum: int
    """Of the header that must come back."""


class PageFacts(msgspec.Struct, frozen=True, gc=False):
    """What the store knows of pages beyond their bytes. Advice: a tier may pass over any of it."""

    group: str = ""
    """Pages of a group are used, and had better leave, together: those of one workflow, or of a life group. A digest; empty is none."""
    wanted_s: float = 0.0
    """They are pinned, or a use is announced, for so many seconds from now; 0: nothing is known."""


NO_FACTS = PageFacts()


class PageOut(msgspec.Struct, frozen=True, gc=False):
    """A page to keep."""

    about: HeldPage
    page: memoryview
    """Inside the arena. To be read until `done`, and not after."""
    facts: PageFacts = NO_FACTS
    """Where the tier is an `AdvisedTier`."""


class PageIn(msgspec.Struct, frozen=True, gc=False):
    """A page to bring."""

    name: PageName
    into: memoryview
    """Inside the arena, `length` bytes. To be written until `done`, and not after: it is another page's then."""


class TierUsage(msgspec.Struct, frozen=True):
    """Readings, in bytes and pages."""

    capacity_bytes: int
    """The store keeps below it; 0 where the tier makes room itself and what it dropped is ABSENT."""
    used_bytes: int
    pages: int


class ArenaMemory(msgspec.Struct, frozen=True):
    """The memory that all pages come from and go to, for a medium that registers it."""

    address: int
    size_bytes: int


class Tier(Protocol):
    """A medium below dram. Every method may be called from any thread, several at a time, from `open` to `close`."""

    @property
    def kind(self) -> TierName:
        """What hits are reported as: SSD, or REMOTE."""
        ...

    def open(self, arena: ArenaMemory) -> Iterable[HeldPage]:
        """Get ready; called once. Returns what is there from before, a parent before its children.

        Raises OSError where the medium cannot be used: dram serves alone then.
        """
        ...

    def put(self, pages: Sequence[PageOut], done: Callable[[int, Outcome], None]) -> None:
        """Keep `pages`; `done` takes the index of each. DONE promises that `get` finds it; one that is there already is DONE.

        Within PUT_S: after that the store counts what is left as FAILED, and its memory may be another page's, so
        what is read from it then must not matter. (It does not: a page that comes back is checked.)
        """
        ...

    def get(self, pages: Sequence[PageIn], done: Callable[[int, Outcome], None]) -> None:
        """Fill `into` of each, in whatever order they arrive. The caller checks what it got in `done`, on that thread.

        A tier keeps a deadline of its own: until `done` the memory stays reserved.
        """
        ...

    def drop(self, names: Sequence[PageName], done: Callable[[int, Outcome], None]) -> None:
        """Forget pages; one that is not there is DONE. For a purged tenant this is how its bytes leave (R9)."""
        ...

    def usage(self) -> TierUsage:
        """Readings, at once."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End what is under way and let go of the arena. False where memory may still be read or written. Idempotent."""
        ...


@runtime_checkable
class SharedTier(Tier, Protocol):
    """A tier that other stores put pages into as well: it tells of them, so that they are hits here."""

    def watch(self, seen: Callable[[Sequence[HeldPage]], None]) -> None:
        """Call `seen`, from any thread, with pages that others put: a parent before its children where both are known.

        Called once, after `open`. What is told is a hint, believed as little as what `open` returned: a page is checked when it comes.
        None is told after `close`.
        """
        ...


@runtime_checkable
class ListeningTier(SharedTier, Protocol):
    """A shared tier that has to look for what others put, now and then, and can look sooner."""

    def look_sooner(self, seconds: float) -> None:
        """Somebody waits for pages of others: for so long from now, hear of them as soon as is fair. At once, from any thread."""
        ...


@runtime_checkable
class LosingTier(SharedTier, Protocol):
    """A shared tier that hears of pages that others dropped."""

    def watch_losses(self, lost: Callable[[Sequence[PageName]], None]) -> None:
        """Call `lost`, from any thread, with pages that are not there any more though this store dropped none of them.

        Called once, before `watch`. One that is not told of is ABSENT when it is asked for, and a hit until then.
        """
        ...


@runtime_checkable
class AdvisedTier(Tier, Protocol):
    """A tier that acts on what the store knows of its pages."""

    def advise(self, names: Sequence[PageName], facts: PageFacts) -> None:
        """Something new is known of pages that are there, or on their way; `wanted_s` 0 ends what was said of that before.

        Called with a lock of the store's held: take note, and do what is to be done on a thread of the tier's.
        """
        ...


PUT_S = 30.0
"""Longest that the store waits for a batch of puts or drops."""
CLOSE_S = 5.0
"""Longest that it gives a tier to close."""


class TierFactory(Protocol):
    """What an entry point loads to."""

    def __call__(self, options: Options) -> Tier:
        """A tier, not yet open. Raises ConfigError, naming `$.store.below.options`, on options it cannot use."""
        ...
