"""The host's store as a tier below vLLM's own host memory, in its tiered offload.

vLLM's scheduler asks which chunks there are, and gives jobs: copy these rows into the store, fill those from it. Jobs
are done behind it, by the store's thread and by two of this tier's.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from workmem.core.errors import CapacityError, LeaseError
from workmem.core.layout import Namespace
from workmem.engines.vllm.chain import Chain, block_key
from workmem.engines.vllm.config import VllmConfig
from workmem.engines.vllm.denied import AWAY_S, Denied
from workmem.engines.vllm.kv_blocks import KVBlocks
from workmem.engines.vllm.offload_jobs import ChunkJob, ChunkJobs, JobEnd
from workmem.store.contract import BlockId, KVStore, Lease, PageWrite, SaveState

log = logging.getLogger("vllm.workmem")

ASK_AGAIN_S = 1.0
"""A chunk that was not there is asked for again after so long, while its request waits."""
WANTED_SHARE = 0.75
"""Of vLLM's host memory that one request may fill from here: past it its first chunks would make room for its last."""
CLOSE_S = 10.0
"""Longest that the end waits for jobs; what has not ended then is given up."""
_LEASE_S = 60.0
_LEASE_SHARE = 4
"""A lease holds at most one part in so many of dram."""
_LEASE_CHUNKS_MAX = 1024
_THREADS = 2
"""Two, so that chunks in dram need not wait behind those on a disk."""


class _Asked:
    """What a request was told."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.is_there: dict[bytes, bool] = {}
        self.wanted: set[bytes] = set()
        self.spent: set[bytes] = set()
        """Chunks that were brought once, or could not be: not promised again, lest it asks for ever."""


class OffloadTier:
    """Of one engine. `has`, `store`, `load`, `heard` and `forget` are called by its scheduler's thread alone."""

    def __init__(
        self,
        store: KVStore,
        namespace: Namespace,
        rows: KVBlocks,
        jobs: ChunkJobs,
        settings: VllmConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._store = store
        self._namespace = namespace
        self._root = store.register(namespace)
        self._rows: KVBlocks | None = rows
        self._page_bytes = namespace.layout.page_bytes
        # VLLM names a chunk by a hash over its tokens, and does not say them.
        self._no_tokens = (0,) * namespace.layout.block_tokens
        self._wanted_most = max(1, int(rows.count * WANTED_SHARE))
        self._jobs = jobs
        self._load_s = settings.load_s
        self._clock = clock
        self._asked: dict[str, _Asked] = {}
        self._denied = Denied(settings.deny_s, clock)
        self._away = Denied(min(settings.deny_s, AWAY_S), clock)
        self._queue: queue.SimpleQueue[tuple[ChunkJob, bytes] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._load_behind, name=f"workmem-offload-{number}", daemon=True)
            for number in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    # -- the scheduler's side

    def has(self, request: str, name: bytes, chain: Chain) -> bool:
        """Whether a chunk can be loaded for `request`. One round trip for all chunks of it, with the first of them."""
        asked = self._asked.get(request)
        if asked is None:
            asked = self._asked[request] = _Asked()
        if name in asked.spent:
            return False
        is_there = asked.is_there.get(name)
        if is_there is None or (not is_there and self._clock() - asked.at_s >= ASK_AGAIN_S):
            self._look_up(asked, chain.onward(name))
            is_there = asked.is_there[name]
        if is_there and name not in asked.wanted:
            if len(asked.wanted) >= self._wanted_most:
                return False
            asked.wanted.add(name)
        return is_there

    def store(self, job: ChunkJob, chain: Chain) -> None:
        """Copy rows into the store."""
        if not job.names:
            self._jobs.end(job, ())
            return
        places = sorted(range(len(job.names)), key=lambda index: chain.place(job.names[index]))
        self._store.save(self._root, [self._write(job, index, chain) for index in places])

    def load(self, job: ChunkJob) -> None:
        """Fill rows from the store; `job` has them in prefix order."""
        self._queue.put((job, self._root))

    def heard(self, ended: Sequence[JobEnd]) -> None:
        """VLLM hears of these now."""
        for end in ended:
            kind = "loaded" if end.job.is_load else "stored"
            self.counts[f"chunks_{kind}"] += len(end.done)
            self.counts[f"chunks_not_{kind}"] += len(end.job.names) - len(end.done)
            if not end.job.is_load:
                continue
            asked = self._asked.get(end.job.request)
            if asked is not None:
                asked.spent.update(end.job.names)
            if not end.is_whole and not end.job.is_over:
                denied = self._denied if end.job.is_damaged else self._away
                denied.add(block_key(end.job.names[len(end.done)]))

    def forget(self, request: str) -> None:
        """A request ended, or begins anew: nothing that it was told counts any more."""
        self._asked.pop(request, None)

    def start_epoch(self, epoch: int) -> None:
        """The weights are others, or somebody wants nothing of before: no chunk of before is a hit from now on."""
        self._namespace = msgspec.structs.replace(self._namespace, weights_epoch=epoch)
        self._root = self._store.register(self._namespace)
        self._asked.clear()

    def close(self) -> None:
        """Finish the jobs, within a bound; let go of vLLM's memory."""
        if not self._jobs.wait(CLOSE_S):
            self._jobs.give_up()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        self._rows = None

    def _look_up(self, asked: _Asked, names: Sequence[bytes]) -> None:
        keys = [block_key(name) for name in names]
        keys = keys[: min(self._denied.allowed(keys), self._away.allowed(keys))]
        found = self._store.lookup(self._root, keys).blocks if keys else 0
        asked.at_s = self._clock()
        for index, name in enumerate(names):
            asked.is_there[name] = index < found

    # -- storing, on the store's thread

    def _write(self, job: ChunkJob, index: int, chain: Chain) -> PageWrite:
        name, row = job.names[index], job.rows[index]
        before = chain.before(name)

        def copy(into: memoryview) -> tuple[int, ...]:
            with job.copying:
                if job.is_over or self._rows is None:
                    # Its row may hold another chunk: such a page must not become visible (R2).
                    raise RuntimeError("the engine had the chunk's memory back before it was copied")
                return self._rows.copy_out(row, into)

        def done(state: SaveState) -> None:
            self._stored(job, name, state)

        block = BlockId(
            key=block_key(name),
            parent=self._root if before is None else block_key(before),
            tokens=self._no_tokens,
            depth=chain.place(name),
        )
        return PageWrite(block=block, copy_into=copy, done=done)

    def _stored(self, job: ChunkJob, name: bytes, state: SaveState) -> None:
        # Mostly on the store's thread; a full queue drops a page on that of the scheduler.
        with job.copying:
            if state is SaveState.DROPPED:
                job.missed.add(name)
            job.left -= 1
            is_last = not job.left
        if is_last:
            self._jobs.end(job, [name for name in job.names if name not in job.missed])

    # -- loading, on threads of its own

    def _load_behind(self) -> None:
        while (todo := self._queue.get()) is not None:
            job, root = todo
            loaded = 0
            try:
                loaded = self._loaded(job, root)
            except Exception:  # thread main: the request that waits for the chunks must hear of their end
                log.exception("loading chunks met a bug of ours; their tokens are computed")
            self._jobs.end(job, job.names[:loaded])

    def _loaded(self, job: ChunkJob, root: bytes) -> int:
        """How many chunks of a job, from the first on, are in their rows."""
        keys = [block_key(name) for name in job.names]
        room = self._store.dram_capacity_bytes() // _LEASE_SHARE // self._page_bytes
        size = min(room or 1, _LEASE_CHUNKS_MAX)
        done = 0
        while done < len(keys) and not job.is_over:
            part = keys[done : done + size]
            try:
                lease = self._store.lease(root, part, owner=job.request, ttl_s=_LEASE_S)
            except CapacityError as error:
                if len(part) == 1:
                    log.info("chunks are not loaded: %s", error)
                    break
                size = len(part) // 2
                continue
            copied = self._copied(lease, job, done)
            done += copied
            if copied < len(part):
                break
        return done

    def _copied(self, lease: Lease, job: ChunkJob, first: int) -> int:
        """How many pages, from the first on, were copied into their rows and are what was stored (R3, R6)."""
        try:
            settled = threading.Event()
            lease.on_settled(settled.set)
            if not settled.wait(self._load_s):
                job.is_damaged = True
            for index in range(lease.ready):
                if not self._is_copied(lease, index, job, job.rows[first + index]):
                    return index
            return lease.ready
        finally:
            lease.release()

    def _is_copied(self, lease: Lease, index: int, job: ChunkJob, row: int) -> bool:
        try:
            wanted = lease.checksums(index)
            with lease.page(index) as page, job.copying:
                if job.is_over or self._rows is None:
                    return False
                found = self._rows.copy_in(row, page)
            if found == wanted:
                return True
            self.counts["corrupt"] += 1
            job.is_damaged = True
            lease.quarantine(index)
        except LeaseError as error:
            log.info("a chunk was lost while it was loaded: %s", error)
        return False
