"""What is done so that Mooncake, which knows leases only, keeps what the store wants and has it near.

Objects with pages that somebody waits for have their leases renewed, one question for a whole group; those that lie with other
hosts are copied to this one's memory, where it gives any. All of it within bounds: a pool in which everything is wanted could evict nothing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from workmem.store.tiers.contract import PageFacts, PageName
from workmem.store.tiers.mooncake.objects import PoolObject, names_of
from workmem.store.tiers.mooncake.sealed_link import AnyLink
from workmem.store.tiers.mooncake.shelf import Shelf

RENEW_S = 3.0
"""Between two rounds: masters hold what was asked about for 5 s at the least that is sound."""
WANTED_MAX = 16_384
"""Pages; of more the first ones said are let go."""
WANTED_SHARE = 0.25
"""Of the pool: so much is kept from eviction at most, the groups of what is wanted and all."""
COPIED_SHARE = 0.25
"""Of this process's segment: so much of it copies of others' objects take at most."""
COPIES_A_ROUND = 16


class Caring:
    """`note` may be called from any thread, and takes no longer than its arguments are long; `step` from one."""

    def __init__(
        self,
        link: AnyLink,
        shelf: Shelf,
        counts: Counter[str],
        capacity_bytes: int,
        segment_bytes: int,
        lose: Callable[[Sequence[PageName]], None],
    ) -> None:
        self._link = link
        self._shelf = shelf
        self._counts = counts
        self._lose = lose
        self._renew_bytes = int(capacity_bytes * WANTED_SHARE)
        self._copy_bytes = int(segment_bytes * COPIED_SHARE)
        self._lock = threading.Lock()
        self._wanted: OrderedDict[PageName, float] = OrderedDict()
        """Until when, the page said last at the end."""
        self._next_at = 0.0
        self._copied: dict[str, int] = {}
        """Bytes of objects that were copied here, by name."""

    def note(self, names: Sequence[PageName], facts: PageFacts) -> None:
        """See `AdvisedTier.advise`."""
        until = time.monotonic() + facts.wanted_s
        with self._lock:
            for name in names:
                self._wanted.pop(name, None)
                if facts.wanted_s > 0:
                    self._wanted[name] = until
            while len(self._wanted) > WANTED_MAX:
                self._wanted.popitem(last=False)

    def step(self) -> None:
        """Do what is due. Raises MasterAwayError."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + RENEW_S
        objects = self.wanted(now)
        if not objects:
            return
        self._renew(objects)
        if self._copy_bytes:
            self._bring_near(objects)

    def wanted(self, now: float) -> list[PoolObject]:
        """Objects to keep at `now`, whoever was said last first, as many as may be."""
        with self._lock:
            for name in [name for name, until in self._wanted.items() if until <= now]:
                del self._wanted[name]
            names = list(reversed(self._wanted))
        found: dict[str, PoolObject] = {}
        kept: dict[str, bool] = {}
        room = self._renew_bytes
        for place in self._shelf.find(names):
            if place is None or place.inside.name in found:
                continue
            one = place.inside
            together = one.group or one.name
            if together not in kept:
                size = self._shelf.bytes_with(one)
                kept[together] = size <= room
                room -= size if kept[together] else 0
            if kept[together]:
                found[one.name] = one
        return list(found.values())

    def _renew(self, objects: Sequence[PoolObject]) -> None:
        """To ask whether an object is there is to have it kept, and its group."""
        asked = {one.group or one.name: one.name for one in objects}
        names = list(asked.values())
        there = self._link.is_there(names)
        self._counts["leases_renewed"] += len(names)
        gone = {name for name, is_there in zip(names, there, strict=True) if not is_there}
        for one in objects:
            if one.name in gone:
                self._shelf.forget(one.name, names_of(one))
                self._lose(names_of(one))

    def _bring_near(self, objects: Sequence[PoolObject]) -> None:
        here = self._link.endpoint()
        known = {one.name for one in self._shelf.known(self._copied)}
        self._copied = {name: size for name, size in self._copied.items() if name in known}
        room = self._copy_bytes - sum(self._copied.values())
        far = [one for one in objects if one.peer != here and one.name not in self._copied]
        for one in far[:COPIES_A_ROUND]:
            if one.size > room:
                continue
            if self._link.copy_here(one.name):
                self._copied[one.name] = one.size
                room -= one.size
                self._counts["copies_begun"] += 1
