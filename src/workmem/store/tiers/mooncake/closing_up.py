"""Objects that lost pages are put anew without them: bytes of dropped pages are not to crowd the pool.

Children leave before their parents, so what is left of an object is the beginning that many contexts share: worth moving.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from workmem.store.tiers.contract import HeldPage
from workmem.store.tiers.mooncake.link import MasterAwayError, Wanted
from workmem.store.tiers.mooncake.memory import Span
from workmem.store.tiers.mooncake.objects import PoolObject, group, object_name
from workmem.store.tiers.mooncake.outcomes import SILENT, GetResult, PutResult
from workmem.store.tiers.mooncake.peers import Peers
from workmem.store.tiers.mooncake.sealed_link import AnyLink
from workmem.store.tiers.mooncake.shelf import Place, Shelf

Tell = Callable[[Sequence[PoolObject], Sequence[Place]], None]


class ClosingUp:
    """To be called from one thread. `close` when no call is under way."""

    def __init__(
        self, link: AnyLink, shelf: Shelf, peers: Peers, pool: str, bytes_max: int, limit_bytes: int
    ) -> None:
        """Objects of at most `bytes_max` bytes, until all take `limit_bytes`. Raises OSError where its memory is refused."""
        self._link = link
        self._shelf = shelf
        self._peers = peers
        self._pool = pool
        self._bytes_max = bytes_max
        self._limit_bytes = limit_bytes
        self._memory = np.frombuffer(mmap.mmap(-1, bytes_max), np.uint8)
        self._base = int(self._memory.ctypes.data)
        link.register(self._base, bytes_max)

    def run(self, need_bytes: int, tell: Tell) -> None:
        """Until objects of `need_bytes` more fit below the limit, or nothing can be gained. Raises MasterAwayError."""
        while self._shelf.object_bytes + need_bytes > self._limit_bytes:
            places = self._shelf.most_wasted()
            if not places:
                return
            self._move(places, tell)

    def close(self) -> None:
        """Let go of its memory."""
        self._link.unregister(self._base)

    def _move(self, places: Sequence[Place], tell: Tell) -> None:
        old = places[0].inside
        spans: list[Span] = []
        at = self._base
        for place in places:
            spans.append((at, place.page.length))
            at += place.page.length
        wanted = Wanted(old, tuple(place.index for place in places), tuple(spans))
        if not self._peers.may_ask(old.peer):
            self._shelf.forget(old.name, [place.page.name for place in places])
            return
        (result,) = self._link.get_some([wanted], self._base)
        if result is GetResult.MASTER_AWAY:
            raise MasterAwayError("the master of the pool does not answer")
        if result in SILENT:
            self._peers.failed(old.peer)
        if result is not GetResult.ARRIVED:
            self._shelf.forget(old.name, [place.page.name for place in places])
            return
        pages = [place.page for place in places]
        runs = group(pages, self._bytes_max)
        new = [self._object([pages[index] for index in run], old.group) for run in runs]
        # The old one first: where there is no room its place is what there is to have.
        self._link.remove([old.name])
        results = self._link.put(new, [[spans[index] for index in run] for run in runs])
        peers = self._link.where(new)
        there = [
            msgspec.structs.replace(one, peer=peer)
            for one, result, peer in zip(new, results, peers, strict=True)
            if result is PutResult.STORED and peer is not None
        ]
        self._shelf.move(old, there)
        tell(there, places)

    def _object(self, pages: Sequence[HeldPage], group: str) -> PoolObject:
        return PoolObject(object_name(self._pool, pages), tuple(pages), group=group)
