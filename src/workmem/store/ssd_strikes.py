"""What is to leave the ssd tier's files: records to strike out of the journal, and segments to erase.

Part of the pool's state, as the index is: every method takes the pool's lock (R1) but those that say otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from workmem.store.catalog import Space
from workmem.store.outbox import Outbox
from workmem.store.tiers.entries import erase_entries
from workmem.store.tiers.journal_records import DeleteEntry, DropEntry, Entry
from workmem.store.tiers.segments import Segment


class Owed(msgspec.Struct, frozen=True):
    """What had left when a tier was given up, and may still be in its files."""

    entries: Sequence[Entry] = ()
    erasures: AbstractSet[int] = frozenset()
    """Numbers of segments that hold pages of a purged namespace."""
    has_purge: bool = False

    def __add__(self, later: Owed) -> Owed:
        return Owed(
            tuple(dict.fromkeys((*self.entries, *later.entries))),
            self.erasures | later.erasures,
            self.has_purge or later.has_purge,
        )


class Strikes:
    """Strikes and erasures that are due, and those that the writer has under way."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._deletes: list[Entry] = []
        self._taken: list[Entry] = []
        """Of those, what is being written."""
        self._left_out: list[Entry] = []
        """What a snapshot left out that is not in place yet."""
        self._is_striking = False
        """Strikes have been taken that are not durable yet."""
        self._erasures: set[int] = set()
        """Numbers of segments that hold pages of a purged namespace."""
        self._is_erasing = False
        self._sweeps = 0
        """Purges that still give up pages: segments are erased, and the journal written anew, once for all of them."""
        self._is_closing = False
        self._is_purging = False
        """What was struck out last is not all durable, and some of it was purged."""
        self.names_are_left = False
        """The journal names namespaces that it says were purged: it is to be written anew."""

    def strike_out(self, space: Space, key: bytes, segment: Segment) -> None:
        """A page in `segment` is of no use any more; a purged one must leave the disk as well (R9).

        The lock is held by the caller.
        """
        self._is_purging = self._is_purging or space.is_purged
        if space.is_purged and not segment.is_whole_tier:
            self._erasures.add(segment.number)
        else:
            self._deletes.append(DeleteEntry(space.number, key))
        if not (space.is_purged and self._sweeps):
            # The writer may be asleep, and a flush waits for what it has to do. A sweep says so once, at its end.
            self._outbox.changed.notify_all()

    def drop_space(self, space: Space) -> None:
        """A purged namespace is void in the journal with one word. The lock is held by the caller."""
        self._is_purging = True
        self._deletes.append(DropEntry(space.number))
        self._outbox.changed.notify_all()

    @contextlib.contextmanager
    def sweeping(self) -> Generator[None]:
        """While pages of purged namespaces leave, some at a time: nothing is erased before they all have."""
        with self._outbox:
            self._sweeps += 1
        try:
            yield
        finally:
            with self._outbox:
                self._sweeps -= 1
                self._outbox.changed.notify_all()

    def take_all(self) -> None:
        """A snapshot was taken: strikes of pages that are not in it have nothing left to strike out.

        The lock is held by the caller.
        """
        self._is_striking = self._is_striking or bool(self._deletes) or self.names_are_left
        self._is_purging = self._is_purging or self.names_are_left
        self.names_are_left = False
        self._left_out += self._deletes
        self._deletes.clear()

    def leave_names(self) -> None:
        """`names_are_left`, from now until a snapshot is taken."""
        with self._outbox:
            self.names_are_left = True
            self._outbox.changed.notify_all()

    def take_deletes(self) -> list[Entry]:
        """Records to strike out of the journal, before anything newer is put in."""
        with self._outbox:
            deletes, self._deletes = self._deletes, []
            self._taken = deletes
            self._is_striking = self._is_striking or bool(deletes)
            return deletes

    def return_deletes(self, deletes: list[Entry]) -> None:
        """They could not be journaled; try again with the next batch."""
        with self._outbox:
            self._deletes[:0] = deletes
            self._taken = []
            self._is_striking = False

    def strikes_are_durable(self) -> None:
        """What `take_deletes` or a snapshot took is journaled: whoever waits in `flush` may go on."""
        with self._outbox:
            self._is_striking = False
            self._taken, self._left_out = [], []
            # What came meanwhile has its turn with the next batch.
            self._is_purging = self._is_purging and bool(self._deletes)
            self._outbox.changed.notify_all()

    @property
    def owes_purge(self) -> bool:
        """Something of a purged namespace is still to leave, in the journal or on the disk."""
        return self._is_purging or self._is_erasing or self.names_are_left or bool(self._erasures)

    @property
    def is_settled(self) -> bool:
        """Nothing is to be struck out or erased, nor under way."""
        return not (self.has_deletes or self._has_traces or self._is_erasing)

    @property
    def has_deletes(self) -> bool:
        """Something waits to be struck out, erased, or not named any more, and is due."""
        # Between two steps of the writer, strikes under way are such that failed with a rewrite.
        return bool(self._deletes or self._is_striking) or (self._has_traces and not self._sweeps)

    @property
    def _has_traces(self) -> bool:
        return bool(self._erasures or self.names_are_left)

    @property
    def may_erase(self) -> bool:
        """Neither is a purge half-way, which would have more to erase, nor does the store close.

        What is not erased by then is left to the next start, which the journal tells.
        """
        return not (self._is_closing or self._sweeps)

    def close(self) -> None:
        """Nothing is erased any more. The lock is held by the caller."""
        self._is_closing = True

    def hand_over(self) -> Owed:
        """The tier is given up: what its files may still hold, for whoever opens them next. Nothing is due then."""
        with self._outbox:
            owed = Owed((*self._left_out, *self._taken, *self._deletes), set(self._erasures), self.owes_purge)
            self._left_out, self._taken, self._deletes = [], [], []
            self._erasures.clear()
            self._is_striking = self._is_erasing = self._is_purging = self.names_are_left = False
            self._outbox.changed.notify_all()
            return owed

    def take_over(self, owed: Owed) -> None:
        """The files are open again, and what was due is due. The lock is held by the caller."""
        self._deletes += owed.entries
        self._erasures |= owed.erasures
        self._is_purging = self._is_purging or owed.has_purge

    def take_erasures(self) -> list[int]:
        """Numbers of segments that hold pages of a purged namespace: what else is in them is to move, and they are to go."""
        with self._outbox:
            if self._sweeps:
                return []
            numbers, self._erasures = self._erasures, set()
            self._is_erasing = bool(numbers)
            return sorted(numbers)

    def erase(self, numbers: Iterable[int]) -> None:
        """The last run left segments that hold pages of a purged namespace."""
        with self._outbox:
            self._erasures.update(numbers)

    def erasure_entries(self, leaving: Iterable[int]) -> list[Entry]:
        """What a fresh journal must say of segments that are to be erased, `leaving` among them.

        The lock is held by the caller.
        """
        return erase_entries(sorted(self._erasures.union(leaving)))

    def erasures_are_done(self) -> None:
        """What `take_erasures` took is gone."""
        with self._outbox:
            self._is_erasing = False
            self._outbox.changed.notify_all()

    def return_erasures(self, numbers: Iterable[int]) -> None:
        """They could not all be erased; try again later."""
        with self._outbox:
            self._erasures.update(numbers)
            self._is_erasing = False
