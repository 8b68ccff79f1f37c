"""Pages held in dram for later, before a request has its turn: within a share of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from workmem.core.errors import CapacityError
from workmem.core.keys import BlockKey
from workmem.engines.vllm.facts import Namespaces, Scope
from workmem.store.contract import KVStore, Lease


class Prefetching:
    """A lease brings pages to dram and keeps them there. `share` of dram is the most that is held so."""

    def __init__(
        self, store: KVStore, namespaces: Namespaces, counts: Counter[str], *, share: float, page_bytes: int
    ) -> None:
        self._store = store
        self._namespaces = namespaces
        self._counts = counts
        self._share = share
        self._page_bytes = page_bytes
        self.held_bytes = 0

    def lease(self, scope: Scope, keys: Sequence[BlockKey], owner: str, ttl_s: float) -> Lease | None:
        """None where that is more than may be held, or dram can hold."""
        size = len(keys) * self._page_bytes
        if self.held_bytes + size <= self._share * self._store.dram_capacity_bytes():
            # Of the first worker's part alone: the others' loads bring their own.
            _, roots = self._namespaces.of(scope)
            try:
                lease = self._store.lease(roots[0], keys, owner=owner, ttl_s=ttl_s)
            except CapacityError:
                pass
            else:
                self.held_bytes += size
                self._counts["prefetches"] += 1
                return lease
        self._counts["prefetches_refused"] += 1
        return None

    def give_back(self, lease: Lease) -> None:
        """End a lease made here."""
        self.held_bytes -= len(lease.keys) * self._page_bytes
        lease.release()
