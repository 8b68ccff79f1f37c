"""Loads hide behind compute and saves behind everything: shown by order and counts, not by clocks."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from workmem.core.errors import EngineError, InvariantError
from workmem.core.keys import BlockKey, block_keys
from workmem.core.layout import KVLayout, Namespace
from workmem.core.outcomes import Lookup, MissReason
from workmem.engines.embedded.loading import LoadGate, PageLoader
from workmem.store import copying, saver
from workmem.store.catalog import Promotion
from workmem.store.contract import Lease, PageWrite, SaveState
from workmem.store.copying import CopySlices, use_native_copy
from workmem.testing.pages import SLICED
from workmem.testing.tiny_models import build_model

from .conftest import Bench

if TYPE_CHECKING:
    from workmem.engines.embedded.kv_pages import KVPages

Make = Callable[..., Bench]
TOKENS = [random.Random(1).randrange(256) for _ in range(100)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose pages have four slices of two layers."""
    return build_model(
        tmp_path_factory.mktemp("wide") / "wide",
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
    )


def test_layer_i_is_computed_while_layer_i_plus_1_arrives(
    wide: Path, bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader holds back each slice until the layers of the one before have been attended to.

    If attention waited for whole pages this would never end; if it did not wait at all, tokens would differ.
    """
    world = bench(folder=wide, vram_bytes="32MiB")
    layout = world.engine._loaded.layout
    assert layout.slice_count == 4
    attended = threading.Semaphore(0)

    async def run() -> None:
        expected = await world.ask(TOKENS)
        await world.idle()
        await world.engine.drop_vram()
        inner = world.engine.thread.pages.copier_in
        seen: set[range] = set()

        def copier_in(block: int, source: memoryview) -> CopySlices:
            inner_copy = inner(block, source)

            def copy(parts: range) -> tuple[int, ...]:
                if parts not in seen:
                    seen.add(parts)
                    if len(seen) > 1:
                        assert attended.acquire(timeout=30), "attention waits for more than its own layer"
                return inner_copy(parts)

            return copy

        monkeypatch.setattr(world.engine.thread.pages, "copier_in", copier_in)
        inner_write = world.engine.thread.pages.write

        def write(layer: int, *rest: object) -> None:
            inner_write(layer, *rest)
            if (layer + 1) % layout.layers_per_slice == 0:
                attended.release()

        monkeypatch.setattr(world.engine.thread.pages, "write", write)
        got = await world.ask(TOKENS)
        assert got.tokens == expected.tokens
        assert got.sources()["dram"] == 96
        gauges = world.engine.gauges()
        assert gauges["load_slices_total"] == 4
        assert gauges["load_slices_overlapped_total"] == 3

    asyncio.run(run())


class StuckLease:
    """A lease whose pages are for ever on their way, until told otherwise."""

    def __init__(self, keys: tuple[BlockKey, ...], layout: KVLayout) -> None:
        self.keys = keys
        self.layout = layout
        self.ready = 0
        self.failed: MissReason | None = None
        self._callbacks: list[Callable[[], None]] = []
        self.released = 0

    def on_settled(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def on_ready(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def fail(self) -> None:
        self.failed = MissReason.UNAVAILABLE
        for callback in self._callbacks:
            callback()

    def release(self) -> None:
        self.released += 1


class SlowStore:
    """A store that takes everything and finishes nothing by itself: a fault, not a substitute."""

    def __init__(self) -> None:
        self.queued: list[PageWrite] = []
        self.leases: list[StuckLease] = []
        self.promise = 0

    def register(self, namespace: Namespace) -> bytes:
        self.layout = namespace.layout
        return namespace.root()

    def lookup(self, root: bytes, keys: Sequence[BlockKey]) -> Lookup:
        count = min(self.promise, len(keys))
        return Lookup(("ssd",) * count, None if count == len(keys) else MissReason.COLD)  # pyright: ignore[reportArgumentType]

    def lease(self, root: bytes, keys: Sequence[BlockKey], *, owner: str, ttl_s: float) -> Lease:
        self.promise = 0
        lease = StuckLease(tuple(keys), self.layout)
        self.leases.append(lease)
        return lease  # pyright: ignore[reportReturnType]

    def save(self, root: bytes, pages: Sequence[PageWrite]) -> None:
        self.queued += pages

    def dram_capacity_bytes(self) -> int:
        return 1 << 30

    def flush(self, timeout_s: float) -> bool:
        return True

    def gauges(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


def test_saving_never_delays_a_token(bench: Make) -> None:
    """With a store that never finishes a save all tokens still come; the blocks stay held until it has."""
    store = SlowStore()
    world = bench(store=store)

    async def run() -> None:
        answer = await world.ask(TOKENS, 40)
        assert len(answer.tokens) == 40
        assert len(store.queued) == (100 + 39) // 16
        pool = world.engine.thread.pool
        for _ in range(200):  # the last delta leaves a moment before the sequence does
            if pool.block_count - pool.idle_count == len(store.queued):
                break
            await asyncio.sleep(0.01)
        assert pool.block_count - pool.idle_count == len(store.queued)
        for page in store.queued:
            page.copy_into(memoryview(bytearray(world.engine._loaded.layout.page_bytes)))
            page.done(SaveState.STORED)
        await world.idle()

    asyncio.run(run())


def test_a_request_that_waits_for_its_pages_lets_others_compute(bench: Make) -> None:
    store = SlowStore()
    world = bench(store=store)

    async def run() -> None:
        store.promise = 3
        waiting = asyncio.create_task(world.ask(TOKENS, 4))
        while not store.leases:  # noqa: ASYNC110 - the engine runs on its own thread
            await asyncio.sleep(0.001)
        others = [await world.ask([seed] * 40, 4) for seed in range(3)]
        assert all(other.reason == "length" for other in others)
        assert not waiting.done()
        store.leases[0].fail()
        answer = await waiting
        assert answer.cached == 0
        assert answer.usage.sources[0].reason is MissReason.UNAVAILABLE
        assert store.leases[0].released == 1

    asyncio.run(run())


def test_a_rebuilt_ledger_takes_its_pending_saves_with_it(bench: Make) -> None:
    """After a bug blocks are given out anew; a save still queued must not store their new bytes under the old key."""
    store = SlowStore()
    world = bench(store=store)

    async def run() -> None:
        await world.ask(TOKENS, 4)
        waiting = list(store.queued)
        assert waiting

        def broken(*_: object) -> bool:
            raise InvariantError("ledger is off by one")

        world.engine.thread.pool.name = broken
        with pytest.raises(EngineError, match="switched off"):
            await world.ask([9] * 40, 4)
        for page in waiting:
            with pytest.raises(InvariantError, match="rebuilt"):
                page.copy_into(memoryview(bytearray(world.engine._loaded.layout.page_bytes)))
            page.done(SaveState.DROPPED)
        assert len((await world.ask(TOKENS, 4)).tokens) == 4
        await world.idle()

    asyncio.run(run())


def test_a_client_that_leaves_while_its_pages_come_gives_the_lease_back(bench: Make) -> None:
    """The lease has no deadline: nobody else would ever free what it holds."""
    store = SlowStore()
    world = bench(store=store)

    async def run() -> None:
        store.promise = 3
        waiting = asyncio.create_task(world.ask(TOKENS, 4))
        while not store.leases:  # noqa: ASYNC110 - the engine runs on its own thread
            await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await world.idle()
        for _ in range(200):
            if store.leases[0].released:
                break
            await asyncio.sleep(0.01)
        assert store.leases[0].released == 1

    asyncio.run(run())


@pytest.fixture
def on_ssd(wide: Path, bench: Make, tmp_path: Path) -> Callable[[], Bench]:
    """Bring `LONG` to ssd, restart, and give a world in which nothing but ssd has it."""

    def restarted() -> Bench:
        async def first() -> None:
            world = bench(folder=wide, ssd=tmp_path / "ssd", dtype="fp32", vram_bytes="32MiB")
            await world.ask(LONG)
            await world.idle()
            await world.engine.close()
            assert world.store is not None
            world.store.close()

        asyncio.run(first())
        return bench(folder=wide, ssd=tmp_path / "ssd", dtype="fp32", vram_bytes="32MiB")

    return restarted


LONG = [random.Random(2).randrange(256) for _ in range(10 * 16 + 4)]
"""10 pages of half a MiB: several reads of a disk."""


def hold_last_read(world: Bench, monkeypatch: pytest.MonkeyPatch, act: Callable[[], OSError | None]) -> None:
    """Call `act` before the read that brings the last page of `LONG`; it fails with what `act` returns."""
    assert world.store is not None
    reader = world.store._below.reader
    assert reader is not None
    inner = reader._fill

    def fill(run: list[Promotion], pages: list[memoryview]) -> OSError | None:
        depth = world.store.pool.state.catalog.depth[run[-1].row]  # pyright: ignore[reportOptionalMemberAccess]
        error = act() if depth == len(LONG) // 16 - 1 else None
        return error or inner(run, pages)

    monkeypatch.setattr(reader, "_fill", fill)


def until(condition: Callable[[], bool]) -> bool:
    """Wait on a thread that is not the event loop's; False if it does not come true."""
    for _ in range(5000):
        if condition():
            return True
        time.sleep(0.002)
    return False


def test_pages_reach_vram_while_the_disk_still_reads(
    on_ssd: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last read waits until pages of earlier ones are in vram: it would for ever if the copy began behind it."""
    world = on_ssd()
    seen: list[bool] = []

    def wait_for_copies() -> None:
        seen.append(until(lambda: world.engine.gauges()["load_pages_early_total"] > 0))

    hold_last_read(world, monkeypatch, wait_for_copies)

    async def run() -> None:
        got = await world.ask(LONG)
        assert seen == [True]
        assert got.sources() == {"ssd": 160, "computed": 4}
        await world.idle()
        assert world.engine.gauges()["load_pages_total"] == 10
        again = await world.ask(LONG, reuse=False)
        assert again.tokens == got.tokens

    asyncio.run(run())


def test_a_page_that_the_disk_does_not_deliver_is_computed_and_those_before_it_are_used(
    on_ssd: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = on_ssd()

    def fail() -> OSError:
        until(lambda: world.engine.gauges()["load_pages_early_total"] > 0)
        return OSError(errno.EIO, "a bad sector")

    hold_last_read(world, monkeypatch, fail)

    async def run() -> None:
        got = await world.ask(LONG)
        used = got.sources()["ssd"]
        assert 0 < used < 160
        assert got.usage.sources[1].reason is MissReason.UNAVAILABLE
        gauges = world.engine.gauges()
        assert gauges["computed_tokens_total"] == len(LONG) - used + len(got.tokens) - 1, (
            "no step was in vain"
        )
        await world.idle()
        again = await world.ask(LONG, reuse=False)
        assert again.tokens == got.tokens

    asyncio.run(run())


def test_a_page_found_corrupt_while_others_are_still_read_is_computed(
    on_ssd: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy in vram is what counts: the page is spoiled behind the store's own check."""
    world = on_ssd()
    inner = world.engine.thread.pages.copier_in
    count = 0

    def spoil(block: int, source: memoryview) -> CopySlices:
        nonlocal count
        count += 1
        return inner(block, spoiled(source, 3) if count == 2 else source)

    monkeypatch.setattr(world.engine.thread.pages, "copier_in", spoil)
    hold_last_read(world, monkeypatch, lambda: until(lambda: count >= 2) and None)

    async def run() -> None:
        got = await world.ask(LONG)
        assert got.sources() == {"ssd": 16, "computed": 148}
        assert got.usage.sources[1].reason is MissReason.CORRUPT
        assert world.engine.gauges()["load_pages_corrupt_total"] == 1
        await world.idle()
        again = await world.ask(LONG, reuse=False)
        assert again.tokens == got.tokens

    asyncio.run(run())


def spoiled(page: memoryview, at: int) -> memoryview:
    """A page with one bit of byte `at` changed."""
    other = bytearray(page)
    other[at] ^= 1
    return memoryview(other).toreadonly()


@pytest.fixture(params=["native", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, engine_cache: Path) -> str:
    """How an engine that is opened from now on copies pages."""
    monkeypatch.setattr(copying._Process, "copy", None)
    if request.param == "native":
        assert use_native_copy(engine_cache), "this test needs the C compiler that CI has"
    return request.param


@pytest.mark.parametrize("slice_index", [0, 3])
def test_a_corrupt_slice_in_dram_is_found_however_pages_are_copied(
    way: str, wide: Path, bench: Make, slice_index: int
) -> None:
    """The bit is changed where the page lies; whatever copies it must say what the copy holds."""
    world = bench(folder=wide, dtype="fp32", vram_bytes="32MiB")

    async def run() -> None:
        expected = await world.ask(TOKENS)
        await world.idle()
        await world.engine.drop_vram()
        assert world.store is not None
        layout = world.engine._loaded.layout
        keys = block_keys(world.engine._root(""), TOKENS, 16)
        lease = world.store.lease(world.engine._root(""), keys, owner="saboteur", ttl_s=60)
        start, end = layout.slice_span(slice_index)
        at = lease.page_address(4) + (start + end) // 2
        lease.release()
        ctypes.c_uint8.from_address(at).value ^= 1
        got = await world.ask(TOKENS)
        assert got.tokens == expected.tokens
        assert got.sources() == {"dram": 64, "computed": 36}
        assert got.usage.sources[1].reason is MissReason.CORRUPT
        assert world.engine.gauges()["load_pages_corrupt_total"] == 1
        await world.idle()

    asyncio.run(run())


def test_a_page_is_saved_with_the_sums_that_its_copy_took(
    way: str, bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store reads no page of this engine once more."""
    world = bench()
    monkeypatch.setattr(saver, "xxhash", None)

    async def run() -> None:
        await world.ask(TOKENS)
        await world.idle()
        await world.engine.drop_vram()
        assert (await world.ask(TOKENS)).sources()["dram"] == 96

    asyncio.run(run())


def test_an_urgent_request_takes_the_place_of_one_whose_pages_still_come(bench: Make) -> None:
    """Its load is broken off, not waited for: the disk may take long."""
    store = SlowStore()
    world = bench(store=store, vram_bytes="64KiB", batch_tokens=32)

    async def run() -> None:
        blocks = world.engine.thread.pool.block_count
        size = (blocks - 1) * 16
        store.promise = 3
        waiting = asyncio.create_task(world.ask([1] * (size - 16), 16, priority=5))
        while not store.leases:  # noqa: ASYNC110 - the engine runs on its own thread
            await asyncio.sleep(0.001)
        urgent = asyncio.create_task(world.ask([2] * (size - 16), 16, priority=0))
        for _ in range(3000):
            if store.leases[0].released:
                break
            await asyncio.sleep(0.002)
        assert store.leases[0].released == 1
        # What has been computed is let go of by a store that never finishes a save only when told to.
        while not (urgent.done() and waiting.done()):
            while store.queued:
                store.queued.pop().done(SaveState.DROPPED)
            await asyncio.sleep(0.002)
        assert (await urgent).reason == (await waiting).reason == "length"
        assert (await waiting).cached == 0

    asyncio.run(run())


class TwoPages:
    """A lease of two pages in dram, and vram blocks of which the second takes its first slice wrong."""

    layout = SLICED
    keys = (b"", b"")
    ready, failed = 2, None

    def __init__(self) -> None:
        self.cleared: list[int] = []
        self.abandon: Callable[[], None] = lambda: None

    def copier_in(self, block: int, source: memoryview) -> CopySlices:
        del source

        def copy(parts: range) -> tuple[int, ...]:
            if block == 0 and parts.start == 1:
                self.abandon()
            return tuple(1 if block else 0 for _ in parts)

        return copy

    def page(self, index: int) -> memoryview:
        return memoryview(bytes(index))

    def checksums(self, index: int) -> tuple[int, ...]:
        del index
        return (0, 0, 0)

    def quarantine(self, index: int) -> None:
        assert index == 1

    def clear(self, block: int) -> None:
        self.cleared.append(block)


def test_a_load_that_is_broken_off_leaves_no_page_in_a_block_that_failed_its_check() -> None:
    """Its bytes may read as NaN, and the next owner of the block would spread them."""
    two = TwoPages()
    loader = PageLoader(cast("KVPages", two), lambda: None)
    gates: list[LoadGate] = []
    is_known = threading.Event()

    def abandon() -> None:
        assert is_known.wait(30)
        gates[0].is_abandoned = True

    two.abandon = abandon
    gates.append(loader.load(cast("Lease", two), 0, [0, 1]))
    is_known.set()
    gates[0].wait()
    loader.close()
    assert gates[0].failed_at is not None
    assert two.cleared == [1]
