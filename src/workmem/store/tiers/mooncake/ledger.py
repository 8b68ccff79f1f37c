"""What stores tell each other of the pool: small objects in it, numbered, which everybody reads and one writes.

Each store that puts pages has a *log*: entry after entry, never changed. Logs are found by *seats*, numbered places that
a store takes by being the first to write its name there. An entry that is lost (evicted, its owner dead, not readable)
costs hits: pages nobody hears of are computed again. It can cost no more, since what an entry says is checked when the
page it names comes.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from workmem.core.keys import KEY_BYTES
from workmem.core.layout import Namespace
from workmem.store.tiers.contract import HeldPage, PageName
from workmem.store.tiers.mooncake.objects import PoolObject, prefix
from workmem.store.tiers.mooncake.sealed_link import AnyLink
from workmem.store.tiers.mooncake.shelf import Place

log = logging.getLogger(__name__)

SEATS = 64
"""Stores that can be heard of at a time."""
_TAKE_OVER_MAX = 4
_NEAR = 4
"""Entries that are looked for behind the last one read, at each look."""
_FAR = tuple(2**power for power in range(2, 20))
"""Those too: a log may have lost its beginning, or any part."""
_SUM_BYTES = 8
_LOOKS = 8
"""So many looks apart all seats are read anew."""
_UNTOLD_MAX = 256
_TOLD_ANEW_MAX = 128
"""Objects of an entry, or entries of a call."""
_LOOK_S = 1.0
"""How often a store looks whether it still has its seat."""


_Count = Annotated[int, Meta(ge=0)]
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class Run(msgspec.Struct, frozen=True, array_like=True):
    """An object that was put."""

    name: str
    peer: str
    space: _Count
    """Which of the entry's namespaces."""
    parent: _Key
    depth: _Count
    """Both of the first page."""
    lengths: tuple[Annotated[int, Meta(gt=0)], ...]
    keys: tuple[_Key, ...]
    header_sums: tuple[_Count, ...]
    group: str = ""
    """Of Mooncake's, with which it lives and dies."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What changed. One that cannot be is not decoded: who reaches the pool can write anything."""

    spaces: tuple[Namespace, ...] = ()
    kept: tuple[Run, ...] = ()
    gone: tuple[tuple[str, _Key, tuple[_Key, ...]], ...] = ()
    """Pages that were dropped: name of the object, root and keys."""
    is_last: bool = False
    """The store has closed: nothing follows."""


def entry_of(kept: Sequence[PoolObject] = (), gone: Sequence[Place] = ()) -> Entry:
    """What to tell of these."""
    spaces: dict[Namespace, int] = {}
    runs: list[Run] = []
    for found in kept:
        first = found.pages[0]
        runs.append(
            Run(
                found.name,
                found.peer,
                spaces.setdefault(first.namespace, len(spaces)),
                first.parent,
                first.depth,
                tuple(page.length for page in found.pages),
                tuple(page.name.key for page in found.pages),
                tuple(page.header_sum for page in found.pages),
                found.group,
            )
        )
    dropped: dict[tuple[str, bytes], list[bytes]] = {}
    for place in gone:
        name = place.page.name
        dropped.setdefault((place.inside.name, name.root), []).append(name.key)
    return Entry(tuple(spaces), tuple(runs), tuple((*where, tuple(keys)) for where, keys in dropped.items()))


def objects_in(entry: Entry) -> list[PoolObject]:
    """What an entry says was put. Raises ValueError where it contradicts itself."""
    roots = [space.root() for space in entry.spaces]
    found: list[PoolObject] = []
    for run in entry.kept:
        if run.space >= len(roots):
            raise ValueError(f"an object is of namespace {run.space}, and {len(roots)} are told")
        pages: list[HeldPage] = []
        parent = run.parent
        for at, (key, length, header_sum) in enumerate(
            zip(run.keys, run.lengths, run.header_sums, strict=True)
        ):
            name = PageName(roots[run.space], key)
            pages.append(HeldPage(name, entry.spaces[run.space], parent, run.depth + at, length, header_sum))
            parent = key
        if pages:
            found.append(PoolObject(run.name, tuple(pages), run.peer, group=run.group))
    return found


class Log:
    """What this store tells. To be called from one thread."""

    def __init__(
        self,
        link: AnyLink,
        pool: str,
        finished: Callable[[], Mapping[int, tuple[str, int]]] = dict,
        known: Callable[[], Sequence[PoolObject]] = tuple,
    ) -> None:
        """`finished`: seats of stores that have closed. `known`: what is told anew before one of these is taken."""
        self._link = link
        self._pool = pool
        self._finished = finished
        self._known = known
        self._writer = secrets.token_hex(8)
        self.mine = {self._writer}
        """Names of the logs that this store has written."""
        self._next = 0
        self._seat = -1
        self._look_again_at = 0.0
        self._untold: deque[Entry] = deque(maxlen=_UNTOLD_MAX)
        """Could not be written; the oldest goes where there are too many, and others have a miss for it."""
        self._old_logs: list[tuple[str, int]] = []
        """Writer of each, and where it ends."""

    def tell(self, entry: Entry) -> None:
        """Write the next entry, behind those that could not be written. Raises MasterAwayError."""
        self._untold.append(entry)
        self._sit_down()
        while self._seat >= 0 and self._untold:
            body = msgspec.msgpack.encode(self._untold[0])
            value = xxhash.xxh3_64_intdigest(body).to_bytes(_SUM_BYTES, "little") + body
            name = entry_name(self._pool, self._writer, self._next)
            # A put that failed may have left its name taken for a while: it is not used again.
            self._next += 1
            if not self._link.write(name, value):
                return
            self._untold.popleft()
        if self._seat >= 0:
            self._clear_old()

    def close(self) -> None:
        """Say that nothing follows. Raises MasterAwayError."""
        if self._seat >= 0:
            self.tell(Entry(is_last=True))

    def _sit_down(self) -> None:
        """Have a seat. One that is gone was lost with its owner, and so may be what was told: begin anew.

        Where all are taken, take one over, whoever's: most are of stores that ended. One that has not sits down elsewhere.
        """
        now = time.monotonic()
        if self._seat >= 0:
            if now < self._look_again_at:
                return
            self._look_again_at = now + _LOOK_S
            name = seat_name(self._pool, self._seat)
            is_there = self._link.is_there([name])[0]
            # Not readable for a moment is not lost.
            if is_there and self._link.read([name])[0] in {b"", self._writer.encode()}:
                return
            self._seat = -1
            if not is_there:
                self._writer, self._next = secrets.token_hex(8), 0
                self.mine.add(self._writer)
        if self._inherit():
            return
        taken = self._link.is_there([seat_name(self._pool, seat) for seat in range(SEATS)])
        if any(self._take(seat) for seat in range(SEATS) if not taken[seat]):
            return
        for seat in random.sample(range(SEATS), _TAKE_OVER_MAX):
            self._link.remove([seat_name(self._pool, seat)])
            if self._take(seat):
                return
        log.warning("no seat in the pool %r can be taken; nobody hears what this store puts", self._pool)

    def _inherit(self) -> bool:
        """Take the seat of a store that has closed, and tell in its place what is known: its log goes.

        So there are as many seats and logs as stores, however often they start, and who joins later hears of it all.
        """
        for seat, (writer, end) in self._finished().items():
            name = seat_name(self._pool, seat)
            if self._link.read([name]) != [writer.encode()]:
                continue
            self._link.remove([name])
            if not self._take(seat):
                continue
            known = list(self._known())
            told = [entry_of(known[at : at + _TOLD_ANEW_MAX]) for at in range(0, len(known), _TOLD_ANEW_MAX)]
            room = _UNTOLD_MAX - len(self._untold)
            self._untold.extendleft(reversed(told[-room:] if room > 0 else []))
            self._old_logs.append((writer, end))
            return True
        return False

    def _clear_old(self) -> None:
        """All that they said has been said again."""
        while self._old_logs:
            writer, end = self._old_logs.pop()
            for first in range(0, end, _TOLD_ANEW_MAX):
                numbers = range(first, min(first + _TOLD_ANEW_MAX, end))
                self._link.remove([entry_name(self._pool, writer, number) for number in numbers])

    def _take(self, seat: int) -> bool:
        name, value = seat_name(self._pool, seat), self._writer.encode()
        if self._link.write(name, value) and self._link.read([name]) == [value]:
            self._seat = seat
            return True
        return False


class Follower:
    """What the others tell. To be called from one thread."""

    def __init__(self, link: AnyLink, pool: str) -> None:
        self._link = link
        self._pool = pool
        self._seats: dict[int, str] = {}
        self._next: dict[str, int] = {}
        self._ended: set[str] = set()
        self._looks = 0
        self.unreadable = 0

    def look(self, but: Container[str]) -> list[Entry]:
        """New entries of all logs but these, each log's in order. Raises MasterAwayError."""
        self._find_logs()
        entries: list[Entry] = []
        # Of those that sit: of others nothing new is to be expected, and there are ever more of them.
        for writer in dict.fromkeys(self._seats.values()):
            if writer not in but and writer not in self._ended:
                entries += self._read(writer)
        return entries

    def finished(self) -> dict[int, tuple[str, int]]:
        """Seats of stores that have closed, of which all was read: the writer of each, and where its log ends. From any thread."""
        return {
            seat: (writer, self._next.get(writer, 0))
            for seat, writer in list(self._seats.items())
            if writer in self._ended
        }

    def _find_logs(self) -> None:
        names = [seat_name(self._pool, seat) for seat in range(SEATS)]
        taken = [seat for seat, is_taken in enumerate(self._link.is_there(names)) if is_taken]
        # A seat may have changed hands between two looks, where the pool was emptied.
        reads_all = self._looks % _LOOKS == 0
        self._looks += 1
        new = [
            seat for seat in taken if reads_all or seat not in self._seats or self._seats[seat] in self._ended
        ]
        for seat in [seat for seat in self._seats if seat not in taken]:
            del self._seats[seat]
        for seat, value in zip(new, self._link.read([names[seat] for seat in new]), strict=True):
            if value:
                self._seats[seat] = value.decode("ascii", "replace")
                self._next.setdefault(self._seats[seat], 0)

    def _read(self, writer: str) -> list[Entry]:
        entries: list[Entry] = []
        while True:
            at = self._next[writer]
            steps = [*range(_NEAR), *_FAR]
            names = [entry_name(self._pool, writer, at + step) for step in steps]
            there = [step for step, found in zip(steps, self._link.is_there(names), strict=True) if found]
            near = [step for step in there if step < _NEAR]
            if not near:
                if not there:
                    return entries
                self._next[writer] = at + there[0]
                continue
            for value in self._link.read([names[step] for step in near]):
                entry = _entry(value)
                if entry is None:
                    self.unreadable += 1
                    continue
                entries.append(entry)
                if entry.is_last:
                    self._ended.add(writer)
            self._next[writer] = at + near[-1] + 1


def _entry(value: bytes) -> Entry | None:
    body = value[_SUM_BYTES:]
    if not body or xxhash.xxh3_64_intdigest(body).to_bytes(_SUM_BYTES, "little") != value[:_SUM_BYTES]:
        return None
    try:
        return msgspec.msgpack.decode(body, type=Entry)
    except msgspec.DecodeError:
        return None


def seat_name(pool: str, seat: int) -> str:
    """Where a store says that it has a log."""
    return f"{prefix(pool)}seat/{seat}"


def entry_name(pool: str, writer: str, number: int) -> str:
    """Where a log has its entry `number`."""
    return f"{prefix(pool)}log/{writer}/{number}"
