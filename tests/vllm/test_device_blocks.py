"""Blocks on a device: every order of bytes comes back as it was, and whatever the device does late comes in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_engine import FakeVllm, Request
from late_device import LateDevice, LateEvent
from small import FACTS, SIZE

from workmem.core.errors import InvariantError
from workmem.core.layout import KVLayout
from workmem.plugins import vllm_device
from workmem.plugins.vllm_device import DeviceBlocks, TorchDevice
from workmem.plugins.vllm_tensors import blocks_of
from workmem.plugins.vllm_views import views_of
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store

LAYERS, COUNT, HEADS, TOKENS, DIM = 3, 5, 2, 4, 16
LAYOUT = KVLayout(dtype="bf16", layers=LAYERS, kv_heads=HEADS, head_dim=DIM, block_tokens=TOKENS)
NAMES = [f"layer.{index}" for index in range(LAYERS)]

# -- orders of bytes


def packed(
    order: str, dtype: torch.dtype = torch.bfloat16, content: int = 2 * DIM
) -> dict[str, torch.Tensor]:
    """[blocks, heads, tokens, content] views of one allocation whose axes lie as `order` says, as vLLM makes them."""
    sizes = {"L": LAYERS, "B": COUNT, "H": HEADS, "N": TOKENS, "C": content}
    whole = torch.zeros([sizes[axis] for axis in order], dtype=dtype)
    logical = whole.permute(*(order.index(axis) for axis in "LBHNC"))
    return {name: logical[index] for index, name in enumerate(NAMES)}


def apart(shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> dict[str, torch.Tensor]:
    """Each layer in an allocation of its own, its axes in memory in `order`."""
    order = order or tuple(range(len(shape)))
    back = [order.index(axis) for axis in range(len(shape))]
    return {
        name: torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16).permute(back)
        for name in NAMES
    }


FORMS: dict[str, tuple[Callable[[], dict[str, torch.Tensor]], KVLayout, int]] = {
    **{
        order: (lambda order=order: packed(order), LAYOUT, 1)
        for order in ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
    },
    "K and V apart": (lambda: apart((2, COUNT, TOKENS, HEADS, DIM)), LAYOUT, LAYERS),
    "K and V apart, heads first": (
        lambda: apart((2, COUNT, TOKENS, HEADS, DIM), (0, 1, 3, 2, 4)),
        LAYOUT,
        LAYERS,
    ),
    "blocks first": (lambda: apart((COUNT, 2, TOKENS, HEADS, DIM)), LAYOUT, LAYERS),
    "a latent": (
        lambda: apart((COUNT, TOKENS, 2 * DIM)),
        KVLayout(dtype="bf16", layers=LAYERS, kv_heads=1, head_dim=DIM, block_tokens=TOKENS),
        LAYERS,
    ),
    "fp8": (
        lambda: packed("LBNHC", torch.float8_e4m3fn),
        KVLayout(dtype="u8", layers=LAYERS, kv_heads=HEADS, head_dim=DIM, block_tokens=TOKENS),
        1,
    ),
}


def fill(caches: dict[str, torch.Tensor], seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for tensor in caches.values():
        numbers = torch.randint(0, 100, tensor.shape, dtype=torch.uint8, generator=chance)
        tensor.copy_(numbers.to(tensor.dtype))


def axis_of_blocks(tensor: torch.Tensor) -> int:
    return 0 if tensor.shape[0] == COUNT else 1


def block(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor.select(axis_of_blocks(tensor), number).to(torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_a_block_of_any_order_comes_back_as_it_was(form: str):
    make, layout, views = FORMS[form]
    source, target, before = make(), make(), make()
    fill(source, 1)
    fill(target, 2)
    fill(before, 2)
    assert len(views_of(source, COUNT)) == views
    out = DeviceBlocks(layout, views_of(source, COUNT), LateDevice())
    into = DeviceBlocks(layout, views_of(target, COUNT), LateDevice())
    page = bytearray(layout.page_bytes)
    sums = out.begin_out(3, out.mark()).copy_into(memoryview(page))
    filling = into.begin_in(into.mark(), (), is_aside=True)
    assert filling.copy_in(1, memoryview(page)) == sums
    filling.end()
    for name in source:
        assert torch.equal(block(target[name], 1), block(source[name], 3)), name
        for other in (0, 2, 3, 4):
            assert torch.equal(block(target[name], other), block(before[name], other)), name


@pytest.mark.parametrize("form", ["LBHNC", "BLHNC", "K and V apart", "blocks first", "a latent"])
def test_a_page_is_the_same_as_of_blocks_that_the_processor_reads(form: str):
    make, layout, _ = FORMS[form]
    caches = make()
    fill(caches, 3)
    one, other = bytearray(layout.page_bytes), bytearray(layout.page_bytes)
    device = DeviceBlocks(layout, views_of(caches, COUNT), LateDevice())
    plain = blocks_of(caches, layout, COUNT)
    sums = device.begin_out(2, device.mark()).copy_into(memoryview(one))
    assert plain.begin_out(2, plain.mark()).copy_into(memoryview(other)) == sums
    assert one == other


def test_a_layer_that_uses_the_kv_of_another_is_not_moved_twice():
    make, layout, _ = FORMS["LBNHC"]
    caches = make()
    fill(caches, 3)
    page = bytearray(layout.page_bytes)
    # As vLLM names it: behind the others, or among them.
    shared = {"first": caches[NAMES[0]], **caches, "last": caches[NAMES[1]]}
    blocks = blocks_of(shared, layout, COUNT)
    sums = blocks.begin_out(2, blocks.mark()).copy_into(memoryview(page))
    plain = blocks_of(caches, layout, COUNT)
    assert plain.begin_out(2, plain.mark()).copy_into(memoryview(bytearray(layout.page_bytes))) == sums


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(7, 6, COUNT), "neither of the first two dimensions"),
        (torch.zeros(1, TOKENS, DIM).expand(COUNT, TOKENS, DIM), "overlap"),
        (torch.zeros(COUNT, TOKENS, 2 * DIM)[:, :, ::2], "do not follow each other"),
    ],
)
def test_an_order_that_is_not_understood_is_refused(tensor: torch.Tensor, why: str):
    with pytest.raises(InvariantError, match=why):
        views_of({"layer.0": tensor}, COUNT)


def test_a_padded_block_is_refused():
    with pytest.raises(InvariantError, match="padded"):
        DeviceBlocks(LAYOUT, views_of(packed("LBHNC", content=2 * DIM + 8), COUNT), LateDevice())


# -- orders of time

ORDERS = [(first, seed) for first in ((), ("engine",), ("out",), ("in step", "aside")) for seed in range(4)]


class Scene:
    """A device with blocks, and a model that writes one number all over a block."""

    def __init__(self, first: tuple[str, ...], seed: int) -> None:
        self.caches = packed("LBNHC")
        self.device = LateDevice(seed, first)
        self.blocks = DeviceBlocks(LAYOUT, views_of(self.caches, COUNT), self.device)
        self.seen: list[int] = []

    def compute(self, number: int, value: int) -> None:
        def write() -> None:
            for tensor in self.caches.values():
                tensor[number] = value

        self.device.engine_queue().run(write)

    def look(self, number: int) -> None:
        self.device.engine_queue().run(lambda: self.seen.append(self.value(number)))

    def value(self, number: int) -> int:
        values = {int(value) for tensor in self.caches.values() for value in tensor[number].unique()}
        return values.pop() if len(values) == 1 else -1

    def page(self, value: int) -> memoryview:
        numbers = torch.full((LAYOUT.page_bytes // 2,), value, dtype=torch.bfloat16)
        return memoryview(numbers.view(torch.uint8).numpy().tobytes())


def value_of(page: bytearray) -> int:
    values = torch.frombuffer(page, dtype=torch.bfloat16).unique()
    return int(values[0]) if len(values) == 1 else -1


def save(scene: Scene) -> bool:
    """A step completes a block, and the next one writes to it again."""
    scene.compute(0, 1)
    reading = scene.blocks.begin_out(0, scene.blocks.mark())
    scene.blocks.hold([reading.fence])
    scene.compute(0, 2)
    page = bytearray(LAYOUT.page_bytes)
    reading.copy_into(memoryview(page))
    return value_of(page) == 1


def load_in_step(scene: Scene) -> bool:
    """Whoever had the block before is still at it, and the step reads what is loaded."""
    scene.compute(0, 1)
    filling = scene.blocks.begin_in(scene.blocks.mark(), (), is_aside=False)
    filling.copy_in(0, scene.page(7))
    filling.end()
    assert any(queue.work for queue in scene.device.queues), "the host waited for the device"
    scene.look(0)
    scene.device.run_all()
    return scene.seen == [7]


def load_aside(scene: Scene) -> bool:
    """What has arrived is there, and stays."""
    scene.compute(0, 1)
    filling = scene.blocks.begin_in(scene.blocks.mark(), (), is_aside=True)
    filling.copy_in(0, scene.page(7))
    filling.end()
    has_arrived = scene.value(0) == 7
    scene.device.run_all()
    return has_arrived and scene.value(0) == 7


def load_over_save(scene: Scene) -> bool:
    """A block is loaded into while it is still being saved."""
    scene.compute(0, 1)
    mark = scene.blocks.mark()
    reading = scene.blocks.begin_out(0, mark)
    filling = scene.blocks.begin_in(mark, [reading.fence], is_aside=False)
    filling.copy_in(0, scene.page(7))
    filling.end()
    page = bytearray(LAYOUT.page_bytes)
    reading.copy_into(memoryview(page))
    scene.device.run_all()
    return value_of(page) == 1 and scene.value(0) == 7


def load_more_than_the_ring_holds(scene: Scene) -> bool:
    filling = scene.blocks.begin_in(scene.blocks.mark(), (), is_aside=False)
    for number in range(COUNT):
        filling.copy_in(number, scene.page(10 + number))
    filling.end()
    for number in range(COUNT):
        scene.look(number)
    scene.device.run_all()
    return scene.seen == [10, 11, 12, 13, 14]


def load_what_is_corrupt(scene: Scene) -> bool:
    filling = scene.blocks.begin_in(scene.blocks.mark(), (), is_aside=False)
    filling.copy_in(0, scene.page(7))
    filling.clear(0)
    filling.end()
    scene.look(0)
    scene.device.run_all()
    return scene.seen == [0]


def save_more_than_the_ring_holds(scene: Scene) -> bool:
    """Copies that found no room are told to the device later, one after the other; some are dropped."""
    for number in range(COUNT):
        scene.compute(number, 10 + number)
    mark = scene.blocks.mark()
    readings = [scene.blocks.begin_out(number, mark) for number in range(COUNT)]
    assert [reading.fence is None for reading in readings] == [False, True, True, True, True]
    readings[0].end()
    pages = [bytearray(LAYOUT.page_bytes) for _ in range(COUNT)]
    # Dropped, and its room is given to another.
    again = scene.blocks.begin_out(4, mark)
    assert again.fence is not None
    for number in (3, 1, 2):
        readings[number].issue()
        readings[number].copy_into(memoryview(pages[number]))
        readings[number].end()
    again.copy_into(memoryview(pages[4]))
    return [value_of(page) for page in pages[1:]] == [11, 12, 13, 14]


SCENES = [
    save,
    load_in_step,
    load_aside,
    load_over_save,
    load_more_than_the_ring_holds,
    load_what_is_corrupt,
    save_more_than_the_ring_holds,
]


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_device, "RING_BYTES", 2 * LAYOUT.page_bytes)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_every_order_is_right(scene: Callable[[Scene], bool]):
    assert all(scene(Scene(*order)) for order in ORDERS)


def deaf(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A queue of that name waits for no other."""

    def without(patch: pytest.MonkeyPatch) -> None:
        make = LateDevice.__init__

        def made(self: LateDevice, seed: int, first: tuple[str, ...]) -> None:
            make(self, seed, first)
            plain = self.new_queue

            def new_queue():
                queue = plain()
                queue.ignores_waits = queue.name == name
                return queue

            self.new_queue = new_queue
            self.queues[0].ignores_waits = name == "engine"

        patch.setattr(LateDevice, "__init__", made)

    return without


def no_host_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateEvent, "synchronize", lambda _: None)


def no_fences(patch: pytest.MonkeyPatch) -> None:
    begin = DeviceBlocks.begin_in
    patch.setattr(
        DeviceBlocks,
        "begin_in",
        lambda self, after, _, *, is_aside: begin(self, after, (), is_aside=is_aside),
    )


def no_mark(patch: pytest.MonkeyPatch) -> None:
    begin = DeviceBlocks.begin_in
    patch.setattr(
        DeviceBlocks,
        "begin_in",
        lambda self, _, fences, *, is_aside: begin(
            self, LateEvent.past(self._device), fences, is_aside=is_aside
        ),
    )


def no_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceBlocks, "hold", lambda *_: None)


def early_fence(patch: pytest.MonkeyPatch) -> None:
    """A fence in front of the copy that it stands for."""
    tell = vllm_device._Reading.tell

    def told(self, slot: int) -> None:
        early = self._out.queue.record()
        tell(self, slot)
        self.fence = early

    patch.setattr(vllm_device._Reading, "tell", told)


@pytest.mark.parametrize(
    ("scene", "without"),
    [
        (save, deaf("out")),
        (save, deaf("engine")),
        (save, no_hold),
        (save, no_host_waits),
        (save, early_fence),
        (load_in_step, deaf("in step")),
        (load_in_step, deaf("engine")),
        (load_in_step, no_mark),
        (load_aside, deaf("aside")),
        (load_aside, no_host_waits),
        (load_over_save, no_fences),
        (load_over_save, early_fence),
        (load_more_than_the_ring_holds, no_host_waits),
    ],
)
def test_each_wait_is_needed(
    scene: Callable[[Scene], bool],
    without: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
):
    without(monkeypatch)
    assert not all(scene(Scene(*order)) for order in ORDERS)


class DeviceVllm(FakeVllm):
    """The small engine on a device that does everything late: the host is steps ahead of it."""

    def __init__(self, store: Store, blocks: int, order: tuple[tuple[str, ...], int]) -> None:
        first, seed = order
        self.device = LateDevice(seed, first)
        self.wrong: list[str] = []
        super().__init__(store, blocks)

    def blocks_of_tensors(self) -> DeviceBlocks:
        caches = {str(layer): torch.from_numpy(tensor) for layer, tensor in enumerate(self.tensors)}
        return DeviceBlocks(FACTS.layout(0), views_of(caches, len(self.tensors[0])), self.device)

    def _forward(self, name, keys, blocks, span, bad) -> None:
        later = super()._forward

        def forward() -> None:
            try:
                later(name, keys, blocks, span, bad)
            except AssertionError as error:
                self.wrong.append(str(error))

        self.device.engine_queue().run(forward)


def is_right_in_traffic(folder: Path, order: tuple[tuple[str, ...], int]) -> bool:
    """Contexts that take blocks from each other, come back from dram and from the ssd, in two engines."""
    tier = SsdConfig(path=str(folder), bytes="16MiB", scrub_bytes_per_s=0, io="buffered")
    store = Store(StoreConfig(dram=DramConfig(bytes="1MiB"), ssd=tier))
    engines = [DeviceVllm(store, 8, order) for _ in range(2)]
    try:
        for turn in range(10):
            made = engines[turn % 2]
            for number in (turn % 3, turn % 4, 10 + turn):
                head = list(range(100 * number, 100 * number + 5 * SIZE))
                made.add(Request(f"{turn}.{number}.{made.asked}", [*head, turn], to_generate=SIZE))
            made.run()
            if turn == 5:
                assert store.flush(10)
                made.reset()
        assert store.flush(10)
        for made in engines:
            made.device.run_all()
        return not any(made.wrong for made in engines)
    finally:
        for made in engines:
            made.close()
        store.close()


def slow_store(patch: pytest.MonkeyPatch) -> None:
    """The engine is far ahead of the store's copies, and the device has room for all of them."""
    patch.setattr(vllm_device, "RING_BYTES", 32 * LAYOUT.page_bytes)
    copy = vllm_device._Reading.copy_into

    def late(self, into: memoryview) -> tuple[int, ...]:
        time.sleep(0.005)
        return copy(self, into)

    patch.setattr(vllm_device._Reading, "copy_into", late)


def test_traffic_is_right_far_ahead_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    slow_store(monkeypatch)
    assert is_right_in_traffic(tmp_path, (("engine",), 0))


def test_traffic_far_ahead_of_the_store_needs_the_engine_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slow_store(monkeypatch)
    no_hold(monkeypatch)
    assert not all(is_right_in_traffic(tmp_path / str(seed), (("engine",), seed)) for seed in range(20))


@pytest.mark.parametrize("order", ORDERS[::3])
def test_traffic_is_right_in_every_order(order: tuple[tuple[str, ...], int], tmp_path: Path):
    assert is_right_in_traffic(tmp_path, order)


@pytest.mark.parametrize(
    ("without", "first"),
    [(deaf("out"), "out"), (deaf("engine"), "engine"), (deaf("in step"), "in step")],
)
def test_traffic_needs_each_wait(
    without: Callable[[pytest.MonkeyPatch], None],
    first: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    without(monkeypatch)
    # Whether a run meets the fault is chance, as threads take turns by chance: most need one or two.
    assert not all(is_right_in_traffic(tmp_path / str(seed), ((first,), seed)) for seed in range(20))


def test_copies_without_room_take_turns():
    scene = Scene((), 0)
    first, second = (scene.blocks.begin_out(number, scene.blocks.mark()) for number in (1, 2))
    held = scene.blocks.begin_out(3, scene.blocks.mark())
    second.issue()
    waiting = threading.Thread(target=held.issue)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    second.copy_into(memoryview(bytearray(LAYOUT.page_bytes)))
    waiting.join(5)
    assert not waiting.is_alive()
    held.end()
    first.end()


def test_streams_of_torch_are_told_in_the_same_words():
    said: list[str] = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = name

        def wait_event(self, event: object) -> None:
            said.append(f"{self.name} waits")

    class Event:
        def record(self, stream: Stream) -> None:
            said.append(f"{stream.name} records")

        def synchronize(self) -> None:
            said.append("host waits")

    streams = SimpleNamespace(
        Stream=lambda _: Stream("ours"),
        Event=Event,
        current_stream=lambda _: Stream("model's"),
        stream=nullcontext,
    )
    # As vLLM's: not to be written to but in inference mode, which another thread is not in.
    with torch.inference_mode():
        caches = {name: tensor.clone() for name, tensor in packed("LBNHC").items()}
    blocks = DeviceBlocks(LAYOUT, views_of(caches, COUNT), TorchDevice(torch.device("cpu"), streams))
    mark = blocks.mark()
    filling = blocks.begin_in(mark, (), is_aside=False)
    filling.copy_in(0, Scene((), 0).page(5))
    filling.end()
    assert said == ["model's records", "ours waits", "ours records", "ours records", "model's waits"]
    assert float(caches["layer.1"][0].float().mean()) == 5
    said.clear()
    reading = blocks.begin_out(0, mark)
    blocks.hold([reading.fence])
    page = bytearray(LAYOUT.page_bytes)
    reading.copy_into(memoryview(page))
    assert said == ["ours waits", "ours records", "ours records", "model's waits", "host waits"]
    assert value_of(page) == 5
