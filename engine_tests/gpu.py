"""Blocks on a real device: run with tests of the whole connector by `make test-gpu`, never by `make test-engines`."""

from __future__ import annotations

import pytest
import torch

from workmem.core.layout import KVLayout
from workmem.plugins.vllm_device import DeviceBlocks
from workmem.plugins.vllm_tensors import blocks_of

LAYERS, COUNT, HEADS, TOKENS, DIM = 24, 256, 8, 16, 128
LAYOUT = KVLayout(dtype="bf16", layers=LAYERS, kv_heads=HEADS, head_dim=DIM, block_tokens=TOKENS)


class Model:
    """Keeps a device busy for some 100 ms, then writes one number all over a block."""

    def __init__(self) -> None:
        self.device = torch.device(torch.accelerator.current_accelerator(), 0)
        whole = torch.zeros((LAYERS, COUNT, TOKENS, HEADS, 2 * DIM), dtype=torch.bfloat16, device=self.device)
        self.caches = {f"layer.{i}": layer.transpose(1, 2) for i, layer in enumerate(whole)}
        made = blocks_of(self.caches, LAYOUT, COUNT)
        assert isinstance(made, DeviceBlocks)
        self.blocks = made
        self._matrix = torch.ones((4096, 4096), dtype=torch.bfloat16, device=self.device)
        self.busy()
        torch.accelerator.synchronize()

    def busy(self) -> None:
        for _ in range(200):
            self._matrix @ self._matrix

    def write(self, block: int, value: int) -> None:
        for layer in self.caches.values():
            layer[block] = value

    def sum_of(self, block: int) -> torch.Tensor:
        return torch.stack([layer[block].float().sum() for layer in self.caches.values()]).sum()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


NUMBERS = LAYOUT.page_bytes // 2


def page_of(value: int) -> memoryview:
    page = torch.full((NUMBERS,), value, dtype=torch.bfloat16)
    return memoryview(page.view(torch.uint8).numpy().tobytes())


def is_past(event: object) -> bool:
    return event.query()


@pytest.mark.parametrize("round_", range(5))
def test_a_block_is_saved_as_its_step_left_it(model: Model, round_: int):
    model.busy()
    for number in range(COUNT):
        model.write(number, number % 100 + round_)
    mark = model.blocks.mark()
    readings = [model.blocks.begin_out(number, mark) for number in range(COUNT)]
    told = [reading for reading in readings if reading.fence is not None]
    assert 1 < len(told) < COUNT
    assert not is_past(told[0].fence), "the host waited for the device"
    model.blocks.hold([reading.fence for reading in told])
    for number in range(len(told)):
        model.write(number, 200)
    page = bytearray(LAYOUT.page_bytes)
    for number, reading in enumerate(readings):
        reading.issue()
        reading.copy_into(memoryview(page))
        reading.end()
        assert (torch.frombuffer(page, dtype=torch.bfloat16) == number % 100 + round_).all(), number


@pytest.mark.parametrize("round_", range(5))
def test_a_step_reads_what_was_loaded_for_it(model: Model, round_: int):
    pages = [page_of(value + round_) for value in range(COUNT // 4)]
    model.busy()
    model.write(0, 99)
    filling = model.blocks.begin_in(model.blocks.mark(), (), is_aside=False)
    for number, page in enumerate(pages):
        filling.copy_in(number, page)
    filling.end()
    for number in range(len(pages)):
        assert float(model.sum_of(number)) == NUMBERS * (number + round_), number


def test_what_has_arrived_is_there(model: Model):
    model.write(7, 1)
    filling = model.blocks.begin_in(model.blocks.mark(), (), is_aside=True)
    filling.copy_in(7, page_of(5))
    filling.clear(8)
    filling.end()
    assert float(model.sum_of(7)) == NUMBERS * 5
    assert float(model.sum_of(8)) == 0
