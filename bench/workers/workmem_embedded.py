"""Our embedded engine, in process, without a store and with reuse off."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from protocol import Event, Run, serve


def load(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    import torch  # noqa: PLC0415

    from workmem import __version__  # noqa: PLC0415
    from workmem.core.generation import GenerateRequest, SamplingParams  # noqa: PLC0415
    from workmem.engines.embedded.config import EmbeddedConfig  # noqa: PLC0415
    from workmem.engines.embedded.engine import EmbeddedEngine  # noqa: PLC0415

    folder = Path(options["model"])
    config = EmbeddedConfig(
        model=str(folder),
        dtype=options["dtype"],
        vram_bytes=options["vram"],
        max_context=options["max_context"],
        threads=options["threads"],
    )
    engine = EmbeddedEngine.open(config, None, folder=folder, cache_dir=Path(options["cache"]))
    serial = 0

    async def complete(
        index: int, prompt: list[int], max_tokens: int, start: float, events: list[Event]
    ) -> None:
        nonlocal serial
        serial += 1
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = GenerateRequest(id=str(serial), token_ids=prompt, sampling=sampling, reuse=False)
        async for delta in engine.generate(request):
            if tokens := len(delta.token_ids):
                events.append((time.perf_counter() - start, index, tokens))  # noqa: PERF401 - read the clock now

    async def complete_all(prompts: list[list[int]], max_tokens: int) -> list[Event]:
        events: list[Event] = []
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index, prompt in enumerate(prompts):
                group.create_task(complete(index, prompt, max_tokens, start, events))
        return events

    def run(prompts: list[list[int]], max_tokens: int) -> list[Event]:
        return asyncio.run(complete_all(prompts, max_tokens))

    return {"workmem": __version__, "torch": torch.__version__, "threads": torch.get_num_threads()}, run


if __name__ == "__main__":
    serve(load)
