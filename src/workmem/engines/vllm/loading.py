"""One load: pages out of the store into an engine's blocks, and how far it came.

What comes from below dram is leased in windows: a page is copied while the disk reads the ones behind it, and a
context may be longer than all of dram.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable

from workmem.core.errors import CapacityError, LeaseError
from workmem.core.outcomes import MissReason
from workmem.engines.vllm.moving import EngineBlocks, Fence, Filling, Mark
from workmem.engines.vllm.steps import LATE, NO_ROOM, LoadOp
from workmem.store.contract import KVStore, Lease

log = logging.getLogger("vllm.workmem")

WINDOW_BYTES = 8 << 20
"""Pages of a window: copied in some milliseconds, worth a round trip to the store."""
WINDOWS_HELD = 8
"""Enough for the disk to have work at any time."""
_LEASE_S = 60.0


class Loading:
    """Of one worker, for one load after the other or several at once: it keeps nothing between them."""

    def __init__(self, store: KVStore, blocks: EngineBlocks, counts: Counter[str]) -> None:
        self._store = store
        self._blocks = blocks
        self._counts = counts

    def load(
        self, op: LoadOp, root: bytes, mark: Mark, fences: Iterable[Fence], wait_s: float
    ) -> tuple[int, str]:
        """Bring pages into blocks. How many are in place, from the first on, and why the next one is not."""
        window = max(1, WINDOW_BYTES // self._blocks.layout.page_bytes) if op.is_async else len(op.keys)
        leases = self._leases(op, root, window)
        until = time.monotonic() + wait_s
        into: Filling | None = None
        copied = 0
        try:
            for lease in leases:
                ready = _settled(lease, until)
                if into is None:
                    into = self._blocks.begin_in(mark, fences, is_aside=op.is_async)
                pages = self._copied(lease, op.blocks[copied : copied + ready], into)
                copied += pages
                if pages < ready:
                    return copied, MissReason.CORRUPT.value
                if ready < len(lease.keys):
                    return copied, lease.failed.value if lease.failed else LATE
        except CapacityError as error:
            log.info("pages are not loaded: %s", error)
            return copied, NO_ROOM
        finally:
            # Closed before the blocks are said to be filled: what it holds may be needed by others.
            leases.close()
            if into is not None:
                into.end()
        return copied, ""

    def _leases(self, op: LoadOp, root: bytes, window: int) -> Generator[Lease]:
        """Each window's lease, released when the next one is asked for. Raises CapacityError where none can be held."""
        parts = deque(op.keys[at : at + window] for at in range(0, len(op.keys), window))
        held: deque[Lease] = deque()
        try:
            while parts or held:
                while parts and len(held) < WINDOWS_HELD:
                    try:
                        lease = self._store.lease(root, parts[0], owner=op.request, ttl_s=_LEASE_S)
                    except CapacityError:
                        if not held:
                            raise
                        # Those that are held are given back one after the other.
                        break
                    parts.popleft()
                    held.append(lease)
                yield held[0]
                held.popleft().release()
        finally:
            for lease in held:
                lease.release()

    def _copied(self, lease: Lease, blocks: tuple[int, ...], into: Filling) -> int:
        """How many pages, from the first on, were copied and are what was stored (R3, R6)."""
        for index, block in enumerate(blocks):
            try:
                wanted = lease.checksums(index)
                with lease.page(index) as page:
                    found = into.copy_in(block, page)
                if found == wanted:
                    continue
                self._counts["corrupt"] += 1
                lease.quarantine(index)
            except LeaseError as error:
                log.info("a page was lost while it was loaded: %s", error)
            into.clear(block)
            return index
        return len(blocks)


def _settled(lease: Lease, until: float) -> int:
    """Pages that have arrived when all have, or the next one cannot any more, or time is up."""
    settled = threading.Event()
    lease.on_settled(settled.set)
    settled.wait(max(0.0, until - time.monotonic()))
    return lease.ready
