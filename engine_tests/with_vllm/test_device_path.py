"""The path for blocks on a device, under real vLLM: the device is the processor, which does at once what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import prompt, sources

ENGINE = {"max_num_batched_tokens": 256}


class AtOnce:
    """All queues of a device, and all their events."""

    def engine_queue(self) -> AtOnce:
        return self

    def new_queue(self) -> AtOnce:
        return self

    def run(self, work: Callable[[], object]) -> None:
        with torch.inference_mode():
            work()

    def wait_for(self, event: AtOnce) -> None:
        assert event is self

    def record(self) -> AtOnce:
        return self

    def synchronize(self) -> None:
        pass


plain: dict[str, Any] = {}
"""The same blocks as the processor moves them."""


@pytest.fixture(scope="module", autouse=True)
def _as_a_device() -> Iterator[None]:
    from workmem.plugins import vllm
    from workmem.plugins.vllm_device import DeviceBlocks
    from workmem.plugins.vllm_views import views_of

    def on_a_device(caches, layout, count) -> DeviceBlocks:
        plain["blocks"] = blocks_of(caches, layout, count)
        return DeviceBlocks(layout, views_of(caches, count), AtOnce())

    blocks_of = vllm.blocks_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "blocks_of", on_a_device)
        yield


def test_what_was_computed_comes_back(engine):
    blocks = engine.worker._worker._blocks
    assert type(blocks).__name__ == "DeviceBlocks"
    ids = prompt(300, 1)
    engine.ask(ids)
    wanted = engine.tokens(ids)
    engine.reset()
    (again,) = engine.ask(ids)
    assert list(again.outputs[0].token_ids) == wanted
    assert sources(again) == {"dram": 288, "computed": 12}


def test_what_a_device_saved_the_processor_loads(engine):
    """A page is the same whatever moved it."""
    side = engine.worker._worker
    ids = prompt(200, 2)
    engine.ask(ids)
    wanted = engine.tokens(ids)
    engine.reset()
    device, side._blocks = side._blocks, plain["blocks"]
    side._loading._blocks = side._blocks
    try:
        (again,) = engine.ask(ids)
    finally:
        side._blocks = side._loading._blocks = device
    assert type(plain["blocks"]).__name__ == "KVBlocks"
    assert list(again.outputs[0].token_ids) == wanted
    assert sources(again) == {"dram": 192, "computed": 8}


def test_what_is_corrupt_is_computed(engine):
    side = engine.worker._worker
    ids = prompt(257, 3)
    engine.ask(ids)
    engine.reset()
    filling = type(side._blocks.begin_in(side._blocks.mark(), (), is_aside=True))
    with pytest.MonkeyPatch.context() as patch:
        copy, asked = filling.copy_in, []

        def third_is_bad(self, block, source):
            asked.append(block)
            sums = copy(self, block, source)
            return (0, *sums[1:]) if len(asked) == 3 else sums

        patch.setattr(filling, "copy_in", third_is_bad)
        (again,) = engine.ask(ids)
    assert sources(again)["dram"] == 64
    assert again.kv_transfer_params["workmem"]["miss"] == "corrupt"
    assert len(again.outputs[0].token_ids) == 8
