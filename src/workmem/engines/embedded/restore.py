"""Between the scheduler and the store: leases on what a waiting request can reuse, loads, and spills.

A request whose pages are on ssd is admitted at once: they are copied on into vram as they reach dram, behind
other requests' compute, and its own first step begins with the last one. What is in dram already is copied
beside that step, layer by layer (`loading`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import xxhash

from workmem.core.errors import CapacityError, EngineError
from workmem.core.keys import BlockKey
from workmem.core.outcomes import MissReason
from workmem.engines.embedded.block_pool import BlockPool
from workmem.engines.embedded.loading import PageLoader
from workmem.engines.embedded.sequence import Sequence
from workmem.store.contract import KVStore, Lease

LEASE_SECONDS = math.inf
"""A holder in the store's own process gives back exactly once and cannot die alone: its hold needs no deadline."""
SPILL_SECONDS_MAX = 30.0


class Restorer:
    """Implements `scheduler.Fetcher`. `wake` is called from store threads when a lease has settled."""

    def __init__(
        self,
        store: KVStore | None,
        pool: BlockPool,
        loader: PageLoader,
        *,
        wake: Callable[[], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._store = store
        self._pool = pool
        self._loader = loader
        self._wake = wake
        self._monotonic = monotonic
        self._spill_waits: dict[str, float] = {}

    @property
    def awaits_saves(self) -> bool:
        """Whether a request cannot go on before pages of its own are in dram."""
        return bool(self._spill_waits)

    def fetch(self, seq: Sequence, vram_blocks: int, *, in_place: bool) -> bool:
        """See `Fetcher.fetch`."""
        if seq.lease is not None:
            if in_place and not self._is_settled(seq.lease):
                return False
            if seq.lease_start <= vram_blocks:
                return True
            # The vram blocks the lease was to follow are gone meanwhile.
            self._release(seq)
        wanted = seq.keys[vram_blocks : self._last_allowed(seq)]
        count = 0
        reason: MissReason | None = MissReason.COLD
        if self._store is not None and seq.request.reuse:
            found = self._store.lookup(seq.root, wanted)
            count, reason = found.blocks, found.reason
            self._lease(seq, wanted[:count], vram_blocks)
            if seq.lease is not None:
                seq.lease_tiers = tuple(str(tier) for tier in found.tiers[: len(seq.lease.keys)])
                if len(seq.lease.keys) < count:
                    reason = MissReason.UNAVAILABLE
        if reason is MissReason.COLD and count < len(wanted) and self._pool.was_evicted(wanted[count]):
            reason = MissReason.EVICTED
        if seq.reuse_denied and vram_blocks + count >= seq.reuse_denied:
            reason = seq.denied_reason
        seq.lookup_reason = reason
        return seq.lease is None or not in_place or self._is_settled(seq.lease)

    def _lease(self, seq: Sequence, keys: list[BlockKey], start: int) -> None:
        """Hold as many of `keys` as dram has room for."""
        assert self._store is not None
        count = len(keys)
        while count:
            try:
                lease = self._store.lease(seq.root, keys[:count], owner=seq.id, ttl_s=LEASE_SECONDS)
            except CapacityError:
                count //= 2
                continue
            seq.lease, seq.lease_start = lease, start
            if not self._is_settled(lease):
                lease.on_settled(self._wake)
            return

    @staticmethod
    def _is_settled(lease: Lease) -> bool:
        return lease.ready == len(lease.keys) or lease.failed is not None

    def fetched(self, seq: Sequence, vram_blocks: int) -> int:
        """See `Fetcher.fetched`."""
        if seq.lease is None:
            return 0
        count = len(seq.lease.keys)
        if seq.lease.failed is not None:
            seq.lookup_reason = seq.lease.failed
            count = seq.lease.ready
        return max(0, min(seq.lease_start + count, seq.reusable_blocks) - vram_blocks)

    def restore(self, seq: Sequence, vram_blocks: int, blocks: list[int]) -> None:
        """See `Fetcher.restore`."""
        assert seq.lease is not None
        seq.gate = self._loader.load(seq.lease, vram_blocks - seq.lease_start, blocks)

    def attach(self, seq: Sequence) -> int:
        """See `Fetcher.attach`."""
        lease, seq.lease = seq.lease, None
        if lease is None:
            return 0
        count = self._sound(lease, min(lease.ready, seq.reusable_blocks))
        if count < min(lease.ready, seq.reusable_blocks):
            seq.lookup_reason = MissReason.CORRUPT
        seq.spilled = [(lease, index) for index in range(count)]
        if not count:
            lease.release()
        return count

    def spill(self, seq: Sequence, count: int) -> bool:
        """See `Fetcher.spill`. Raises EngineError when dram cannot take the pages within a bound."""
        if self._store is None:
            raise EngineError("a context larger than the vram pool needs a dram tier and there is none")
        if not self._pages_in_dram(seq, count):
            since = self._spill_waits.setdefault(seq.id, self._monotonic())
            if self._monotonic() - since > SPILL_SECONDS_MAX:
                raise EngineError(
                    f"dram has had no room for {count} blocks of this context for {SPILL_SECONDS_MAX:.0f} s"
                )
            return False
        self._spill_waits.pop(seq.id, None)
        lease, seq.spilling = seq.spilling, None
        assert lease is not None
        moved = len(lease.keys)
        seq.spilled += [(lease, index) for index in range(moved)]
        gone, seq.table = seq.table[:moved], seq.table[moved:]
        self._pool.let_go(gone)
        return True

    def _pages_in_dram(self, seq: Sequence, count: int) -> bool:
        """Whether `seq.spilling` holds the next `count` blocks, checked. Asks for them where it does not."""
        assert self._store is not None
        first = len(seq.spilled)
        if seq.spilling is None:
            keys = seq.keys[first : first + count]
            found = self._store.lookup(seq.root, keys).blocks
            if found < count:
                if not seq.saving:
                    # Dropped on the way or pushed out since: vram still has them, so they are offered again.
                    seq.named = min(seq.named, first + found)
                return False
            try:
                seq.spilling = self._store.lease(seq.root, keys, owner=seq.id, ttl_s=LEASE_SECONDS)
            except CapacityError:
                return False
        lease = seq.spilling
        if lease.ready < len(lease.keys) and lease.failed is None:
            return False
        if self._sound(lease, lease.ready) < len(lease.keys):
            lease.release()
            seq.spilling = None
            return False
        return True

    def _sound(self, lease: Lease, count: int) -> int:
        """How many leading pages pass their check where they lie: they will be read in place (rule R6)."""
        layout = lease.layout
        for index in range(count):
            page, wanted = lease.page(index), lease.checksums(index)
            for part, checksum in enumerate(wanted):
                start, end = layout.slice_span(part)
                if xxhash.xxh3_64_intdigest(page[start:end]) != checksum:
                    lease.quarantine(index)
                    return index
        return count

    def still_holds(self, seq: Sequence) -> bool:
        """Whether what the step read in place in dram was still ours when it had read it (rule R3).

        A store of its own process never takes a hold back; that of the host does, from a process that stood
        still for too long.
        """
        leases = {id(lease): (lease, index) for lease, index in seq.spilled}
        return all(lease.is_current(index) for lease, index in leases.values())

    def settle(self, seq: Sequence) -> int | None:
        """After the step that used a load, or one that ended short before: give the lease back.

        Returns the first bad block, or None. Blocks of the sequence from that one on hold nothing usable, and
        the step's result is void.
        """
        gate = seq.gate
        if gate is None:
            return None
        gate.wait()
        seq.gate = None
        failed = None
        if gate.failed_at is not None:
            failed = len(seq.table) if not gate.blocks else seq.table.index(gate.blocks[0]) + gate.failed_at
            seq.reuse_denied = max(failed, 1)
            seq.denied_reason = gate.reason
        self._release(seq)
        return failed

    def forget(self, seq: Sequence) -> None:
        """See `Fetcher.forget`."""
        if seq.gate is not None:
            self._loader.abandon(seq.gate)
            seq.gate = None
        self._release(seq)
        for lease in {id(lease): lease for lease, _ in seq.spilled}.values():
            lease.release()
        if seq.spilling is not None:
            seq.spilling.release()
            seq.spilling = None
        seq.spilled = []
        self._spill_waits.pop(seq.id, None)

    def _last_allowed(self, seq: Sequence) -> int:
        return min(seq.reusable_blocks, seq.reuse_denied) if seq.reuse_denied else seq.reusable_blocks

    def _release(self, seq: Sequence) -> None:
        if seq.lease is not None:
            seq.lease.release()
            seq.lease = None
        seq.lease_tiers = ()
        seq.lease_start = 0
