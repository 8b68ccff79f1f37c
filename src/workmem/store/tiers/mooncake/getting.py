"""Pages from the pool: what is asked for, by the peer that has it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from workmem.store.tiers.contract import ArenaMemory, Outcome, PageIn, PageName
from workmem.store.tiers.mooncake.lanes import Job, Lanes
from workmem.store.tiers.mooncake.link import Wanted
from workmem.store.tiers.mooncake.memory import span_of
from workmem.store.tiers.mooncake.objects import names_of
from workmem.store.tiers.mooncake.outcomes import SILENT, GetResult
from workmem.store.tiers.mooncake.peers import MASTER, Peers
from workmem.store.tiers.mooncake.sealed_link import AnyLink
from workmem.store.tiers.mooncake.shelf import Place, Shelf

log = logging.getLogger(__name__)

BATCH_BYTES = 8 * 2**20
"""Most that one call brings, so that the first pages of a long context come before its last."""

Done = Callable[[int, Outcome], None]


class Getting:
    """Every method may be called from any thread."""

    def __init__(
        self,
        link: AnyLink,
        arena: ArenaMemory,
        shelf: Shelf,
        peers: Peers,
        counts: Counter[str],
        lanes: Lanes,
        lose: Callable[[Sequence[PageName]], None],
    ) -> None:
        self._link = link
        self._arena = arena
        self._shelf = shelf
        self._peers = peers
        self._counts = counts
        self._lanes = lanes
        self._lose = lose
        """Told of pages that went with one that was asked for."""

    def get(self, pages: Sequence[PageIn], done: Done) -> None:
        """See `Tier.get`."""
        found: dict[str, tuple[Place, list[tuple[int, int]]]] = {}
        for index, place in enumerate(self._shelf.find([page.name for page in pages])):
            if place is None:
                self._counts["get_unknown"] += 1
                done(index, Outcome.ABSENT)
            elif place.page.length != len(pages[index].into):
                self._counts["get_unlike"] += 1
                self._shelf.forget(place.inside.name, names_of(place.inside))
                done(index, Outcome.ABSENT)
            elif not self._peers.may_ask(place.inside.peer):
                # No failure of the pool: one of its owners is silent, and what it had will be gone.
                self._counts["get_left_alone"] += 1
                done(index, Outcome.ABSENT)
            else:
                found.setdefault(place.inside.name, (place, []))[1].append((place.index, index))
        by_peer: dict[str, list[_Part]] = {}
        for place, parts in found.values():
            parts.sort()
            spans = tuple(span_of(pages[index].into, self._arena) for _, index in parts)
            wanted = Wanted(place.inside, tuple(at for at, _ in parts), spans)
            by_peer.setdefault(place.inside.peer, []).append(_Part(wanted, [index for _, index in parts]))
        for peer, parts in by_peer.items():
            for batch in _batches(parts):
                self._lanes.submit(
                    Job(
                        peer,
                        lambda b=batch, p=peer: self._bring(p, b, done),
                        lambda b=batch: _give_up(b, done),
                    )
                )

    def _bring(self, peer: str, batch: list[_Part], done: Done) -> None:
        for part, result in zip(batch, self._brought(peer, [part.wanted for part in batch]), strict=True):
            self._counts[f"get_{result}"] += 1
            if result in SILENT:
                self._left_alone(peer)
            elif result is GetResult.MASTER_AWAY:
                self._peers.failed(MASTER)
            elif result in {GetResult.MISS, GetResult.BROKEN}:
                if result is GetResult.BROKEN:
                    log.warning(
                        "%s is not what was told of it; it is not asked for again", part.wanted.inside.name
                    )
                self._shelf.forget(part.wanted.inside.name, names_of(part.wanted.inside))
                asked = set(part.wanted.indices)
                names = names_of(part.wanted.inside)
                self._lose([name for at, name in enumerate(names) if at not in asked])
            for index in part.pages:
                done(index, _outcome(result))

    def _brought(self, peer: str, wanted: list[Wanted]) -> list[GetResult]:
        if not self._peers.may_ask(MASTER):
            return [GetResult.MASTER_AWAY] * len(wanted)
        if not self._peers.may_ask(peer):
            # It fell silent while these waited.
            return [GetResult.OWNER_DEAD] * len(wanted)
        first = self._first(peer, wanted[0])
        if first in SILENT or first is GetResult.MASTER_AWAY:
            return [first] * len(wanted)
        results = self._results(wanted)
        if GetResult.ARRIVED in results:
            self._peers.worked(peer)
        again = [at for at, result in enumerate(results) if result is GetResult.LEASE_LOST]
        if again:
            # The master lends anew with each call; a second time is too slow a network.
            for at, result in zip(again, self._results([wanted[at] for at in again]), strict=True):
                results[at] = result
        return results

    def _left_alone(self, peer: str) -> None:
        if self._peers.failed(peer):
            log.warning("%s does not answer; it is not asked for a while, and what it has is a miss", peer)

    def _first(self, peer: str, wanted: Wanted) -> GetResult:
        """Whether it answers at all, if that is not known."""
        if self._peers.is_fresh(peer):
            return GetResult.ARRIVED
        one = Wanted(wanted.inside, wanted.indices[:1], wanted.spans[:1])
        return self._link.get_some([one], self._arena.address)[0]

    def _results(self, wanted: Sequence[Wanted]) -> list[GetResult]:
        whole = [at for at, one in enumerate(wanted) if len(one.indices) == len(one.inside.pages)]
        some = [at for at, one in enumerate(wanted) if len(one.indices) != len(one.inside.pages)]
        results = [GetResult.BROKEN] * len(wanted)
        for chosen, found in (
            (whole, self._link.get_whole([wanted[at] for at in whole]) if whole else []),
            (some, self._link.get_some([wanted[at] for at in some], self._arena.address) if some else []),
        ):
            for at, result in zip(chosen, found, strict=True):
                results[at] = result
        return results


class _Part:
    """What one object has of a batch, and which pages of the caller's these are."""

    __slots__ = ("pages", "wanted")

    def __init__(self, wanted: Wanted, pages: list[int]) -> None:
        self.wanted = wanted
        self.pages = pages


def _batches(parts: Sequence[_Part]) -> list[list[_Part]]:
    found: list[list[_Part]] = []
    room = 0
    for part in parts:
        size = sum(size for _, size in part.wanted.spans)
        if not found or size > room:
            found.append([])
            room = BATCH_BYTES
        found[-1].append(part)
        room -= size
    return found


def _give_up(batch: Sequence[_Part], done: Done) -> None:
    """Nothing comes from the pool at all."""
    for part in batch:
        for index in part.pages:
            done(index, Outcome.FAILED)


def _outcome(result: GetResult) -> Outcome:
    if result in {GetResult.ARRIVED, GetResult.TAMPERED}:
        # The store checks each page, and says of what is no page that it is corrupt.
        return Outcome.DONE
    return Outcome.FAILED if result is GetResult.MASTER_AWAY else Outcome.ABSENT
