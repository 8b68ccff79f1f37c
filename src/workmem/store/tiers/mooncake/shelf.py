"""Which page lies in which object of the pool, as far as this process knows."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from workmem.store.tiers.contract import HeldPage, PageName
from workmem.store.tiers.mooncake.objects import PoolObject


class Place(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A page in an object."""

    inside: PoolObject
    index: int

    @property
    def page(self) -> HeldPage:
        """What is known of it."""
        return self.inside.pages[self.index]


class _Held(msgspec.Struct, eq=False):
    inside: PoolObject
    left: dict[PageName, int]
    """Pages that were not taken off, and their place inside."""
    left_bytes: int


class Shelf:
    """Every method may be called from any thread and takes no longer than its arguments are long, but `most_wasted`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[PageName, Place] = {}
        self._objects: dict[str, _Held] = {}
        self.used_bytes = 0
        """Of pages."""
        self.object_bytes = 0
        """Of objects: an object stays whole until its last page is taken off."""
        self._group_bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, found: PoolObject) -> list[HeldPage]:
        """Returns those of its pages that no other object has."""
        with self._lock:
            if found.name in self._objects:
                return []
            left = {
                page.name: index for index, page in enumerate(found.pages) if page.name not in self._places
            }
            return self._put_in(found, left)

    def keep(self, found: PoolObject) -> None:
        """What this store has put: its pages lie there now, wherever they lay. Another's may be rounded otherwise, with other checksums."""
        with self._lock:
            for page in found.pages:
                place = self._places.get(page.name)
                if place is not None and place.inside.name != found.name:
                    self._take_off(page.name)
            held = self._objects.pop(found.name, None)
            if held is not None:
                self.used_bytes -= held.left_bytes
                self._count(held.inside, -1)
            self._put_in(found, {page.name: index for index, page in enumerate(found.pages)})

    def find(self, names: Sequence[PageName]) -> list[Place | None]:
        """Where each lies."""
        with self._lock:
            return [self._places.get(name) for name in names]

    def known(self, names: Iterable[str]) -> list[PoolObject]:
        """Objects that are known by these names."""
        with self._lock:
            return [self._objects[name].inside for name in names if name in self._objects]

    def objects(self) -> list[PoolObject]:
        """All that are known."""
        with self._lock:
            return [held.inside for held in self._objects.values()]

    def bytes_with(self, one: PoolObject) -> int:
        """Of an object, and of all that are known of its group."""
        with self._lock:
            return self._group_bytes.get(one.group, one.size) if one.group else one.size

    def emptied_by(self, names: Iterable[PageName]) -> list[PoolObject]:
        """Objects of which nothing would be left without these pages."""
        with self._lock:
            places = [self._places[name] for name in set(names) if name in self._places]
            left = {place.inside.name: len(self._objects[place.inside.name].left) for place in places}
            for place in places:
                left[place.inside.name] -= 1
            return list({p.inside.name: p.inside for p in places if not left[p.inside.name]}.values())

    def most_wasted(self) -> list[Place]:
        """What is left of the object that holds most bytes of pages that were taken off; empty where none does."""
        with self._lock:
            held = max(self._objects.values(), key=lambda one: one.inside.size - one.left_bytes, default=None)
            if held is None or held.inside.size == held.left_bytes:
                return []
            return [Place(held.inside, index) for index in sorted(held.left.values())]

    def take_off(self, names: Iterable[PageName]) -> list[Place]:
        """Forget pages. Returns where those lay that were known."""
        with self._lock:
            places = [self._places[name] for name in dict.fromkeys(names) if name in self._places]
            for place in places:
                self._take_off(place.page.name)
            return places

    def forget(self, name: str, pages: Iterable[PageName]) -> None:
        """The object `name` is gone with what lies in it of `pages`."""
        with self._lock:
            for page in pages:
                place = self._places.get(page)
                if place is not None and place.inside.name == name:
                    self._take_off(page)

    def move(self, old: PoolObject, new: Sequence[PoolObject]) -> None:
        """What is left in `old` lies in these now."""
        with self._lock:
            held = self._objects.get(old.name)
            there = set(held.left) if held is not None else set[PageName]()
            for page in there:
                self._take_off(page)
            for one in new:
                if one.name not in self._objects:
                    left = {page.name: index for index, page in enumerate(one.pages) if page.name in there}
                    self._put_in(one, left)

    def _put_in(self, found: PoolObject, left: dict[PageName, int]) -> list[HeldPage]:
        if not left:
            return []
        pages = [found.pages[index] for index in left.values()]
        size = sum(page.length for page in pages)
        self._objects[found.name] = _Held(found, left, size)
        self._places |= {name: Place(found, index) for name, index in left.items()}
        self.used_bytes += size
        self._count(found, 1)
        return pages

    def _take_off(self, name: PageName) -> None:
        place = self._places.pop(name)
        held = self._objects[place.inside.name]
        del held.left[name]
        held.left_bytes -= place.page.length
        self.used_bytes -= place.page.length
        if not held.left:
            del self._objects[place.inside.name]
            self._count(held.inside, -1)

    def _count(self, one: PoolObject, sign: int) -> None:
        self.object_bytes += sign * one.size
        if one.group:
            self._group_bytes[one.group] += sign * one.size
            if not self._group_bytes[one.group]:
                del self._group_bytes[one.group]
