"""The embedded engine: one thread that admits, computes, samples, saves; and its asyncio face.

The event loop hands requests in through an inbox and gets deltas back through a queue per request.
Everything else (pool, scheduler, sequences) belongs to the engine thread. Saving runs on store threads
behind it; loading on the loader's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from workmem.core.clock import Clock, SystemClock
from workmem.core.errors import (
    ClientError,
    ConfigError,
    EngineError,
    InvariantError,
    QueueFull,
    WorkmemError,
)
from workmem.core.events import BoundReached, EventSink, discard
from workmem.core.generation import Delta, GenerateRequest, ModelInfo, RenderedPrompt
from workmem.core.layout import Namespace
from workmem.core.outcomes import COMPUTED
from workmem.core.units import parse_bytes
from workmem.engines.embedded import attention, fuse, tiles
from workmem.engines.embedded.admission import Limits, check
from workmem.engines.embedded.block_pool import BlockPool
from workmem.engines.embedded.config import EmbeddedConfig
from workmem.engines.embedded.grammar import Grammar
from workmem.engines.embedded.kv_pages import KVPages
from workmem.engines.embedded.loader import LoadedModel, load
from workmem.engines.embedded.loading import PageLoader
from workmem.engines.embedded.native import load_kernel
from workmem.engines.embedded.output import OutputWriter
from workmem.engines.embedded.restore import Restorer
from workmem.engines.embedded.runner import PackedRunner, Runner
from workmem.engines.embedded.saving import PageSaver
from workmem.engines.embedded.scheduler import Scheduler, Work
from workmem.engines.embedded.sequence import Phase, Sequence
from workmem.engines.embedded.tokenizer import ModelTokenizer
from workmem.store.contract import KVStore

_LOG = logging.getLogger(__name__)
_IDLE_SECONDS = 0.5
TENANTS_MAX = 4096
"""Each tenant is a namespace of its own in every tier, for as long as the process lives."""
_SPILL_POLL_SECONDS = 0.002


class EmbeddedEngine:
    """Implements `core.generation.Engine`. Build with `open`, end with `close`."""

    def __init__(
        self,
        config: EmbeddedConfig,
        loaded: LoadedModel,
        tokenizer: ModelTokenizer,
        store: KVStore | None,
        *,
        name: str,
        sink: EventSink,
        clock: Clock,
        cache_dir: Path,
    ) -> None:
        layout = loaded.layout
        blocks = parse_bytes(config.vram_bytes) // layout.page_bytes
        minimum = -(-config.batch_tokens // layout.block_tokens) * 2
        if blocks < minimum:
            raise ConfigError(
                f"$.engine.vram_bytes: {config.vram_bytes} holds {blocks} blocks of {layout.page_bytes} bytes; "
                f"batch_tokens={config.batch_tokens} needs at least {minimum} ({minimum * layout.page_bytes} bytes)"
            )
        self.notes = loaded.notes
        self._config = config
        self._loaded = loaded
        self._tokenizer = tokenizer
        self._store = store
        self._sink = sink
        self._clock = clock
        self._pages = KVPages(layout, blocks, str(loaded.device))
        self._loader = PageLoader(self._pages, self._wake)
        self._runner = self._make_runner(cache_dir)
        self._output = OutputWriter(tokenizer, loaded.vocabulary, sink, clock)
        self._roots: dict[str, bytes] = {}
        # Before the limits are taken: dram's capacity depends on the pages it is to hold.
        self._root("")
        self._limits = Limits.of(config, loaded, block_count=blocks, store=store)
        max_context = self._limits.max_context
        self.info = ModelInfo(
            name=name,
            fingerprint=loaded.fingerprint,
            max_context=max_context,
            dtype=config.dtype,
            created=int(clock.wall()),
        )
        self._reuse_off = False
        self._ready = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._ended = False
        self._steps = 0
        self._tokens_computed = 0
        self._tokens_cached = 0
        self._tokens_asked = 0
        self._build_ledgers()
        self._thread = threading.Thread(target=self._run, name="workmem-engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        config: EmbeddedConfig,
        store: KVStore | None,
        *,
        folder: Path,
        cache_dir: Path,
        sink: EventSink = discard,
        clock: Clock | None = None,
    ) -> EmbeddedEngine:
        """Load the model in `folder` and start. Blocks for seconds; raises ConfigError."""
        if config.deterministic and config.dtype != "fp32":
            raise ConfigError(
                "$.engine.deterministic: needs $.engine.dtype = 'fp32'; bf16 sums depend on their split"
            )
        if config.threads:
            torch.set_num_threads(config.threads)
        attention.register()
        tiles.register()
        loaded = load(
            folder,
            device=config.device,
            dtype=config.dtype,
            attn_implementation=tiles.NAME if config.deterministic else attention.NAME,
            arithmetic="fixed" if config.deterministic else "fast",
            cache_folder=cache_dir,
        )
        if config.deterministic and loaded.device.type != "cpu":
            raise ConfigError(f"$.engine.deterministic: works on cpu only, not on {loaded.device}")
        tokenizer = ModelTokenizer(folder)
        name = config.served_name or folder.name
        return cls(
            config,
            loaded,
            tokenizer,
            store,
            name=name,
            sink=sink,
            clock=clock or SystemClock(),
            cache_dir=cache_dir,
        )

    # --- the asyncio face ---

    def encode(self, text: str) -> list[int]:
        """See `Engine.encode`."""
        return self._tokenizer.encode(text)

    def render_chat(
        self,
        messages: Seq[dict[str, Any]],
        *,
        tools: Seq[dict[str, Any]] = (),
        template_kwargs: dict[str, Any] | None = None,
    ) -> RenderedPrompt:
        """See `Engine.render_chat`."""
        return self._tokenizer.render_chat(messages, tools=tools, template_kwargs=template_kwargs)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """See `Engine.generate`."""
        max_tokens = check(request, self._limits)
        self._refuse_if_full()
        grammar = None
        if request.sampling.json_schema is not None:
            grammar = await asyncio.to_thread(
                Grammar.compile,
                request.sampling.json_schema,
                self._tokenizer,
                vocabulary=self._loaded.vocabulary,
            )
            # Others may have come while the schema was compiled.
            self._refuse_if_full()
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

        def emit(item: Delta | BaseException) -> None:
            # The loop may be gone when a client's event loop ends before the engine does.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(deltas.put_nowait, item)

        seq = Sequence(
            request,
            root=self._root(request.caller.tenant),
            block_tokens=self._loaded.layout.block_tokens,
            max_tokens=max_tokens,
            arrived=self._clock.monotonic(),
            emit=emit,
        )
        self._output.prepare(seq, grammar)
        if not self._post(lambda: self._scheduler.add(seq)):
            raise EngineError("the server is shutting down")
        ended = False
        try:
            while not ended:
                item = await deltas.get()
                if isinstance(item, BaseException):
                    ended = True
                    raise item
                ended = item.finish_reason is not None
                yield item
        finally:
            if not ended:
                self._post(lambda: self._cancel(seq))

    def gauges(self) -> dict[str, float]:
        """See `Engine.gauges`."""
        load = self._loader.counters
        return {
            "num_requests_running": len(self._scheduler.running),
            "num_requests_waiting": len(self._scheduler.waiting),
            "kv_cache_usage_perc": 1 - self._pool.idle_count / self._pool.block_count,
            "vram_blocks": self._pool.block_count,
            "vram_cached_blocks": self._pool.cached_count,
            "vram_evicted_blocks_total": self._pool.evicted_count,
            "num_preemptions_total": self._scheduler.preempted_count,
            "pending_waits_total": self._scheduler.pending_count,
            "engine_steps_total": self._steps,
            "computed_tokens_total": self._tokens_computed,
            "prefix_cache_queries_total": self._tokens_asked,
            "prefix_cache_hits_total": self._tokens_cached,
            "load_slices_total": load.slices,
            "load_slices_overlapped_total": load.overlapped,
            "load_layers_waited_total": load.waited,
            "load_pages_total": load.pages,
            "load_pages_corrupt_total": load.corrupt,
            "reuse_disabled": float(self._reuse_off),
            "engine_alive": float(self._thread.is_alive()),
        }

    async def drop_vram(self) -> int:
        """Forget every idle cached vram block; returns how many. For tests and benchmarks of the lower tiers."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[int] = loop.create_future()

        def drop() -> None:
            count = self._pool.drop_idle()
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set_result, count)

        if not self._post(drop):
            raise EngineError("the server is shutting down")
        return await done

    async def close(self) -> None:
        """Cancel what runs and stop the threads. Idempotent. The store is the caller's to flush and close."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Blocking form of `close`."""
        with self._ready:
            if self._stopping:
                return
            self._stopping = True
            self._ready.notify_all()
        self._thread.join()
        self._loader.close()

    # --- the engine thread ---

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
        for seq in [*self._scheduler.running, *self._scheduler.waiting]:
            self._end(seq, EngineError("the server is shutting down"))

    def _do_inbox(self) -> None:
        """What other threads have asked for; each job is taken out before it runs, so none can run twice."""
        while self._inbox:
            self._inbox.popleft()()

    @torch.inference_mode()
    def _step(self) -> bool:
        work = self._scheduler.plan(self._clock.monotonic())
        for seq, error in self._scheduler.failed:
            self._end(seq, error)
        self._scheduler.failed.clear()
        for seq in self._scheduler.running:
            if seq.window:
                self._saver.offer(seq)
        work = self._runnable(work)
        if not work:
            return False
        logits = self._runner.run(work)
        self._steps += 1
        sampled: list[tuple[int, Sequence]] = []
        row = -1
        for item in work:
            row += item.samples
            if self._settle(item) and item.samples:
                sampled.append((row, item.seq))
        if sampled:
            rows = [row for row, _ in sampled]
            picked = logits if len(rows) == logits.shape[0] else logits[rows]
            for seq in self._output.advance([seq for _, seq in sampled], picked):
                self._scheduler.finish(seq)
        return True

    def _runnable(self, work: list[Work]) -> list[Work]:
        """Without what has ended, or has lost pages that it would read in place."""
        for item in work:
            if not self._restorer.still_holds(item.seq):
                self._end_lost(item.seq)
        return [item for item in work if item.seq.phase is Phase.RUNNING]

    def _settle(self, item: Work) -> bool:
        """Book what the step computed. False where a bad page made the result void."""
        seq = item.seq
        failed = self._restorer.settle(seq)
        if failed is not None:
            seq.computed = failed * seq.block_tokens
            seq.restored = min(seq.restored, failed)
            self._output.lost(seq, failed)
            return False
        if not self._restorer.still_holds(seq):
            self._end_lost(seq)
            return False
        if seq.first_token_at is None and item.start + item.count >= seq.prompt_len:
            asked = sum(run.tokens for run in seq.sources)
            self._tokens_asked += asked
            self._tokens_cached += sum(run.tokens for run in seq.sources if run.source != COMPUTED)
        self._tokens_computed += item.count
        self._scheduler.computed(seq, item.start + item.count)
        self._saver.offer(seq)
        return True

    def _cancel(self, seq: Sequence) -> None:
        if seq.phase is not Phase.DONE:
            self._output.cancel(seq)
            self._scheduler.finish(seq)

    def _end(self, seq: Sequence, error: EngineError) -> None:
        self._scheduler.finish(seq)
        self._output.fail(seq, error)

    def _end_lost(self, seq: Sequence) -> None:
        self._end(seq, EngineError("pages of this context left dram while they were in use; send it again"))

    def _fail_running(self, error: EngineError) -> None:
        try:
            for seq in list(self._scheduler.running):
                self._end(seq, error)
        except InvariantError:
            _LOG.exception("bug in the cache: it is switched off, the engine goes on without it")
            self._reset()

    def _reset(self) -> None:
        """After a bug in our ledgers: nothing in vram can be trusted, so nothing is reused any more."""
        stranded = [*self._scheduler.running, *self._scheduler.waiting]
        self._reuse_off = True
        # Whoever still reads or writes the old blocks ends first: they are about to be given out anew.
        self._saver.close()
        for seq in stranded:
            with contextlib.suppress(WorkmemError):
                self._restorer.forget(seq)
        self._build_ledgers()
        error = EngineError("the cache met a bug of its own and was switched off; send the request again")
        for seq in stranded:
            seq.phase = Phase.DONE
            self._output.fail(seq, error)

    def _build_ledgers(self) -> None:
        layout = self._loaded.layout
        store = None if self._reuse_off else self._store
        self._pool = BlockPool(self._pages.tensor.shape[0], self._sink)
        self._saver = PageSaver(store, self._pool, self._pages, post=self._post)
        self._restorer = Restorer(
            store, self._pool, self._loader, wake=self._wake, monotonic=self._clock.monotonic
        )
        self._scheduler = Scheduler(
            self._pool,
            self._restorer,
            block_tokens=layout.block_tokens,
            batch_tokens=self._config.batch_tokens,
            running_max=self._config.running_max,
            dram_blocks=self._limits.dram_tokens // layout.block_tokens,
            sink=self._sink,
        )

    def _make_runner(self, cache_dir: Path) -> Runner:
        if self._config.deterministic:
            return tiles.TileRunner(self._loaded.model, self._pages)
        kernel = load_kernel(cache_dir) if self._pages.on_cpu else None
        if kernel is not None:
            fuse.use_kernel(self._loaded.model, kernel)
        return PackedRunner(self._loaded.model, self._pages, kernel, str(self._loaded.device))

    def _post(self, job: Callable[[], None]) -> bool:
        """Have the engine thread do `job`. False when it has ended and never will."""
        with self._ready:
            if self._ended:
                return False
            self._inbox.append(job)
            self._ready.notify_all()
            return True

    def _wake(self) -> None:
        with self._ready:
            self._ready.notify_all()

    def _sleep(self) -> None:
        """Until something arrives; a lease that settles wakes us, a save that somebody waits for does not."""
        with self._ready:
            if not self._inbox and not self._stopping:
                self._ready.wait(_SPILL_POLL_SECONDS if self._restorer.awaits_saves else _IDLE_SECONDS)

    def _root(self, tenant: str) -> bytes:
        root = self._roots.get(tenant)
        if root is None:
            if len(self._roots) >= TENANTS_MAX:
                self._sink(BoundReached(name="engine.tenants", limit=TENANTS_MAX, detail=tenant[:64]))
                raise ClientError(
                    f"this server has seen {TENANTS_MAX} tenants and takes no new one: restart it"
                )
            space = Namespace(
                model_fingerprint=self._loaded.fingerprint,
                layout=self._loaded.layout,
                tenant_salt=tenant,
                arithmetic=tiles.arithmetic() if self._config.deterministic else "",
            )
            root = self._store.register(space) if self._store is not None else space.root()
            self._roots[tenant] = root
        return root

    def _refuse_if_full(self) -> None:
        scheduler = self._scheduler
        queued = len(scheduler.waiting) + len(self._inbox)
        # A burst arrives between two steps: those who will run at once do not wait.
        places = 0 if scheduler.waiting else self._config.running_max - len(scheduler.running)
        if queued >= self._config.queue_max + places:
            raise QueueFull(
                f"{queued} requests are waiting, the bound is engine.queue_max={self._config.queue_max}",
                retry_after_s=self._retry_after(),
            )

    def _retry_after(self) -> float:
        """A guess: the time the queue's head has waited, between one second and one minute."""
        head = self._scheduler.waiting[:1]
        return min(max(self._clock.monotonic() - head[0].arrived, 1.0), 60.0) if head else 1.0
