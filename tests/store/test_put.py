"""Pages put from and read into a caller's memory: copied once, checked on the way, with a compiler and without."""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import pytest
import xxhash

from workmem import app
from workmem.config import Config
from workmem.core.errors import IntegrityError, InvariantError
from workmem.core.events import discard
from workmem.core.layout import KVLayout
from workmem.core.outcomes import MissReason
from workmem.store import copying
from workmem.store.contract import SaveState
from workmem.store.copying import PageCopy, native_copy, use_native_copy
from workmem.store.saving import NewPage, save_pages
from workmem.testing.pages import SLICED, SMALL, Chain, namespace, page_bytes, read_all

pytestmark = pytest.mark.timeout(60)
LAYOUTS = [SMALL, SLICED, KVLayout(dtype="bf16", layers=30, kv_heads=3, head_dim=64)]


@pytest.fixture(params=["native", "numpy"])
def way(request, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(copying._Process, "copy", None)
    if request.param == "native":
        assert use_native_copy(tmp_path_factory.getbasetemp()), "these tests need the C compiler that CI has"
    return request.param


def given(chain: Chain):
    return [(chain.block(index), page_bytes(key, chain.space.layout)) for index, key in enumerate(chain.keys)]


def test_a_machine_without_a_compiler_goes_on_without(monkeypatch, tmp_path):
    monkeypatch.setattr(copying._Process, "copy", None)
    monkeypatch.setattr(copying, "find_compiler", lambda: None)
    assert not use_native_copy(tmp_path)
    monkeypatch.setattr(copying, "find_compiler", lambda: "/nowhere/cc")
    assert not use_native_copy(tmp_path)
    assert native_copy() is None


def test_code_that_makes_wrong_sums_is_not_used(monkeypatch, tmp_path):
    source = tmp_path / "page_copy.c"
    source.write_text(copying._SOURCE.read_text().replace("0x165667919E3779F9ull", "0x165667919E3779FBull"))
    monkeypatch.setattr(copying._Process, "copy", None)
    monkeypatch.setattr(copying, "_SOURCE", source)
    assert not use_native_copy(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["4K", "192K", "360K"])
def test_a_copy_is_exact_and_its_sums_are_those_of_xxhash(way, layout):
    rng = np.random.default_rng(7)
    source = rng.integers(0, 256, layout.page_bytes, dtype=np.uint8)
    backing = np.zeros(layout.page_bytes + 64, dtype=np.uint8)
    for shift in (0, 1, 32):
        target = backing[shift : shift + layout.page_bytes]
        backing[:] = 0
        sums = PageCopy(layout).writing(source)(memoryview(target))
        assert np.array_equal(target, source)
        spans = [layout.slice_span(index) for index in range(layout.slice_count)]
        assert sums == tuple(xxhash.xxh3_64_intdigest(source[start:end]) for start, end in spans)
        assert not backing[:shift].any()
        assert not backing[shift + layout.page_bytes :].any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=["4K", "192K", "360K"])
def test_slices_are_copied_one_at_a_time_or_several_and_nothing_beside_them(way, layout):
    source = np.random.default_rng(8).integers(1, 256, layout.page_bytes, dtype=np.uint8)
    target = np.zeros(layout.page_bytes, dtype=np.uint8)
    copy = PageCopy(layout).between(memoryview(source.tobytes()), target)
    count = layout.slice_count
    for parts in {range(1), range(count - 1, count), range(count // 2, count), range(count)}:
        target[:] = 0
        start, end = layout.slice_span(parts[0])[0], layout.slice_span(parts[-1])[1]
        spans = [layout.slice_span(index) for index in parts]
        assert copy(parts) == tuple(xxhash.xxh3_64_intdigest(source[first:last]) for first, last in spans)
        assert np.array_equal(target[start:end], source[start:end])
        assert not target[:start].any()
        assert not target[end:].any()


class Quiet:
    """Hears of a start and says nothing."""

    def begin(self, step):
        del step

    end = note = begin


class NoFurtherError(Exception):
    """Ends a start."""


@pytest.mark.parametrize("is_host", [True, False], ids=["store serve", "serve"])
def test_whatever_serves_has_the_native_copy_before_its_store(is_host, monkeypatch, tmp_path):
    monkeypatch.setattr(copying._Process, "copy", None)
    there = []

    def open_store(*_):
        there.append(native_copy() is not None)
        raise NoFurtherError

    monkeypatch.setattr(app, "_own_store", open_store)
    socket = str(tmp_path / "store.sock")
    values = {"engine": {"model": str(tmp_path)}, "store": {"host": {"socket": socket, "attach": "never"}}}
    config = msgspec.convert(values, Config)
    served = (
        app.open_host(config.store, cache_dir=tmp_path, sink=discard, progress=Quiet())
        if is_host
        else app.open_app(config, cache_dir=tmp_path, progress=Quiet())
    )
    with pytest.raises(NoFurtherError), served:
        pass
    assert there == [True]


@pytest.mark.parametrize("layout", [SMALL, SLICED], ids=["4K", "192K"])
def test_what_was_put_is_there_on_return_and_reads_back(way, kit, layout):
    store = kit.open(dram="4MiB", ssd=0)
    chain = Chain(namespace(layout=layout), 6)
    store.register(chain.space)
    assert store.put(chain.root, given(chain)) == [SaveState.STORED] * 6
    assert len(chain.tiers(store)) == 6
    assert read_all(store, chain.root, chain.keys) == 6
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    into = np.zeros(layout.page_bytes, dtype=np.uint8)
    for index, key in enumerate(chain.keys):
        PageCopy(layout).read(lease, index, into)
        assert bytes(into) == page_bytes(key, layout)
    lease.release()
    assert store.put(chain.root, given(chain)) == [SaveState.ALREADY_THERE] * 6


def test_what_was_put_survives_a_restart(kit):
    store = kit.open()
    chain = Chain(namespace(layout=SLICED), 4)
    store.register(chain.space)
    store.put(chain.root, given(chain))
    assert store.flush(20)
    store.close()
    again = kit.open()
    again.register(chain.space)
    assert read_all(again, chain.root, chain.keys) == 4


def test_a_byte_changed_in_dram_is_found_by_the_reader_and_taken_out_of_service(way, kit):
    store = kit.open(dram="4MiB", ssd=0)
    chain = Chain(namespace(layout=SLICED), 3)
    store.register(chain.space)
    store.put(chain.root, given(chain))
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    frame = lease.frames[1]
    assert frame is not None
    with store.arena.writable(frame.offset + frame.size - 5000, 1) as byte:
        byte[0] ^= 4
    copy, into = PageCopy(SLICED), bytearray(SLICED.page_bytes)
    copy.read(lease, 0, into)
    with pytest.raises(IntegrityError, match="out of service"):
        copy.read(lease, 1, into)
    lease.release()
    found = store.lookup(chain.root, chain.keys)
    assert (found.blocks, found.reason) == (1, MissReason.CORRUPT)
    assert store.put(chain.root, given(chain)) == [
        SaveState.ALREADY_THERE,
        SaveState.STORED,
        SaveState.ALREADY_THERE,
    ]


def test_a_page_of_another_length_is_refused_with_both_lengths(kit):
    store = kit.open(ssd=0)
    chain = Chain(namespace(), 1)
    store.register(chain.space)
    with pytest.raises(InvariantError, match=r"4096 contiguous bytes, not uint8\[4095\]"):
        store.put(chain.root, [(chain.block(0), bytes(4095))])
    strided = np.zeros(2 * SMALL.page_bytes, dtype=np.uint8)[::2]
    with pytest.raises(InvariantError, match="contiguous"):
        store.put(chain.root, [(chain.block(0), strided)])
    assert chain.tiers(store) == ()
    assert store.gauges()["store_dram_used_bytes"] == 0
    store.close()
    with pytest.raises(InvariantError, match="closed"):
        store.put(chain.root, given(chain))


def test_a_page_read_by_another_layout_is_refused_and_stays_in_service(kit):
    store = kit.open(ssd=0)
    chain = Chain(namespace(), 1)
    store.register(chain.space)
    store.put(chain.root, given(chain))
    lease = store.lease(chain.root, chain.keys, owner="test", ttl_s=60)
    with pytest.raises(InvariantError, match="layout"):
        PageCopy(SLICED).read(lease, 0, np.empty(SLICED.page_bytes, dtype=np.uint8))
    lease.release()
    assert store.lookup(chain.root, chain.keys).blocks == 1


def test_put_into_a_dram_that_is_all_held_is_dropped(kit):
    store = kit.open(dram="64KiB", ssd=0)
    chain, other = Chain(namespace(), 8), Chain(namespace("other"), 3)
    store.register(chain.space)
    store.register(other.space)
    assert store.put(chain.root, given(chain)) == [SaveState.STORED] * 8
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    assert store.put(other.root, given(other)) == [SaveState.DROPPED] * 3
    assert "store.dram.frames" in kit.names()
    lease.release()
    assert store.put(other.root, given(other)) == [SaveState.STORED] * 3


def test_a_block_given_twice_in_one_go_is_stored_once(kit):
    store = kit.open(ssd=0)
    chain = Chain(namespace(), 2)
    store.register(chain.space)
    pages = given(chain)
    states = store.put(chain.root, [pages[0], pages[0], pages[1]])
    assert states == [SaveState.STORED, SaveState.ALREADY_THERE, SaveState.STORED]
    assert read_all(store, chain.root, chain.keys) == 2


def test_pages_saved_together_take_the_lock_a_few_times(kit):
    store = kit.open(dram="32MiB", ssd=0)
    chain = Chain(namespace(), 64)
    store.register(chain.space)
    outbox = store.pool.state.outbox
    taken = 0
    lock = outbox.lock

    class Counting:
        def acquire(self):
            nonlocal taken
            taken += 1
            return lock.acquire()

        def release(self):
            lock.release()

    outbox.lock = Counting()
    store.put(chain.root, given(chain))
    outbox.lock = lock
    assert taken < 20
    assert len(chain.tiers(store)) == 64


def test_a_batch_that_cannot_begin_gives_back_what_it_took(kit, monkeypatch):
    store = kit.open(ssd=0)
    chain = Chain(namespace(), 6)
    store.register(chain.space)
    begin, calls = store.pool.state.reserve, iter(range(10))

    def reserve(size, group):
        if next(calls) == 3:
            raise MemoryError
        return begin(size, group)

    monkeypatch.setattr(store.pool.state, "reserve", reserve)
    with pytest.raises(MemoryError):
        store.put(chain.root, given(chain))
    assert store.gauges()["store_dram_used_bytes"] == 0
    assert store.put(chain.root, given(chain)) == [SaveState.STORED] * 6


@pytest.mark.parametrize("count", [1, 4])
def test_an_interrupt_amid_a_put_leaves_no_frame_behind(kit, count):
    store = kit.open(ssd=0)
    chain = Chain(namespace(), count)
    store.register(chain.space)
    space, last = store.pool.space(chain.root), min(count, 2) - 1

    def page(index: int) -> NewPage:
        def write(payload: memoryview) -> tuple[int, ...]:
            if index == last:
                raise KeyboardInterrupt
            return space.copy.writing(page_bytes(chain.keys[index], SMALL))(payload)

        return NewPage(chain.block(index), write)

    with pytest.raises(KeyboardInterrupt):
        save_pages(store.pool, discard, space, [page(index) for index in range(count)])
    assert store.gauges()["store_dram_used_bytes"] == 0
    assert store.put(chain.root, given(chain)) == [SaveState.STORED] * count


def test_a_page_costs_few_steps_beside_its_copy(kit):
    """Counted in calls of Python functions, which no other load of the machine changes: time per page goes with them."""
    layout = LAYOUTS[0]
    store = kit.open(ssd=0, dram="4MiB")
    copy, into = PageCopy(layout), np.zeros(layout.page_bytes, dtype=np.uint8)
    chains = [Chain(namespace(), 64, seed=seed) for seed in range(12)]
    for chain in chains:
        store.register(chain.space)
        store.put(chain.root, given(chain))
    assert store.gauges()["store_dram_evictions_total"] > 0, "each further page has to make room"
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        del frame
        calls += event == "call"

    def read(chain):
        lease = store.lease(chain.root, chain.keys[:1], owner="t", ttl_s=10)
        copy.read(lease, 0, into)
        lease.release()

    def counted(act):
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            act()
        finally:
            sys.setprofile(None)
        return calls

    new = Chain(namespace(), 64, seed=99)
    pages = given(new)
    assert counted(lambda: store.put(new.root, pages[:1])) <= 70, calls
    assert counted(lambda: store.put(new.root, pages[1:])) <= 63 * 60, calls
    assert counted(lambda: read(new)) <= 34, calls
