"""Our embedded engine, in process: over a store of its own with reuse on, with its own memory alone, or with neither.

Requests (`do`): `fleet`, `settle` and `close`, as `vllm_cached.py` answers them; `drop_vram`, which forgets idle blocks
of the engine's own memory; `known`, the pages that the store knows in the tier below dram.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from protocol import Handle, serve_requests

FLUSH_S = 60.0


class Fleet:
    """An engine and its store; one event loop for all requests, the engine belongs to it."""

    def __init__(self, options: dict[str, Any]) -> None:
        from workmem.engines.embedded.config import EmbeddedConfig  # noqa: PLC0415
        from workmem.engines.embedded.engine import EmbeddedEngine  # noqa: PLC0415
        from workmem.store.copying import use_native_copy  # noqa: PLC0415

        folder, cache = Path(options["model"]), Path(options["cache"])
        use_native_copy(cache)
        self._reuse: bool = options["reuse"]
        self._store = _store(options) if self._reuse and options.get("store", True) else None
        config = EmbeddedConfig(
            model=str(folder),
            dtype=options["dtype"],
            vram_bytes=options["vram"],
            max_context=options["max_context"],
            threads=options["threads"],
        )
        self._engine = EmbeddedEngine.open(config, self._store, folder=folder, cache_dir=cache)
        self._runner = asyncio.Runner()
        self._serial = 0

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """See the module."""
        match request["do"]:
            case "fleet":
                return {"answers": self._runner.run(self._answers(request))}
            case "settle":
                begin = time.monotonic()
                if self._store is not None:
                    self._store.flush(FLUSH_S)
                return {"saved_s": time.monotonic() - begin}
            case "drop_vram":
                return {"blocks": self._runner.run(self._engine.drop_vram())}
            case "known":
                assert self._store is not None
                return {"pages": int(self._store.gauges()["store_below_pages"])}
            case "close":
                self._runner.run(self._engine.close())
                if self._store is not None:
                    self._store.close()
                return {}
            case other:
                raise ValueError(f"no such request: {other}")

    async def _answers(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        room = asyncio.Semaphore(request["in_flight"])
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._answer(prompt, request["max_tokens"], room))
                for prompt in request["prompts"]
            ]
        return [task.result() for task in tasks]

    async def _answer(self, prompt: list[int], max_tokens: int, room: asyncio.Semaphore) -> dict[str, Any]:
        from workmem.core.generation import GenerateRequest, SamplingParams  # noqa: PLC0415

        async with room:
            self._serial += 1
            sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            request = GenerateRequest(
                id=str(self._serial), token_ids=prompt, sampling=sampling, reuse=self._reuse
            )
            begin, first, usage = time.perf_counter(), 0.0, None
            ids: list[int] = []
            async for delta in self._engine.generate(request):
                if delta.token_ids and not ids:
                    first = time.perf_counter() - begin
                ids += delta.token_ids
                usage = delta.usage or usage
        assert usage is not None
        sources: dict[str, int] = {}
        for run in usage.sources:
            sources[str(run.source)] = sources.get(str(run.source), 0) + run.tokens
        return {"ttft_s": first, "token_ids": ids, "cached": usage.cached_tokens, "sources": sources}


def _store(options: dict[str, Any]) -> Any:
    from workmem.store.config import BelowConfig, DramConfig, SsdConfig, StoreConfig  # noqa: PLC0415
    from workmem.store.store import Store  # noqa: PLC0415

    if pool := options.get("pool"):
        below = BelowConfig(tier="mooncake", options=pool)
        config = StoreConfig(
            dram=DramConfig(bytes=options["dram"]), below=below, ssd=SsdConfig(enabled=False)
        )
        return Store(config, print)
    ssd = SsdConfig(path=options["ssd"], bytes=options["ssd_bytes"])
    return Store(StoreConfig(dram=DramConfig(bytes=options["dram"]), ssd=ssd), print)


def load(options: dict[str, Any]) -> tuple[dict[str, Any], Handle]:
    sys.path.insert(0, options["source"])
    import torch  # noqa: PLC0415

    from workmem import __version__  # noqa: PLC0415

    fleet = Fleet(options)
    about = {"workmem": __version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return about, fleet.handle


if __name__ == "__main__":
    serve_requests(load)
