"""Pages on their way into vram: page by page while the disk still reads, slice by slice while the engine computes.

A `LoadGate` stands between the loader thread and the forward pass. Pages that come from ssd are copied as
they reach dram, so that little is left to copy when the last one has. From then on a step may begin, and its
attention of layer i waits only for the slice that carries layer i. Everything is checked on the copy in
vram (rules R3, R6). If a page fails its check or does not arrive, the gate says from which block on nothing
may be used; the result of a step that has begun by then is thrown away.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from workmem.core.errors import LeaseError
from workmem.core.outcomes import MissReason

if TYPE_CHECKING:
    from workmem.engines.embedded.kv_pages import KVPages
    from workmem.store.contract import Lease
    from workmem.store.copying import CopySlices

_LOG = logging.getLogger(__name__)


class _Page(NamedTuple):
    """A leased page on its way into its block, and the sums its slices must have."""

    copy: CopySlices
    wanted: tuple[int, ...]


class LoadGate:
    """Progress of one load: pages `first`.. of `lease` into `blocks`."""

    def __init__(self, lease: Lease, first: int, blocks: list[int], counters: LoadCounters) -> None:
        self.lease = lease
        self.first = first
        self.blocks = blocks
        self.copied = 0
        """Leading pages that are in place whole; the loader's."""
        self.failed_at: int | None = None
        """Index into `blocks` of the first page that failed; valid once `finished`."""
        self.reason = MissReason.CORRUPT
        """Why it failed."""
        self.is_abandoned = False
        """Nobody wants the pages any more."""
        self._counters = counters
        self._done = 0
        self._is_queued = False
        self._change = threading.Condition()
        self.computing = False
        """Set when the forward pass that uses these blocks has begun."""

    @property
    def is_open(self) -> bool:
        """Whether a step may begin: no page has to come from a disk any more."""
        return self.lease.ready >= self.first + len(self.blocks)

    @property
    def finished(self) -> bool:
        """All slices have arrived, or failed."""
        return self._done >= self.lease.layout.slice_count

    def wait_layer(self, layer: int) -> None:
        """Return once `layer` is in place (or known to have failed)."""
        needed = self.lease.layout.slice_of_layer(layer) + 1
        self.computing = True
        if self._done >= needed:
            return
        with self._change:
            self._counters.waited += 1
            self._change.wait_for(lambda: self._done >= needed)

    def wait(self) -> None:
        """Return once the load is finished."""
        with self._change:
            self._change.wait_for(lambda: self.finished)

    def arrive(self, slice_index: int) -> None:
        """Loader: slice `slice_index` is in place and checked, or has failed."""
        with self._change:
            self._done = slice_index + 1
            self._counters.slices += 1
            # The first slice has nothing to hide behind; later ones overlap if compute has begun meanwhile.
            if self.computing and slice_index > 0:
                self._counters.overlapped += 1
            self._change.notify_all()

    def fail(self, at: int, reason: MissReason) -> None:
        """Loader: pages from `at` on are not to be had, and nothing more will come."""
        with self._change:
            self.failed_at, self.reason = at, reason
            self._done = self.lease.layout.slice_count
            self._change.notify_all()

    def queue(self) -> bool:
        """Whether the loader has to be told: it has not been since it last looked."""
        with self._change:
            was_queued, self._is_queued = self._is_queued, True
            return not was_queued

    def unqueue(self) -> None:
        """Loader: it looks now."""
        with self._change:
            self._is_queued = False


class LoadCounters:
    """What was loaded, and what of it behind what else."""

    def __init__(self) -> None:
        self.slices = 0
        self.overlapped = 0
        """Slices that arrived while earlier layers were computed."""
        self.waited = 0
        """Layers that had to wait."""
        self.pages = 0
        self.early = 0
        """Pages that were in vram before the last one of their load was in dram."""
        self.corrupt = 0


class PageLoader:
    """One thread that copies and checks. `wake` is called (from that thread) when a load has finished."""

    def __init__(self, pages: KVPages, wake: Callable[[], None]) -> None:
        self.counters = LoadCounters()
        self._pages = pages
        self._wake = wake
        self._jobs: queue.SimpleQueue[LoadGate | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="workmem-load", daemon=True)
        self._thread.start()

    def load(self, lease: Lease, first: int, blocks: list[int]) -> LoadGate:
        """Start copying pages `first`, `first` + 1, ... of `lease` into `blocks`, also such as are still to come.

        The gate ends by itself, when the lease has settled at the latest.
        """
        gate = LoadGate(lease, first, blocks, self.counters)
        if gate.is_open:
            self._look_at(gate)
        else:
            lease.on_ready(lambda: self._look_at(gate))
            # Those that are here already need not wait for the next one to arrive.
            self._look_at(gate)
        return gate

    def abandon(self, gate: LoadGate) -> None:
        """End a load that nobody wants any more; on return its blocks are left alone."""
        gate.is_abandoned = True
        self._look_at(gate)
        gate.wait()

    def close(self) -> None:
        """Finish what is queued and stop."""
        self._jobs.put(None)
        self._thread.join()

    def _look_at(self, gate: LoadGate) -> None:
        if gate.queue():
            self._jobs.put(gate)

    def _run(self) -> None:
        while (gate := self._jobs.get()) is not None:
            gate.unqueue()
            if gate.finished:
                continue
            try:
                self._load(gate)
            except Exception:  # noqa: BLE001 - thread main: whatever went wrong, whoever waits at the gate must hear of it
                _LOG.exception("loading pages failed; their tokens are computed")
                gate.fail(0, MissReason.CORRUPT)
            if gate.finished:
                self._wake()

    def _load(self, gate: LoadGate) -> None:
        # In this order: what is ready when the lease has failed is all that ever will be.
        lost = gate.lease.failed
        try:
            if not gate.is_open:
                self._load_pages(gate)
            if gate.is_open and not gate.finished:
                self._load_slices(gate)
        except LeaseError:
            lost = MissReason.EXPIRED
        if gate.is_abandoned or lost is not None:
            self._end_short(gate, gate.copied, lost or MissReason.EXPIRED)

    def _load_pages(self, gate: LoadGate) -> None:
        """Bring in whole pages as far as they have come; more are on their way to dram."""
        while gate.copied < gate.lease.ready - gate.first and not (gate.is_abandoned or gate.is_open):
            page = self._page(gate, gate.copied)
            if not self._bring(gate, gate.copied, page, range(len(page.wanted))):
                self._clear(gate.blocks[gate.copied : gate.copied + 1])
                self._end_short(gate, gate.copied, MissReason.CORRUPT)
                return
            gate.copied += 1
            self.counters.early += 1

    def _load_slices(self, gate: LoadGate) -> None:
        """Bring in the rest, the first layers of all pages first: the step that needs them may have begun."""
        first, usable = gate.copied, len(gate.blocks)
        pages = [self._page(gate, index) for index in range(first, usable)]
        last = gate.lease.layout.slice_count - 1
        for part in range(last + 1):
            for index in range(first, usable):
                if gate.is_abandoned:
                    self._clear(gate.blocks[usable:])
                    return
                if not self._bring(gate, index, pages[index - first], range(part, part + 1)):
                    usable = index
                    break
            if part < last:
                gate.arrive(part)
        gate.copied = usable
        if usable == len(gate.blocks):
            self.counters.pages += usable
            gate.arrive(last)
            return
        self._clear(gate.blocks[usable:])
        self._end_short(gate, usable, MissReason.CORRUPT)

    def _clear(self, blocks: list[int]) -> None:
        """Half a page of somebody's bytes may read as NaN, which even a masked product would spread."""
        for block in blocks:
            self._pages.clear(block)

    def _end_short(self, gate: LoadGate, usable: int, reason: MissReason) -> None:
        if not gate.finished:
            self.counters.pages += usable
            gate.fail(usable, reason)

    def _page(self, gate: LoadGate, index: int) -> _Page:
        number = gate.first + index
        copy = self._pages.copier_in(gate.blocks[index], gate.lease.page(number))
        return _Page(copy, gate.lease.checksums(number))

    def _bring(self, gate: LoadGate, index: int, page: _Page, parts: range) -> bool:
        """Copy slices of a page; whether the copies are what was stored. If not, the page leaves service."""
        if page.copy(parts) == page.wanted[parts.start : parts.stop]:
            return True
        self.counters.corrupt += 1
        # A lease that has ended meanwhile can accuse nobody.
        with contextlib.suppress(LeaseError):
            gate.lease.quarantine(gate.first + index)
        return False
