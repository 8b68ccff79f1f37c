"""Tiers below dram that need no medium: memory, a slow one, one that fails when told."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from workmem.core.outcomes import TierName
from workmem.store.tiers.contract import (
    ArenaMemory,
    HeldPage,
    Options,
    Outcome,
    PageIn,
    PageName,
    PageOut,
    Tier,
    TierUsage,
)

Done = Callable[[int, Outcome], None]


class MemoryTier:
    """Keeps copies of pages in a dictionary. `shelf` may be that of another one, which it then continues."""

    kind = TierName.SSD

    def __init__(
        self, capacity_bytes: int = 0, shelf: dict[PageName, tuple[HeldPage, bytes]] | None = None
    ) -> None:
        self.shelf = {} if shelf is None else shelf
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._used = sum(len(page) for _, page in self.shelf.values())

    def open(self, arena: ArenaMemory) -> Iterable[HeldPage]:
        """See `Tier.open`."""
        del arena
        return [about for about, _ in self.shelf.values()]

    def put(self, pages: Sequence[PageOut], done: Done) -> None:
        """See `Tier.put`."""
        for index, page in enumerate(pages):
            done(index, self._keep(page))

    def get(self, pages: Sequence[PageIn], done: Done) -> None:
        """See `Tier.get`."""
        for index, page in enumerate(pages):
            with self._lock:
                found = self.shelf.get(page.name)
            if found is None or len(found[1]) != len(page.into):
                done(index, Outcome.ABSENT)
                continue
            page.into[:] = found[1]
            done(index, Outcome.DONE)

    def drop(self, names: Sequence[PageName], done: Done) -> None:
        """See `Tier.drop`."""
        for index, name in enumerate(names):
            with self._lock:
                found = self.shelf.pop(name, None)
                self._used -= len(found[1]) if found is not None else 0
            done(index, Outcome.DONE)

    def usage(self) -> TierUsage:
        """See `Tier.usage`."""
        return TierUsage(self._capacity_bytes, self._used, len(self.shelf))

    def close(self, timeout_s: float) -> bool:
        """See `Tier.close`."""
        del timeout_s
        return True

    def _keep(self, page: PageOut) -> Outcome:
        name = page.about.name
        with self._lock:
            if name in self.shelf:
                return Outcome.DONE
            if self._capacity_bytes and self._used + len(page.page) > self._capacity_bytes:
                return Outcome.REFUSED
            self.shelf[name] = (page.about, bytes(page.page))
            self._used += len(page.page)
            return Outcome.DONE


def memory_tier(options: Options) -> MemoryTier:
    """A `TierFactory`: `capacity_bytes` among the options bounds it."""
    return MemoryTier(int(options.get("capacity_bytes", 0)))


class _Call(msgspec.Struct, frozen=True, eq=False):
    bytes: int
    run: Callable[[], None]
    refuse: Callable[[], None]


class SimulatedTier:
    """`inner` behind a link: each call takes `latency_s`, and its bytes at `bytes_per_s`, one call after the other.

    At most `queue_max` calls wait; more are refused, or absent.
    """

    def __init__(
        self, inner: Tier, *, latency_s: float = 0.0, bytes_per_s: float = 1e9, queue_max: int = 256
    ) -> None:
        self._inner = inner
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._calls: queue.Queue[_Call | None] = queue.Queue(queue_max)
        self._thread = threading.Thread(target=self._main, name="workmem-tier-link", daemon=True)
        self._thread.start()
        self._ended = False

    @property
    def kind(self) -> TierName:
        """See `Tier.kind`."""
        return TierName.REMOTE

    def open(self, arena: ArenaMemory) -> Iterable[HeldPage]:
        """See `Tier.open`."""
        return self._inner.open(arena)

    def put(self, pages: Sequence[PageOut], done: Done) -> None:
        """See `Tier.put`."""
        size = sum(len(page.page) for page in pages)
        self._queue(len(pages), size, lambda: self._inner.put(pages, done), done, Outcome.REFUSED)

    def get(self, pages: Sequence[PageIn], done: Done) -> None:
        """See `Tier.get`."""
        size = sum(len(page.into) for page in pages)
        self._queue(len(pages), size, lambda: self._inner.get(pages, done), done, Outcome.FAILED)

    def drop(self, names: Sequence[PageName], done: Done) -> None:
        """See `Tier.drop`."""
        self._queue(len(names), 0, lambda: self._inner.drop(names, done), done, Outcome.FAILED)

    def usage(self) -> TierUsage:
        """See `Tier.usage`."""
        return self._inner.usage()

    def close(self, timeout_s: float) -> bool:
        """See `Tier.close`."""
        if not self._ended:
            self._ended = True
            self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._inner.close(timeout_s)

    def _queue(self, count: int, size: int, run: Callable[[], None], done: Done, full: Outcome) -> None:
        def refuse() -> None:
            for index in range(count):
                done(index, full)

        try:
            if self._ended:
                refuse()
            else:
                self._calls.put_nowait(_Call(size, run, refuse))
        except queue.Full:
            refuse()

    def _main(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._ended:
                call.refuse()
                continue
            time.sleep(self._latency_s + call.bytes / self._bytes_per_s)
            call.run()


class FaultyTier:
    """`inner`, but pages number `fail_at` to `fail_until` of `operation` fail, counted from 1 over all calls."""

    def __init__(
        self, inner: Tier, *, operation: str = "get", fail_at: int = 0, fail_until: int | None = None
    ) -> None:
        self._inner = inner
        self.operation = operation
        self.fail_at = fail_at
        self.fail_until = fail_at if fail_until is None else fail_until
        self.count = 0
        self._lock = threading.Lock()

    @property
    def kind(self) -> TierName:
        """See `Tier.kind`."""
        return self._inner.kind

    def open(self, arena: ArenaMemory) -> Iterable[HeldPage]:
        """See `Tier.open`."""
        return self._inner.open(arena)

    def put(self, pages: Sequence[PageOut], done: Done) -> None:
        """See `Tier.put`."""
        well = self._well("put", len(pages), done)
        self._inner.put([pages[index] for index in well], lambda at, outcome: done(well[at], outcome))

    def get(self, pages: Sequence[PageIn], done: Done) -> None:
        """See `Tier.get`."""
        well = self._well("get", len(pages), done)
        self._inner.get([pages[index] for index in well], lambda at, outcome: done(well[at], outcome))

    def drop(self, names: Sequence[PageName], done: Done) -> None:
        """See `Tier.drop`."""
        well = self._well("drop", len(names), done)
        self._inner.drop([names[index] for index in well], lambda at, outcome: done(well[at], outcome))

    def usage(self) -> TierUsage:
        """See `Tier.usage`."""
        return self._inner.usage()

    def close(self, timeout_s: float) -> bool:
        """See `Tier.close`."""
        return self._inner.close(timeout_s)

    def _well(self, operation: str, count: int, done: Done) -> list[int]:
        """Indices of the pages that do not fail; the others are answered for."""
        well: list[int] = []
        for index in range(count):
            with self._lock:
                self.count += operation == self.operation
                fails = operation == self.operation and self.fail_at <= self.count <= self.fail_until
            if fails and self.fail_at:
                done(index, Outcome.FAILED)
            else:
                well.append(index)
        return well
