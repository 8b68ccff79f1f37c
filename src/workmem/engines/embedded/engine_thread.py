"""The engine thread: admits, computes, samples, saves, one step after the other.

Pool, scheduler and sequences belong to it: others hand it jobs through an inbox. Saving runs on store
threads behind it; loading on the loader's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from workmem.core.clock import Clock
from workmem.core.errors import EngineError, InvariantError, LeaseError, WorkmemError
from workmem.core.events import EventSink
from workmem.core.outcomes import COMPUTED
from workmem.engines.embedded import fuse, tiles
from workmem.engines.embedded.block_pool import BlockPool
from workmem.engines.embedded.config import EmbeddedConfig
from workmem.engines.embedded.handoffs import Handoffs
from workmem.engines.embedded.kv_pages import KVPages
from workmem.engines.embedded.loader import LoadedModel
from workmem.engines.embedded.loading import PageLoader
from workmem.engines.embedded.native import load_kernel
from workmem.engines.embedded.output import OutputWriter
from workmem.engines.embedded.restore import Restorer
from workmem.engines.embedded.runner import PackedRunner, Runner
from workmem.engines.embedded.saving import PageSaver
from workmem.engines.embedded.scheduler import Scheduler, Work
from workmem.engines.embedded.sequence import Phase, Sequence
from workmem.policy.handoff import LOOK_MIN_S, Ending
from workmem.store.contract import SteeredStore

_LOG = logging.getLogger(__name__)
_IDLE_SECONDS = 0.5
_SPILL_POLL_SECONDS = 0.002


class EngineThread:
    """Runs from construction to `stop`. All but `post`, `gauges`, `stop` and `inbox_count` is for its own thread."""

    def __init__(
        self,
        config: EmbeddedConfig,
        loaded: LoadedModel,
        output: OutputWriter,
        store: SteeredStore | None,
        *,
        block_count: int,
        dram_tokens: int,
        sink: EventSink,
        clock: Clock,
        cache_dir: Path,
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._store = store
        self._dram_tokens = dram_tokens
        self._sink = sink
        self._clock = clock
        self.output = output
        self.pages = KVPages(loaded.layout, block_count, str(loaded.device))
        self._loader = PageLoader(self.pages, self._wake)
        self.runner = self._make_runner(cache_dir)
        self._reuse_off = False
        self._ready = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._is_woken = False
        self._ended = False
        self._steps = 0
        self._tokens_computed = 0
        self._tokens_cached = 0
        self._tokens_asked = 0
        self._build_ledgers()
        self._thread = threading.Thread(target=self._run, name="workmem-engine", daemon=True)
        self._thread.start()

    @property
    def inbox_count(self) -> int:
        """Jobs that wait to be done."""
        return len(self._inbox)

    def post(self, job: Callable[[], None]) -> bool:
        """Have the engine thread do `job`. False when it has ended and never will."""
        with self._ready:
            if self._ended:
                return False
            self._inbox.append(job)
            self._ready.notify_all()
            return True

    def cancel(self, seq: Sequence) -> None:
        """End a request whose client has gone. On the engine thread."""
        if seq.phase is not Phase.DONE:
            self.output.cancel(seq)
            self.scheduler.finish(seq)

    def gauges(self) -> dict[str, float]:
        """Current readings by metric name without prefix."""
        load = self._loader.counters
        return {
            "num_requests_running": len(self.scheduler.running),
            "num_requests_waiting": len(self.scheduler.waiting),
            "kv_cache_usage_perc": 1 - self.pool.idle_count / self.pool.block_count,
            "vram_blocks": self.pool.block_count,
            "vram_cached_blocks": self.pool.cached_count,
            "vram_evicted_blocks_total": self.pool.evicted_count,
            "num_preemptions_total": self.scheduler.preempted_count,
            "pending_waits_total": self.scheduler.pending_count,
            "engine_steps_total": self._steps,
            "computed_tokens_total": self._tokens_computed,
            "prefix_cache_queries_total": self._tokens_asked,
            "prefix_cache_hits_total": self._tokens_cached,
            **{f"handoffs_{ending}_total": self._handoffs.counts[ending] for ending in Ending},
            "handoff_wait_seconds_total": self._handoffs.waited_s,
            "load_slices_total": load.slices,
            "load_slices_overlapped_total": load.overlapped,
            "load_layers_waited_total": load.waited,
            "load_pages_total": load.pages,
            "load_pages_early_total": load.early,
            "load_pages_corrupt_total": load.corrupt,
            "reuse_disabled": float(self._reuse_off),
            "engine_alive": float(self._thread.is_alive()),
        }

    def stop(self) -> None:
        """Cancel what runs and stop the threads; blocks until they have ended. Idempotent."""
        with self._ready:
            if self._stopping:
                return
            self._stopping = True
            self._ready.notify_all()
        self._thread.join()
        self._loader.close()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._do_inbox()
                busy = self._step()
            except InvariantError:
                _LOG.exception("bug in the cache: it is switched off, the engine goes on without it")
                self._reset()
                continue
            except Exception as error:  # noqa: BLE001 - thread main: one bad step must not end the engine
                _LOG.exception("engine step failed")
                self._fail_running(
                    EngineError(f"the engine failed this step: {type(error).__name__}: {error}")
                )
                continue
            if not busy:
                self._sleep()
        with self._ready:
            self._ended = True
        self._do_inbox()
        for seq in [*self.scheduler.running, *self.scheduler.waiting]:
            self._end(seq, EngineError("the server is shutting down"))

    def _do_inbox(self) -> None:
        """What other threads have asked for; each job is taken out before it runs, so none can run twice."""
        while self._inbox:
            self._inbox.popleft()()

    @torch.inference_mode()
    def _step(self) -> bool:
        self._book_lost_loads()
        work = self.scheduler.plan(self._clock.monotonic())
        for seq, error in self.scheduler.failed:
            self._end(seq, error)
        self.scheduler.failed.clear()
        for seq in self.scheduler.running:
            if seq.window:
                self._saver.offer(seq)
        work = self._runnable(work)
        if not work:
            return False
        try:
            logits = self.runner.run(work)
        except LeaseError:
            if len(self._runnable(work)) == len(work):
                raise
            # Pages were taken back amid the step: whoever read them has ended, the others' step is done again.
            return True
        self._steps += 1
        self._take(work, logits)
        return True

    def _take(self, work: list[Work], logits: torch.Tensor) -> None:
        """Book the step and give each request the token that it sampled."""
        sampled: list[tuple[int, Sequence]] = []
        row = -1
        for item in work:
            row += item.samples
            if self._settle(item) and item.samples:
                sampled.append((row, item.seq))
        if sampled:
            rows = [row for row, _ in sampled]
            picked = logits if len(rows) == logits.shape[0] else logits[rows]
            for seq in self.output.advance([seq for _, seq in sampled], picked):
                self.scheduler.finish(seq)

    def _runnable(self, work: list[Work]) -> list[Work]:
        """Without what has ended, or has lost pages that it would read in place."""
        for item in work:
            if not self._restorer.still_holds(item.seq):
                self._end_lost(item.seq)
        return [item for item in work if item.seq.phase is Phase.RUNNING]

    def _settle(self, item: Work) -> bool:
        """Book what the step computed. False where a bad page made the result void."""
        seq = item.seq
        if not self._settle_load(seq):
            return False
        if not self._restorer.still_holds(seq):
            self._end_lost(seq)
            return False
        if seq.first_token_at is None and item.start + item.count >= seq.prompt_len:
            asked = sum(run.tokens for run in seq.sources)
            self._tokens_asked += asked
            self._tokens_cached += sum(run.tokens for run in seq.sources if run.source != COMPUTED)
        self._tokens_computed += item.count
        self.scheduler.computed(seq, item.start + item.count)
        self._saver.offer(seq)
        return True

    def _settle_load(self, seq: Sequence) -> bool:
        """End the load that `seq` was waiting for, if any. False where it was not whole: the rest is computed."""
        failed = self._restorer.settle(seq)
        if failed is None:
            return True
        self.scheduler.lost(seq, failed)
        self.output.lost(seq, failed)
        return False

    def _book_lost_loads(self) -> None:
        """Whose load has ended short before a step of theirs began computes what is missing."""
        for seq in self.scheduler.running:
            if seq.gate is not None and seq.gate.finished and seq.gate.failed_at is not None:
                self._settle_load(seq)

    def _end(self, seq: Sequence, error: EngineError) -> None:
        self.scheduler.finish(seq)
        self.output.fail(seq, error)

    def _end_lost(self, seq: Sequence) -> None:
        self._end(seq, EngineError("pages of this context left dram while they were in use; send it again"))

    def _fail_running(self, error: EngineError) -> None:
        try:
            for seq in list(self.scheduler.running):
                self._end(seq, error)
        except InvariantError:
            _LOG.exception("bug in the cache: it is switched off, the engine goes on without it")
            self._reset()

    def _reset(self) -> None:
        """After a bug in our ledgers: nothing in vram can be trusted, so nothing is reused any more."""
        stranded = [*self.scheduler.running, *self.scheduler.waiting]
        self._reuse_off = True
        # Whoever still reads or writes the old blocks ends first: they are about to be given out anew.
        self._saver.close()
        for seq in stranded:
            with contextlib.suppress(WorkmemError):
                self._handoffs.forget(seq)
            with contextlib.suppress(WorkmemError):
                self._restorer.forget(seq)
        self._build_ledgers()
        error = EngineError("the cache met a bug of its own and was switched off; send the request again")
        for seq in stranded:
            seq.phase = Phase.DONE
            self.output.fail(seq, error)

    def _build_ledgers(self) -> None:
        layout = self._loaded.layout
        store = None if self._reuse_off else self._store
        self.pool = BlockPool(self.pages.tensor.shape[0], self._sink)
        self._saver = PageSaver(store, self.pool, self.pages, post=self.post)
        self._restorer = Restorer(
            store, self.pool, self._loader, wake=self._wake, monotonic=self._clock.monotonic
        )
        self._handoffs = Handoffs(store, self._config.handoff_wait_max_s)
        self.scheduler = Scheduler(
            self.pool,
            self._restorer,
            block_tokens=layout.block_tokens,
            batch_tokens=self._config.batch_tokens,
            running_max=self._config.running_max,
            dram_blocks=self._dram_tokens // layout.block_tokens,
            sink=self._sink,
            handoffs=self._handoffs,
        )

    def _make_runner(self, cache_dir: Path) -> Runner:
        if self._config.deterministic:
            return tiles.TileRunner(self._loaded.model, self.pages)
        kernel = load_kernel(cache_dir) if self.pages.on_cpu else None
        if kernel is not None:
            fuse.use_kernel(self._loaded.model, kernel)
        return PackedRunner(self._loaded.model, self.pages, kernel, str(self._loaded.device))

    def _wake(self) -> None:
        with self._ready:
            self._is_woken = True
            self._ready.notify_all()

    def _sleep(self) -> None:
        """Until something arrives; a lease that settles wakes us, what somebody waits for in the store does not."""
        with self._ready:
            if not self._inbox and not self._stopping and not self._is_woken:
                self._ready.wait(self._pause())
            # What came between the last look and now is looked at next, not slept over.
            self._is_woken = False

    def _pause(self) -> float:
        if self._restorer.awaits_saves:
            return _SPILL_POLL_SECONDS
        return LOOK_MIN_S if self.scheduler.holds_back else _IDLE_SECONDS
