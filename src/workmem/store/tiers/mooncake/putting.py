"""Pages into the pool: grouped, put, tried again while there is no room, looked up, told to the others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from workmem.store.tiers.contract import ArenaMemory, Outcome, PageOut
from workmem.store.tiers.mooncake.answers import Answers
from workmem.store.tiers.mooncake.memory import Span, span_of
from workmem.store.tiers.mooncake.objects import PoolObject, group, object_name
from workmem.store.tiers.mooncake.outcomes import PutResult
from workmem.store.tiers.mooncake.peers import Peers
from workmem.store.tiers.mooncake.sealed_link import AnyLink
from workmem.store.tiers.mooncake.shelf import Shelf

DEADLINE_S = 12.0
"""Longest that a batch of puts is tried: well below what the store gives it."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.004, 0.25
_DEAD_OWNERS_MAX = 8
"""Tries that may meet an owner that is dead and not yet struck off: the master places objects at random."""
ANYWHERE = "anywhere"
"""Where the master puts an object is its business: writes are left alone as one peer."""

_MAY_BE_THERE = {PutResult.STORED, PutResult.TIMEOUT, PutResult.MASTER_AWAY}
_AGAIN = {PutResult.NO_ROOM, PutResult.OWNER_DEAD}


class Putting:
    """To be called from one thread."""

    def __init__(
        self,
        link: AnyLink,
        arena: ArenaMemory,
        shelf: Shelf,
        peers: Peers,
        counts: Counter[str],
        pool: str,
        bytes_max: int,
    ) -> None:
        self._link = link
        self._arena = arena
        self._shelf = shelf
        self._peers = peers
        self._counts = counts
        self._pool = pool
        self._bytes_max = bytes_max
        self._unwanted: set[str] = set()
        """Objects that were put too late."""

    def put(
        self,
        pages: Sequence[PageOut],
        done: Answers,
        tell: Callable[[list[PoolObject]], None],
    ) -> None:
        """See `Tier.put`. `tell` is called with what was stored before any of it is DONE. Raises MasterAwayError.

        Where `done` was answered for by somebody else meanwhile, nothing is told: the engine may have read pages that
        were other ones by then. Whoever heard of them would find out, and they are taken out of the pool again.
        """
        if done.is_over:
            return
        new = self._new(pages, done)
        if not new:
            return
        self._clear()
        groups = [pages[index].facts.group for index in new]
        runs = [
            [new[at] for at in run]
            for run in group([pages[index].about for index in new], self._bytes_max, groups)
        ]
        objects = [self._object([pages[index] for index in run]) for run in runs]
        spans = [[span_of(pages[index].page, self._arena) for index in run] for run in runs]
        results = self._results(objects, spans, done)
        if done.is_over:
            self._counts["put_abandoned"] += len(objects)
            self._unwanted.update(
                found.name
                for found, (result, _) in zip(objects, results, strict=True)
                if result in _MAY_BE_THERE
            )
            self._clear()
            return
        kept: list[PoolObject] = []
        outcomes: list[Outcome] = []
        for found, (result, peer) in zip(objects, results, strict=True):
            self._counts[f"put_{result}"] += 1
            if peer is not None:
                self._peers.worked(peer)
                kept.append(msgspec.structs.replace(found, peer=peer))
            outcomes.append(_outcome(result))
        if kept:
            tell(kept)
        for run, outcome in zip(runs, outcomes, strict=True):
            for index in run:
                done(index, outcome)

    def _new(self, pages: Sequence[PageOut], done: Answers) -> list[int]:
        """Those that are not there yet; the others are DONE."""
        new: list[int] = []
        for index, place in enumerate(self._shelf.find([page.about.name for page in pages])):
            if place is None or place.page.header_sum != pages[index].about.header_sum:
                new.append(index)
            else:
                self._counts[f"put_{PutResult.ALREADY_THERE}"] += 1
                done(index, Outcome.DONE)
        return new

    def _clear(self) -> None:
        """Take out what may have other bytes than its name says, until that is done. Without a master: next time."""
        names = list(self._unwanted)
        removed = self._link.remove(names) if names else []
        self._unwanted.difference_update(
            name for name, is_gone in zip(names, removed, strict=True) if is_gone
        )

    def _object(self, pages: Sequence[PageOut]) -> PoolObject:
        about = tuple(page.about for page in pages)
        facts = [page.facts for page in pages]
        pin_s = max(one.wanted_s for one in facts)
        return PoolObject(object_name(self._pool, about), about, group=facts[0].group, pin_s=pin_s)

    def _results(
        self, objects: Sequence[PoolObject], spans: Sequence[Sequence[Span]], done: Answers
    ) -> list[tuple[PutResult, str | None]]:
        """Of each object, and the peer that has it."""
        if not self._peers.may_ask(ANYWHERE):
            return [(PutResult.OWNER_DEAD, None)] * len(objects)
        results = self._tried(objects, spans, done)
        if done.is_over:
            return [(result, None) for result in results]
        stored = [at for at, result in enumerate(results) if result is PutResult.STORED]
        peers: dict[int, str | None] = dict(
            zip(stored, self._link.where([objects[at] for at in stored]), strict=True)
        )
        return [
            (
                PutResult.IN_PROGRESS if result is PutResult.STORED and peers[at] is None else result,
                peers.get(at),
            )
            for at, result in enumerate(results)
        ]

    def _tried(
        self, objects: Sequence[PoolObject], spans: Sequence[Sequence[Span]], done: Answers
    ) -> list[PutResult]:
        results = self._link.put(objects, spans)
        until, pause, dead = time.monotonic() + DEADLINE_S, _FIRST_PAUSE_S, 0
        while again := [at for at, result in enumerate(results) if result in _AGAIN]:
            dead += any(results[at] is PutResult.OWNER_DEAD for at in again)
            if time.monotonic() + pause > until or dead > _DEAD_OWNERS_MAX or PutResult.TIMEOUT in results:
                break
            self._counts["put_retries"] += len(again)
            time.sleep(pause)
            if done.is_over:
                break
            pause = min(2 * pause, _LAST_PAUSE_S)
            tried = self._link.put([objects[at] for at in again], [spans[at] for at in again])
            for at, result in zip(again, tried, strict=True):
                results[at] = result
        if PutResult.TIMEOUT in results or dead > _DEAD_OWNERS_MAX:
            self._peers.failed(ANYWHERE)
        return results


def _outcome(result: PutResult) -> Outcome:
    if result in {PutResult.STORED, PutResult.ALREADY_THERE}:
        return Outcome.DONE
    if result in {PutResult.MASTER_AWAY, PutResult.BROKEN}:
        return Outcome.FAILED
    return Outcome.REFUSED
