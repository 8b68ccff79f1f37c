"""The embedded engine's asyncio face: requests go in through an inbox, deltas come back through a queue each.

What computes them is in `engine_thread`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from workmem.core.clock import Clock, SystemClock
from workmem.core.errors import (
    ClientError,
    ConfigError,
    EngineError,
    QueueFull,
)
from workmem.core.events import BoundReached, EventSink, discard
from workmem.core.generation import Delta, GenerateRequest, KnownTurn, ModelInfo, RenderedPrompt
from workmem.core.layout import Namespace
from workmem.core.units import parse_bytes
from workmem.engines.embedded import attention, tiles
from workmem.engines.embedded.admission import Limits, check
from workmem.engines.embedded.config import EmbeddedConfig
from workmem.engines.embedded.engine_thread import EngineThread
from workmem.engines.embedded.grammar import Grammar
from workmem.engines.embedded.levers import Levers
from workmem.engines.embedded.loader import LoadedModel, load
from workmem.engines.embedded.output import OutputWriter
from workmem.engines.embedded.sequence import Sequence
from workmem.engines.embedded.tokenizer import ModelTokenizer
from workmem.store.contract import SteeredStore

TENANTS_MAX = 4096
"""Each tenant is a namespace of its own in every tier, for as long as the process lives."""


class EmbeddedEngine:
    """Implements `core.generation.Engine`. Build with `open`, end with `close`."""

    def __init__(
        self,
        config: EmbeddedConfig,
        loaded: LoadedModel,
        tokenizer: ModelTokenizer,
        store: SteeredStore | None,
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
        self._config = config
        self._loaded = loaded
        self._tokenizer = tokenizer
        self._store = store
        self._sink = sink
        self._clock = clock
        self._roots: dict[str, bytes] = {}
        # Before the limits are taken: dram's capacity depends on the pages it is to hold.
        self._root("")
        self._limits = Limits.of(config, loaded, block_count=blocks, store=store)
        self.info = ModelInfo(
            name=name,
            fingerprint=loaded.fingerprint,
            max_context=self._limits.max_context,
            dtype=config.dtype,
            created=int(clock.wall()),
        )
        self._levers = Levers(store, ttl_s=config.hint_ttl_s, ttl_max_s=config.hint_ttl_max_s)
        self.thread = EngineThread(
            config,
            loaded,
            OutputWriter(
                tokenizer,
                loaded.vocabulary,
                sink,
                clock,
                approximate=store is not None and store.gauges().get("store_ssd_approximate", 0) > 0,
                levers=self._levers,
            ),
            store,
            block_count=blocks,
            dram_tokens=self._limits.dram_tokens,
            sink=sink,
            clock=clock,
            cache_dir=cache_dir,
        )
        self.notes = (*loaded.notes, *self.thread.runner.notes)

    @classmethod
    def open(
        cls,
        config: EmbeddedConfig,
        store: SteeredStore | None,
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

    def encode(self, text: str) -> list[int]:
        """See `Engine.encode`."""
        return self._tokenizer.encode(text)

    def render_chat(
        self,
        messages: Seq[dict[str, Any]],
        *,
        tools: Seq[dict[str, Any]] = (),
        template_kwargs: dict[str, Any] | None = None,
        passages: Mapping[str, Seq[str]] | None = None,
        known: Seq[KnownTurn] = (),
    ) -> RenderedPrompt:
        """See `Engine.render_chat`."""
        return self._tokenizer.render_chat(
            messages, tools=tools, template_kwargs=template_kwargs, passages=passages, known=known
        )

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
        self.thread.output.prepare(seq, grammar)

        def admit() -> None:
            self._levers.arrives(seq)
            self.thread.scheduler.add(seq)

        if not self.thread.post(admit):
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
                self.thread.post(lambda: self.thread.cancel(seq))

    def gauges(self) -> dict[str, float]:
        """See `Engine.gauges`."""
        return self.thread.gauges()

    async def drop_vram(self) -> int:
        """Forget every idle cached vram block; returns how many. For tests and benchmarks of the lower tiers."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[int] = loop.create_future()

        def drop() -> None:
            count = self.thread.pool.drop_idle()
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set_result, count)

        if not self.thread.post(drop):
            raise EngineError("the server is shutting down")
        return await done

    async def close(self) -> None:
        """Cancel what runs and stop the threads. Idempotent. The store is the caller's to flush and close."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Blocking form of `close`."""
        self.thread.stop()

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
        scheduler = self.thread.scheduler
        queued = len(scheduler.waiting) + self.thread.inbox_count
        # A burst arrives between two steps: those who will run at once do not wait.
        places = 0 if scheduler.waiting else self._config.running_max - len(scheduler.running)
        if queued >= self._config.queue_max + places:
            raise QueueFull(
                f"{queued} requests are waiting, the bound is engine.queue_max={self._config.queue_max}",
                retry_after_s=self._retry_after(),
            )

    def _retry_after(self) -> float:
        """A guess: the time the queue's head has waited, between one second and one minute."""
        head = self.thread.scheduler.waiting[:1]
        return min(max(self._clock.monotonic() - head[0].arrived, 1.0), 60.0) if head else 1.0
