"""The store: the tiers below vram as one, see `store.contract.KVStore`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from workmem.core.clock import Clock, SystemClock
from workmem.core.errors import InvariantError
from workmem.core.events import EventSink, discard
from workmem.core.keys import BlockKey
from workmem.core.layout import Namespace
from workmem.core.outcomes import Lookup, MissReason, TierName
from workmem.core.units import parse_bytes
from workmem.policy.order import Prospect
from workmem.store.arena import Arena
from workmem.store.below import Below
from workmem.store.codecs.settings import kept_namespace, page_codec, page_keyring
from workmem.store.config import StoreConfig
from workmem.store.contract import BlockId, PageWrite, PinResult, SaveState
from workmem.store.copying import Bytes
from workmem.store.device import BlockDevice, HostDevice
from workmem.store.lease import PageLease
from workmem.store.pool import Pool
from workmem.store.readings import readings
from workmem.store.saver import SaverThread
from workmem.store.saving import NewPage, save_pages
from workmem.store.scrubber import Scrubber
from workmem.store.selector import Purged
from workmem.store.ssd_index import StoredPage
from workmem.store.steering import PinDesk, QuotaDesk, set_quotas
from workmem.store.ticker import TickerThread
from workmem.store.tiers.free_space import parse_keep_free
from workmem.store.tiers.opening import TierOpening
from workmem.store.tiers.ssd import SsdTier

log = logging.getLogger(__name__)

_WARM_AHEAD_BYTES = 256 * 2**20
_WARM_LOW_BYTES = 64 * 2**20
"""Below this it is taken even beside a load, which it slows: touching memory costs more than filling it."""
_WARM_RESTART_BYTES = 2**30
"""Most that is taken at a start for what ssd holds: hits after a restart bring that back."""
_WARM_TICK_BYTES = 64 * 2**20
"""Per tick: memory is taken at up to 256 MiB/s, ahead of use, without a burst at the start."""
CLOSE_S = 10.0
"""Longest that `close` waits for pages on their way to disk."""
END_S = 5.0
"""Longest that it then waits for the calls under way."""


class Store:
    """dram and ssd behind `KVStore`. A context manager; `close` frees the arena and the folder.

    Raises ConfigError when the arena cannot be mapped or the ssd folder is unusable, of another format,
    or held by another process.
    """

    def __init__(
        self,
        config: StoreConfig,
        sink: EventSink = discard,
        clock: Clock | None = None,
        device: BlockDevice | None = None,
    ) -> None:
        self._config = config
        self._sink = sink
        self._clock = clock or SystemClock()
        self._closed = False
        self._moved = self._restored_bytes = 0
        self._close_lock = threading.Lock()
        dram_bytes = parse_bytes(config.dram.bytes, "$.store.dram.bytes")
        self._codec, keyring = page_codec(config), page_keyring(config.ssd)
        self._arena = Arena(dram_bytes, config.dram.path)
        pins = parse_keep_free(config.pins.budget, "$.store.pins.budget").of(dram_bytes)
        self._pool = Pool(self._arena, self._clock, sink, config.dram.eviction, pins)
        self._pins = PinDesk(self._pool.state, self._clock)
        self._quotas = QuotaDesk(self._pool.state, None, 0)
        try:
            set_quotas(self._quotas, config.quotas, TierName.DRAM)
            opening = TierOpening(
                config, self._pool, device or HostDevice(), sink, codec=self._codec, keyring=keyring
            )
            self._below = Below(opening, config.ssd, self._pool, sink, self._clock)
        except BaseException:
            self._arena.close()
            raise
        if opening.is_ssd and opening.index is not None:
            self._quotas = QuotaDesk(self._pool.state, opening.index, opening.promised_bytes)
        self._saver = SaverThread(self._pool, sink, config.save_queue_pages)
        if opening.index is not None:
            self._restored_bytes = min(opening.index.live_bytes, _WARM_RESTART_BYTES)
        self._below.begin()
        self._ticker = TickerThread(self._tick)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    @property
    def arena(self) -> Arena:
        """The memory that all pages pass through."""
        return self._arena

    @property
    def pool(self) -> Pool:
        """What is where, for what reserves and commits frames itself."""
        return self._pool

    @property
    def ssd_problem(self) -> str:
        """Why dram serves alone although a tier below it is configured; empty where it does not."""
        return self._below.life.problem

    @property
    def folder(self) -> Path | None:
        """Where its pages are on disk; None where they are in memory only, or with a tier that somebody installed."""
        return Path(self._config.ssd.path).expanduser() if isinstance(self._below.tier, SsdTier) else None

    def register(self, namespace: Namespace) -> bytes:
        """See `KVStore.register`. Raises ConfigError where pages would be rounded and must not be."""
        return self._pool.add_space(kept_namespace(namespace, self._codec))[0].root

    def lookup(self, root: bytes, keys: Sequence[BlockKey]) -> Lookup:
        """See `KVStore.lookup`. A closed store holds nothing."""
        if self._closed:
            return Lookup((), MissReason.DISABLED if keys else None)
        return self._pool.lookup(self._pool.space(root), keys)

    def lease(self, root: bytes, keys: Sequence[BlockKey], *, owner: str, ttl_s: float) -> PageLease:
        """See `KVStore.lease`."""
        if self._closed:
            raise InvariantError("lease on a closed store")
        lease, promotions = self._pool.leases.lease(self._pool.space(root), keys, owner, ttl_s)
        self._below.submit(promotions)
        return lease

    def save(self, root: bytes, pages: Sequence[PageWrite]) -> None:
        """See `KVStore.save`. Raises InvariantError on a block that does not fit the namespace."""
        space = self._pool.space(root)
        for page in pages:
            space.check(page.block)
        self._saver.put(space, pages)

    def put(self, root: bytes, pages: Sequence[tuple[BlockId, Bytes]]) -> list[SaveState]:
        """Save pages now, on the caller's thread: for one whose memory is about to change. How each ended.

        Each page is `page_bytes` contiguous bytes of the caller's, read once; what is STORED can be looked up on
        return, and goes to ssd behind. Parents come before their children. Waits for room as `save` does: for
        nothing but the disk, and at most a second a page. Raises InvariantError on a block or a page that does not
        fit the namespace, or where the store is closed.
        """
        if self._closed:
            raise InvariantError("put on a closed store")
        space, new = self._pool.space(root), list[NewPage]()
        for block, source in pages:
            space.check(block)
            new.append(NewPage(block, space.copy.writing(source)))
        return save_pages(self._pool, self._sink, space, new)

    def purge(self, chosen: Callable[[Namespace], bool]) -> Purged:
        """Take out every namespace that `chosen` accepts: a tenant, a model, an epoch.

        From the first moment none of its blocks is a hit (R9). On return the frames that nobody holds are zeroed,
        the others when they are given back; the bytes on ssd, and the names in the journal, are gone once `flush`
        has returned True. What had left a tier before, to make room, lies in free frames until they are used and
        in segments until they are compacted (`workmem store gc` does it at once), without a name. A namespace may
        be used again at once, empty.
        """
        index = self._below.opening.index
        with contextlib.nullcontext() if index is None else index.strikes.sweeping():
            spaces = self._pool.purge(chosen)
            gone = Purged.of(spaces)
            for space in spaces:
                self._pool.sweep(space)
                self._pins.purged(space.root)
        return gone

    def forget_empty(self) -> int:
        """Forget namespaces that hold nothing, the older half of them. How many.

        Names of tenants and epochs that come and go would be too many one day. Whoever still uses one registers it again.
        """
        return self._pool.forget_empty()

    def survey(self, chosen: Callable[[Namespace], bool]) -> Purged:
        """What `purge` would take out now."""
        spaces = list(self._pool.state.spaces.values())
        return Purged.of(space for space in spaces if chosen(space.namespace))

    def scrub(self, bytes_per_s: int) -> Scrubber[StoredPage] | None:
        """A scrubber of its own for one pass, whose `step` the caller runs; None without an ssd tier."""
        return self._below.scrub(bytes_per_s)

    def pin(self, root: bytes, keys: Sequence[BlockKey], *, owner: str, name: str, ttl_s: float) -> PinResult:
        """See `Steering.pin`."""
        return self._pins.pin(self._pool.space(root), keys, owner, name, ttl_s)

    def unpin(self, owner: str, name: str) -> bool:
        """See `Steering.unpin`."""
        return self._pins.unpin(owner, name)

    def announce(self, root: bytes, keys: Sequence[BlockKey], prospect: Prospect) -> int:
        """See `Steering.announce`."""
        count = self._pins.announce(self._pool.space(root), keys, prospect)
        if prospect is Prospect.EXPECTED and count < len(keys):
            self._below.look_sooner()
        return count

    def bind(self, root: bytes, keys: Sequence[BlockKey], group: str) -> int:
        """See `Steering.bind`."""
        return self._pins.bind(self._pool.space(root), keys, group)

    def set_quota(
        self, group: str, tier: TierName, *, floor_bytes: int = 0, ceiling_bytes: int | None = None
    ) -> None:
        """See `Steering.set_quota`."""
        self._quotas.set_quota(group, tier, floor_bytes, ceiling_bytes)

    def dram_capacity_bytes(self) -> int:
        """See `KVStore.dram_capacity_bytes`. Counted for the largest registered page."""
        sizes = {
            space.frame_bytes: space.layout.page_bytes for space in list(self._pool.state.spaces.values())
        }
        if not sizes:
            return self._arena.capacity_bytes
        return min(
            self._pool.state.frames.holdable_bytes(frame) // frame * page for frame, page in sizes.items()
        )

    def flush(self, timeout_s: float) -> bool:
        """See `KVStore.flush`."""
        return self._flush(timeout_s, self._is_settled)

    def _flush(self, timeout_s: float, is_done: Callable[[], bool]) -> bool:
        until = self._clock.monotonic() + timeout_s
        if not self._saver.drain(timeout_s):
            return False
        pool = self._pool.state
        with pool.outbox:
            left = max(0.0, until - self._clock.monotonic())
            return pool.outbox.changed.wait_for(is_done, left)

    def _is_settled(self) -> bool:
        # A tier that fails is not waited for, but whoever purged is not told that it is done.
        return self._is_quiet() and not self._below.owes_purge()

    def _is_quiet(self) -> bool:
        pool = self._pool.state
        return not (pool.unwritten or pool.writes_in_flight) and self._below.is_settled()

    def gauges(self) -> dict[str, float]:
        """See `KVStore.gauges`."""
        told = readings(self._pool, self._below, self._saver.depth)
        return told | self._pins.gauges() | self._quotas.gauges()

    def close(self) -> None:
        """See `KVStore.close`."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._flush(CLOSE_S, self._is_quiet)
        if self._end_threads(END_S):
            self._give_back()
            return
        log.warning(
            "a thread of the store has not ended in %g s; folder and memory are kept until it has", END_S
        )
        threading.Thread(target=self._give_back_late, name="workmem-store-close", daemon=True).start()

    def _end_threads(self, timeout_s: float) -> bool:
        """Have all threads end, each after the call under way. False where one does not within `timeout_s`."""
        until = time.monotonic() + timeout_s

        def left() -> float:
            return max(0.0, until - time.monotonic())

        # All are told before one is waited for longer: what does not end must not keep the others going.
        ended = [self._saver.close(left()), self._ticker.close(left())]
        self._pool.leases.end_leases()
        return all([*ended, *self._below.end(left)])

    def _give_back(self) -> None:
        """Let go of the folder and the arena: no thread uses them any more."""
        if self._below.close():
            self._arena.close()

    def _give_back_late(self) -> None:
        # A thread stuck in a caller's copy or in the kernel keeps what it works on: taking that away under it
        # would be worse. Once it is back, the folder must not stay locked for the rest of the process.
        while not self._end_threads(60.0):
            pass
        self._give_back()

    def _tick(self) -> None:
        self._warm()
        self._pool.leases.expire_leases()
        self._pool.pack()
        self._pins.expire()
        self._below.tick()

    def _warm(self) -> None:
        """Take memory ahead of use: while nothing moves, or where too little of it is left.

        What ssd held at the start is expected back, and a read into untouched memory takes half as long again.
        """
        counts, reached = self._pool.state.counts, self._pool.state.frames.reached_bytes
        moved = counts["leases"] + counts["promoted"] + counts["saves"]
        is_idle, self._moved = moved == self._moved, moved
        wanted = (
            max(reached + _WARM_AHEAD_BYTES, self._restored_bytes) if is_idle else reached + _WARM_LOW_BYTES
        )
        self._arena.warm(wanted, _WARM_TICK_BYTES)

    def audit(self) -> None:
        """Check the ledger and every link of the index. Raises InvariantError; for tests."""
        with self._pool.state.outbox:
            self._pool.state.audit()
            if self._below.opening.index is not None:
                self._below.opening.index.audit()
