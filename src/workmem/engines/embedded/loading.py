"""Pages on their way from dram into vram, slice by slice, while the engine already computes.

A `LoadGate` stands between the loader thread and the forward pass: attention of layer i waits only for
the slice that carries layer i. Each slice is checked on the copy in vram (rules R3, R6). If a page fails
its check the gate says from which block on nothing may be used, and the step's result for that request
is thrown away.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from workmem.core.errors import LeaseError

if TYPE_CHECKING:
    from workmem.engines.embedded.kv_pages import KVPages
    from workmem.store.contract import Lease

_LOG = logging.getLogger(__name__)


class LoadGate:
    """Progress of one load: pages `first`.. of `lease` into `blocks`."""

    def __init__(self, lease: Lease, first: int, blocks: list[int], counters: LoadCounters) -> None:
        self.lease = lease
        self.first = first
        self.blocks = blocks
        self.failed_at: int | None = None
        """Index into `blocks` of the first page that failed; valid once `finished`."""
        self._counters = counters
        self._done = 0
        self._change = threading.Condition()
        self.computing = False
        """Set when the forward pass that uses these blocks has begun."""

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


class LoadCounters:
    """Slices loaded, slices that arrived while earlier layers were computed, and layers that had to wait."""

    def __init__(self) -> None:
        self.slices = 0
        self.overlapped = 0
        self.waited = 0
        self.pages = 0
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
        """Start copying pages `first`, `first` + 1, ... of `lease` into `blocks`. The gate ends by itself."""
        gate = LoadGate(lease, first, blocks, self.counters)
        self._jobs.put(gate)
        return gate

    def close(self) -> None:
        """Finish what is queued and stop."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (gate := self._jobs.get()) is not None:
            try:
                self._load(gate)
            except Exception:  # noqa: BLE001 - thread main: whatever went wrong, whoever waits at the gate must hear of it
                _LOG.exception("loading pages failed; their tokens are computed")
                gate.failed_at = 0
                gate.arrive(gate.lease.layout.slice_count - 1)
            self._wake()

    def _load(self, gate: LoadGate) -> None:
        layout = gate.lease.layout
        usable = len(gate.blocks)
        try:
            sources = [np.frombuffer(gate.lease.page(gate.first + i), dtype=np.uint8) for i in range(usable)]
            wanted = [gate.lease.checksums(gate.first + i) for i in range(usable)]
        except LeaseError:
            usable, sources, wanted = 0, [], []
        for slice_index in range(layout.slice_count):
            start, end = layout.slice_span(slice_index)
            for i in range(usable):
                copy = self._pages.copy_in(gate.blocks[i], (start, end), sources[i][start:end])
                if xxhash.xxh3_64_intdigest(copy.data) != wanted[i][slice_index]:
                    gate.lease.quarantine(gate.first + i)
                    self.counters.corrupt += 1
                    usable = i
                    break
            if usable < len(gate.blocks):
                gate.failed_at = usable
                if slice_index + 1 == layout.slice_count:
                    # Half a page of somebody's bytes may read as NaN, which even a masked product would spread.
                    for block in gate.blocks[usable:]:
                        self._pages.clear(block)
            gate.arrive(slice_index)
        self.counters.pages += usable
