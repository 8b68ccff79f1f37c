# pyright: reportMissingImports=false
"""Blocks in a device's memory as `EngineBlocks`: everything is told to the device in queues, and ordered by events.

A page on its way out is gathered into one piece on the device, which is when its block is free again, and copied from
there to pinned memory; checksums are taken on the way from that to the arena. In goes the other way round. Each way has
a queue and a bounded ring of such places of its own. Nothing ever waits for the whole device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from workmem.core.errors import InvariantError
from workmem.engines.vllm.kv_blocks import KVBlocks
from workmem.plugins.vllm_views import Views, layer_bytes

if TYPE_CHECKING:
    from workmem.core.layout import KVLayout
    from workmem.engines.vllm.moving import Fence, Mark

RING_BYTES = 32 * 2**20
"""Of each ring, once on the device and once pinned."""
_SLOTS_MIN, _SLOTS_MAX = 2, 32


class Event(Protocol):
    """A point in a queue."""

    def synchronize(self) -> None:
        """Wait until the device is past it; the calling thread alone does."""
        ...


class Queue(Protocol):
    """What a device does one after the other."""

    def run(self, work: Callable[[], object]) -> None:
        """Tell it the copies that `work` makes."""
        ...

    def wait_for(self, event: Event) -> None:
        """Go on only behind a point of another queue."""
        ...

    def record(self) -> Event:
        """Behind all that it has been told."""
        ...


class Device(Protocol):
    """Queues of a device. A test has one that runs them late and in any order that their waits leave open."""

    def engine_queue(self) -> Queue:
        """That of the model, when asked on the engine's thread."""
        ...

    def new_queue(self) -> Queue:
        """One of its own."""
        ...


class TorchDevice:
    """Streams of torch, on whatever kind of device: CUDA, ROCm, XPU."""

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self._device = device
        self._streams = streams or torch.get_device_module(device)

    def engine_queue(self) -> Queue:
        """See `Device`."""
        return _Stream(self._streams, self._streams.current_stream(self._device))

    def new_queue(self) -> Queue:
        """See `Device`."""
        return _Stream(self._streams, self._streams.Stream(self._device))


class _Stream:
    def __init__(self, streams: Any, stream: Any) -> None:
        self._streams = streams
        self._stream = stream

    def run(self, work: Callable[[], object]) -> None:
        # vLLM makes its tensors in inference mode, which is a thread's; others may not be written to outside it.
        with torch.inference_mode(), self._streams.stream(self._stream):
            work()

    def wait_for(self, event: Any) -> None:
        self._stream.wait_event(event)

    def record(self) -> Any:
        event = self._streams.Event()
        event.record(self._stream)
        return event


class _Slots:
    """Places for pages between the device and the arena: `near` on the device, `far` pinned."""

    def __init__(self, layout: KVLayout, views: Views, count: int) -> None:
        like = views[0]
        self.near = torch.empty((count, layout.page_bytes), dtype=torch.uint8, device=like.device)
        self.far = torch.empty(
            (count, layout.page_bytes), dtype=torch.uint8, pin_memory=like.device.type != "cpu"
        )
        ends = [layer_bytes(view) for view in views]
        self._parts = [
            [part.view(view.shape[1:]) for part, view in zip(near.split(ends), views, strict=True)]
            for near in self.near
        ]
        self._views = views
        rows = self.far.numpy().reshape(count, layout.layers, layout.layer_bytes)
        self.checked = KVBlocks(layout, [[rows[:, layer]] for layer in range(layout.layers)])

    def gather(self, block: int, slot: int) -> None:
        """Block to device's slot."""
        for part, view in zip(self._parts[slot], self._views, strict=True):
            part.copy_(view[block], non_blocking=True)

    def scatter(self, slot: int, block: int) -> None:
        """Device's slot to block."""
        for part, view in zip(self._parts[slot], self._views, strict=True):
            view[block].copy_(part, non_blocking=True)

    def clear(self, block: int) -> None:
        """Zero a block."""
        for view in self._views:
            view[block].zero_()

    def to_far(self, slot: int) -> None:
        """From the device."""
        self.far[slot].copy_(self.near[slot], non_blocking=True)

    def to_near(self, slot: int) -> None:
        """To the device."""
        self.near[slot].copy_(self.far[slot], non_blocking=True)


class DeviceBlocks:
    """See `EngineBlocks`. `views`: see `views_of`."""

    def __init__(self, layout: KVLayout, views: Views, device: Device | None = None) -> None:
        total = sum(layer_bytes(view) for view in views)
        if total != layout.page_bytes:
            raise InvariantError(
                f"a block has {total} bytes, where the layout has {layout.page_bytes}: it is padded, or of another shape"
            )
        self._layout = layout
        self._device = device or TorchDevice(views[0].device)
        count = max(_SLOTS_MIN, min(_SLOTS_MAX, RING_BYTES // layout.page_bytes))
        self._out = _Out(self._device.new_queue(), _Slots(layout, views, count))
        self._in_step = _In(self._device.new_queue(), _Slots(layout, views, count))
        self._aside = _In(self._device.new_queue(), _Slots(layout, views, count))

    @property
    def layout(self) -> KVLayout:
        """Of a page."""
        return self._layout

    def mark(self) -> Mark:
        """See `EngineBlocks`."""
        return self._device.engine_queue().record()

    def begin_out(self, block: int, after: Mark) -> _Reading:
        """See `EngineBlocks`. The device is told at once while there is room: the engine need not wait for it then."""
        reading = _Reading(self._out, block, after)
        slot = self._out.take()
        if slot is not None:
            reading.tell(slot)
        return reading

    def begin_in(self, after: Mark, fences: Iterable[Fence], *, is_aside: bool) -> _Filling:
        """See `EngineBlocks`."""
        way = self._aside if is_aside else self._in_step
        for event in (after, *fences):
            way.queue.wait_for(event)
        return _Filling(way, None if is_aside else self._device.engine_queue())

    def hold(self, fences: Iterable[Fence]) -> None:
        """See `EngineBlocks`."""
        events = list(fences)
        if events:
            queue = self._device.engine_queue()
            for event in events:
                queue.wait_for(event)


class _Out:
    """The way out. One slot is kept for copies that found none, so that these never wait for copies behind them."""

    def __init__(self, queue: Queue, slots: _Slots) -> None:
        self.queue = queue
        self.slots = slots
        self.lock = threading.Lock()
        """Of the queue: the engine's thread and the store's tell it things."""
        self.last = threading.Lock()
        """Held by whoever has the slot that is kept."""
        self._free = deque(range(1, len(slots.far)))

    def take(self) -> int | None:
        """A slot, if one is free."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def give(self, slot: int) -> None:
        """It is free. What the device still does with it comes before what it is told next."""
        if slot:
            self._free.append(slot)
        else:
            self.last.release()


class _Reading:
    """See `Reading`."""

    def __init__(self, out: _Out, block: int, after: Mark) -> None:
        self._out = out
        self._block = block
        self._after = after
        self._slot: int | None = None
        self._copied: Event | None = None
        self.fence: Fence | None = None

    def tell(self, slot: int) -> None:
        """Tell the device to read the block."""
        out, self._slot = self._out, slot
        with out.lock:
            out.queue.wait_for(self._after)
            out.queue.run(lambda: out.slots.gather(self._block, slot))
            self.fence = out.queue.record()
            out.queue.run(lambda: out.slots.to_far(slot))
            self._copied = out.queue.record()

    def issue(self) -> None:
        """See `Reading`."""
        if self._copied is None:
            self._out.last.acquire()
            self.tell(0)

    def copy_into(self, into: memoryview) -> tuple[int, ...]:
        """See `Reading`."""
        assert self._copied is not None
        assert self._slot is not None
        try:
            self._copied.synchronize()
            return self._out.slots.checked.copy_out(self._slot, into)
        finally:
            self.end()

    def end(self) -> None:
        """See `Reading`."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._out.give(slot)


class _In:
    """One way in."""

    def __init__(self, queue: Queue, slots: _Slots) -> None:
        self.queue = queue
        self.slots = slots
        self.next = 0
        self.events: list[Event | None] = [None] * len(slots.far)
        """When the device has taken what lies in a slot."""


class _Filling:
    """See `Filling`. `engine`: the queue that waits at the end; None: the caller does."""

    def __init__(self, way: _In, engine: Queue | None) -> None:
        self._way = way
        self._engine = engine

    def copy_in(self, block: int, source: memoryview) -> tuple[int, ...]:
        """See `Filling`."""
        way = self._way
        slot, way.next = way.next, (way.next + 1) % len(way.events)
        event = way.events[slot]
        if event is not None:
            event.synchronize()
        sums = way.slots.checked.copy_in(slot, source)
        way.queue.run(lambda: way.slots.to_near(slot))
        way.events[slot] = way.queue.record()
        way.queue.run(lambda: way.slots.scatter(slot, block))
        return sums

    def clear(self, block: int) -> None:
        """See `Filling`: behind what was wrong, and before whoever waits for the end."""
        self._way.queue.run(lambda: self._way.slots.clear(block))

    def end(self) -> None:
        """See `Filling`."""
        event = self._way.queue.record()
        if self._engine is None:
            event.synchronize()
        else:
            self._engine.wait_for(event)
