"""Engines over tiny random models, built in a second and closed by the fixture."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from workmem.core.events import Event
from workmem.core.generation import Delta, GenerateRequest, SamplingParams, Usage
from workmem.engines.embedded.config import EmbeddedConfig
from workmem.engines.embedded.engine import EmbeddedEngine
from workmem.engines.embedded.sequence import Sequence
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.testing.tiny_models import build_model


@dataclasses.dataclass
class Answer:
    """A finished completion."""

    tokens: list[int]
    text: str
    reason: str
    usage: Usage

    @property
    def cached(self) -> int:
        return self.usage.cached_tokens

    def sources(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for run in self.usage.sources:
            found[run.source] = found.get(run.source, 0) + run.tokens
        return found


class Bench:
    """One engine and its store, with every logit row it ever sampled from on record."""

    def __init__(self, engine: EmbeddedEngine, store: Store | None, events: list[Event]) -> None:
        self.engine = engine
        self.store = store
        self.events = events
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        self._count = 0
        inner = engine.thread.output.advance

        def advance(seqs: list[Sequence], logits: torch.Tensor) -> list[Sequence]:
            for row, seq in enumerate(seqs):
                self.logits[(seq.id, len(seq.tokens))] = logits[row].clone()
            return inner(seqs, logits)

        engine.thread.output.advance = advance

    def stream(self, tokens: list[int], max_tokens: int = 8, **options: Any) -> AsyncIterator[Delta]:
        self._count += 1
        request = {
            name: options.pop(name)
            for name in ("id", "priority", "reuse", "caller", "handoff", "hints")
            if name in options
        }
        request.setdefault("id", f"r{self._count}")
        options.setdefault("temperature", 0.0)
        options.setdefault("ignore_eos", True)
        sampling = SamplingParams(max_tokens=max_tokens, **options)
        return self.engine.generate(GenerateRequest(token_ids=tokens, sampling=sampling, **request))

    async def ask(self, tokens: list[int], max_tokens: int = 8, **options: Any) -> Answer:
        ids: list[int] = []
        text = ""
        async for delta in self.stream(tokens, max_tokens, **options):
            ids += delta.token_ids
            text += delta.text
            if delta.finish_reason is not None:
                assert delta.usage is not None
                assert sum(run.tokens for run in delta.usage.sources) == len(tokens)
                return Answer(ids, text, delta.finish_reason, delta.usage)
        raise AssertionError("no end")

    async def idle(self) -> None:
        """Wait until the engine holds nothing: a leak would time out here."""
        for _ in range(400):
            if self.store is None or self.store.flush(0.01):
                pool = self.engine.thread.pool
                if pool.idle_count == pool.block_count:
                    return
            await asyncio.sleep(0.01)
        raise AssertionError(
            f"vram blocks still held: {self.engine.thread.pool.block_count - self.engine.thread.pool.idle_count}"
        )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return build_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture(scope="session")
def engine_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels are kept: they cost seconds, and one build serves every test."""
    return tmp_path_factory.mktemp("engine-cache")


@pytest.fixture
def bench(tiny: Path, engine_cache: Path) -> Iterator[Callable[..., Bench]]:
    """Factory of engines; `store=False` for none, `dram`, and EmbeddedConfig fields by name."""
    with contextlib.ExitStack() as stack:

        def make(
            *,
            folder: Path = tiny,
            store: bool | Store = True,
            dram: str = "64MiB",
            ssd: Path | None = None,
            **settings: Any,
        ) -> Bench:
            events: list[Event] = []
            if store is True:
                config = StoreConfig(
                    dram=DramConfig(bytes=dram),
                    ssd=SsdConfig(enabled=ssd is not None, path=str(ssd or ""), bytes="256MiB"),
                )
                kv: Store | None = Store(config, sink=events.append)
                stack.callback(kv.close)
            else:
                kv = store or None
            settings.setdefault("vram_bytes", "4MiB")
            settings.setdefault("batch_tokens", 64)
            engine = EmbeddedEngine.open(
                EmbeddedConfig(threads=2, **settings),
                kv,
                folder=folder,
                cache_dir=engine_cache,
                sink=events.append,
            )
            stack.callback(engine.stop)
            return Bench(engine, kv, events)

        yield make
