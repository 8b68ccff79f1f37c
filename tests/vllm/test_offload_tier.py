"""The store below the host memory of vLLM's tiered offload: its chunks, its jobs, and that each of them ends."""

from __future__ import annotations

import hashlib
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from small import FACTS, open_store

from workmem.core.errors import CapacityError
from workmem.core.layout import Namespace
from workmem.engines.vllm.chain import Chain
from workmem.engines.vllm.chunk_layout import chunk_layout, chunk_rows
from workmem.engines.vllm.config import VllmConfig
from workmem.engines.vllm.offload_jobs import ChunkJob, ChunkJobs, JobEnd
from workmem.engines.vllm.offload_tier import ASK_AGAIN_S, OffloadTier
from workmem.store.store import Store

LAYOUT = chunk_layout(FACTS, blocks=2, copies=1, order="LBHNC")
TOKENS = LAYOUT.block_tokens
ROWS = 16
PADDING = 512
WAIT_S = 10.0


class HandClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def names_of(text: str, count: int) -> list[bytes]:
    """Chunks of a context, as vLLM names them: a hash, and the number of the group."""
    return [hashlib.sha256(f"{text}/{index}".encode()).digest() + bytes(4) for index in range(count)]


def chain_of(names: Sequence[bytes]) -> Chain:
    return Chain({name: (index + 1) * TOKENS for index, name in enumerate(names)})


class Engine:
    """What vLLM does with a tier: rows of memory, and jobs to and from them."""

    def __init__(self, store: Store, **settings: object) -> None:
        self.clock = HandClock()
        self.memory = np.zeros((ROWS, LAYOUT.page_bytes + PADDING), dtype=np.int8)
        self.jobs = ChunkJobs()
        self.tier = OffloadTier(
            store,
            Namespace(model_fingerprint="f", layout=LAYOUT),
            chunk_rows(memoryview(self.memory), LAYOUT),
            self.jobs,
            VllmConfig(**settings),
            self.clock,
        )
        self._numbers = iter(range(10**6))

    def close(self) -> None:
        self.tier.close()

    def fill(self, row: int, name: bytes) -> None:
        content = hashlib.shake_128(name).digest(LAYOUT.page_bytes)
        self.memory[row, : LAYOUT.page_bytes] = np.frombuffer(content, dtype=np.int8)

    def holds(self, row: int, name: bytes) -> bool:
        content = hashlib.shake_128(name).digest(LAYOUT.page_bytes)
        return self.memory[row, : LAYOUT.page_bytes].tobytes() == content

    def job(
        self, names: Sequence[bytes], rows: Sequence[int], *, is_load: bool, request: str = "r"
    ) -> ChunkJob:
        made = ChunkJob(next(self._numbers), request, names, rows, is_load=is_load)
        self.jobs.begin(made)
        return made

    def ended(self, count: int = 1) -> list[JobEnd]:
        found: list[JobEnd] = []
        until = time.monotonic() + WAIT_S
        while len(found) < count and time.monotonic() < until:
            found += self.jobs.take()
            time.sleep(0.001)
        self.tier.heard(found)
        return found

    def store(self, names: Sequence[bytes]) -> JobEnd:
        """Chunks that were computed, one to a row, in no order."""
        for row, name in enumerate(names):
            self.fill(row, name)
        order = list(range(len(names)))[::-1]
        self.tier.store(self.job([names[i] for i in order], order, is_load=False), chain_of(names))
        return self.ended()[0]

    def load(self, names: Sequence[bytes], request: str = "r") -> JobEnd:
        self.memory[:] = 0
        self.tier.load(self.job(names, range(len(names)), is_load=True, request=request))
        return self.ended()[0]

    def hits(self, request: str, names: Sequence[bytes]) -> int:
        chain = chain_of(names)
        return sum(self.tier.has(request, name, chain) for name in names)


@pytest.fixture
def engine(store: Store) -> Iterator[Engine]:
    made = Engine(store)
    yield made
    made.close()


def test_what_one_engine_stored_another_loads(store: Store, engine: Engine):
    names = names_of("a", 6)
    assert engine.hits("r", names) == 0
    assert engine.store(names).is_whole
    other = Engine(store)
    assert other.hits("r", [*names, *names_of("b", 1)]) == 6
    end = other.load(names)
    assert end.done == tuple(names)
    assert all(other.holds(row, name) for row, name in enumerate(names))
    assert not other.memory[:, LAYOUT.page_bytes :].any()
    other.close()


def test_chunks_outlive_the_store_and_come_from_disk(tmp_path: Path):
    names = names_of("a", 5)
    opened = open_store(tmp_path / "ssd")
    first = Engine(opened)
    first.store(names)
    first.close()
    assert opened.flush(WAIT_S)
    opened.close()
    opened = open_store(tmp_path / "ssd")
    second = Engine(opened)
    assert second.hits("r", names) == 5
    assert second.load(names).is_whole
    assert all(second.holds(row, name) for row, name in enumerate(names))
    second.close()
    opened.close()


def test_more_chunks_than_dram_holds_come_piece_by_piece(tmp_path: Path):
    names = names_of("a", 15)
    opened = open_store(tmp_path / "ssd", dram="128KiB")
    first = Engine(opened)
    for at in range(0, 15, 3):
        first.fill(0, names[at])
        first.fill(1, names[at + 1])
        first.fill(2, names[at + 2])
        first.tier.store(first.job(names[at : at + 3], range(3), is_load=False), chain_of(names))
        first.ended()
        assert opened.flush(WAIT_S)
    end = first.load(names)
    assert end.done == tuple(names)
    assert all(first.holds(row, name) for row, name in enumerate(names))
    first.close()
    opened.close()


def test_chunks_come_in_smaller_pieces_while_others_hold_dram(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    names = names_of("a", 7)
    engine.store(names)
    lease, most = engine.tier._store.lease, [2]

    def crowded(root: bytes, keys: Sequence[bytes], **more: object) -> object:
        if len(keys) > most[0]:
            raise CapacityError("dram is held")
        return lease(root, keys, **more)

    monkeypatch.setattr(engine.tier._store, "lease", crowded)
    assert engine.load(names).is_whole
    most[0] = 0
    assert engine.load(names).done == ()


def test_a_chunk_is_never_a_page_of_the_connector():
    for blocks in (1, 2):
        layout = chunk_layout(FACTS, blocks=blocks, copies=1, order="LBHNC")
        assert layout != FACTS.layout(0)
        assert layout.page_bytes == blocks * FACTS.layout(0).page_bytes
    one = Namespace(model_fingerprint="f", layout=chunk_layout(FACTS, blocks=1, copies=1, order="LBHNC"))
    assert one.root() != Namespace(model_fingerprint="f", layout=FACTS.layout(0)).root()


def test_layouts_differ_by_all_that_decides_where_bytes_lie():
    made = {
        (blocks, copies, order): chunk_layout(FACTS, blocks=blocks, copies=copies, order=order)
        for blocks in (1, 2)
        for copies in (1, 2)
        for order in ("LBHNC", "LBHNC/canonical")
    }
    assert len(set(made.values())) == len(made)


def test_a_damaged_chunk_is_not_given_out(store: Store, engine: Engine, monkeypatch: pytest.MonkeyPatch):
    names = names_of("a", 4)
    engine.store(names)
    rows = engine.tier._rows
    copy_in = rows.copy_in

    def damaged(row: int, page: memoryview) -> tuple[int, ...]:
        found = copy_in(row, page)
        return found if row != 2 else (found[0] ^ 1, *found[1:])

    monkeypatch.setattr(rows, "copy_in", damaged)
    assert engine.hits("r", names) == 4
    end = engine.load(names)
    assert end.done == tuple(names[:2])
    assert engine.tier.counts["corrupt"] == 1
    # Neither it, nor what is behind it, is promised again: to this request, and for a while to others.
    assert engine.hits("r", names) == 0
    assert engine.hits("s", names) == 2


def test_a_chunk_that_could_not_be_loaded_is_denied_for_a_while(store: Store):
    engine = Engine(store, deny_s=5.0)
    names, gone = names_of("a", 2), names_of("b", 1)
    engine.store(names)
    assert engine.load([*gone, *names]).done == ()
    engine.tier.store(engine.job(gone, [0], is_load=False), chain_of(gone))
    engine.ended()
    assert engine.hits("s", gone) == 0
    engine.clock.now += 5.0
    assert engine.hits("t", gone) == 1
    engine.close()


def test_a_request_is_brought_each_chunk_once(engine: Engine):
    """Else one whose chunks push each other out of host memory asks for ever."""
    names = names_of("a", 3)
    engine.store(names)
    assert engine.hits("r", names) == 3
    engine.load(names)
    assert engine.hits("r", names) == 0
    assert engine.hits("s", names) == 3
    engine.tier.forget("r")
    assert engine.hits("r", names) == 3


def test_a_request_is_not_promised_more_than_host_memory_holds(engine: Engine):
    names = names_of("a", ROWS)
    engine.store(names)
    assert engine.hits("r", names) == 12
    assert engine.hits("r", names) == 12


def test_chunks_that_come_while_a_request_waits_are_seen_after_a_while(engine: Engine):
    names = names_of("a", 3)
    assert engine.hits("r", names) == 0
    engine.store(names)
    assert engine.hits("r", names) == 0
    engine.clock.now += ASK_AGAIN_S
    assert engine.hits("r", names) == 3


def test_all_chunks_of_a_request_are_asked_for_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    names = names_of("a", 8)
    engine.store(names)
    asked: list[int] = []
    lookup = engine.tier._store.lookup

    def spy(root: bytes, keys: Sequence[bytes]) -> object:
        asked.append(len(keys))
        return lookup(root, keys)

    monkeypatch.setattr(engine.tier._store, "lookup", spy)
    assert engine.hits("r", names) == 8
    assert asked == [8]


def test_chunks_are_stored_with_their_place(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    names = names_of("a", 4)
    saved: list[tuple[bytes, bytes, int]] = []
    save = engine.tier._store.save

    def spy(root: bytes, pages: Sequence[object]) -> None:
        saved.extend((page.block.key, page.block.parent, page.block.depth) for page in pages)
        save(root, pages)

    monkeypatch.setattr(engine.tier._store, "save", spy)
    engine.store(names)
    keys = [name[:-4] for name in names]
    assert saved == [(key, ([engine.tier._root, *keys])[i], i) for i, key in enumerate(keys)]


def test_a_new_epoch_hits_nothing_of_before(engine: Engine):
    names = names_of("a", 3)
    engine.store(names)
    assert engine.hits("r", names) == 3
    engine.tier.start_epoch(1)
    assert engine.hits("r", names) == 0
    assert engine.store(names).is_whole
    assert engine.hits("s", names) == 3


def test_a_store_that_is_closed_takes_and_gives_nothing(tmp_path: Path):
    names = names_of("a", 2)
    opened = open_store(tmp_path / "ssd")
    engine = Engine(opened)
    engine.store(names)
    opened.close()
    assert engine.hits("r", names) == 0
    end = engine.store(names_of("b", 2))
    assert end.done == ()
    engine.close()


def test_a_bug_while_chunks_are_loaded_ends_the_job(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    names = names_of("a", 2)
    engine.store(names)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine.tier._store, "lease", broken)
    assert engine.load(names).done == ()
    monkeypatch.undo()
    assert engine.load(names, request="s").is_whole


def test_jobs_that_are_given_up_end_once_and_touch_no_row_after(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    names = names_of("a", 3)
    engine.store(names)
    at_first, go_on = threading.Event(), threading.Event()
    rows = engine.tier._rows
    copy_in = rows.copy_in

    def slow(row: int, page: memoryview) -> tuple[int, ...]:
        at_first.set()
        assert go_on.wait(WAIT_S)
        return copy_in(row, page)

    monkeypatch.setattr(rows, "copy_in", slow)
    engine.memory[:] = 0
    engine.tier.load(engine.job(names, range(3), is_load=True))
    assert at_first.wait(WAIT_S)
    giving_up = threading.Thread(target=engine.jobs.give_up)
    giving_up.start()
    giving_up.join(0.05)
    # A row is in the middle of being written: nobody is told that it is free.
    assert giving_up.is_alive()
    assert engine.jobs.take() == []
    go_on.set()
    giving_up.join(WAIT_S)
    (end,) = engine.jobs.take()
    assert end.done in {(), tuple(names[:1])}
    assert engine.holds(0, names[0])
    engine.close()
    assert not engine.memory[1:].any()
    assert engine.jobs.take() == []


def test_a_store_that_is_given_up_leaves_nothing_that_can_be_seen(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    names = names_of("a", 2)
    save = engine.tier._store.save
    late: list[tuple[bytes, Sequence[object]]] = []
    monkeypatch.setattr(engine.tier._store, "save", lambda root, pages: late.append((root, pages)))
    engine.tier.store(engine.job(names, range(2), is_load=False), chain_of(names))
    engine.jobs.give_up()
    assert engine.ended()[0].done == ()
    for root, pages in late:
        save(root, pages)
    monkeypatch.undo()
    assert engine.tier._store.flush(WAIT_S)
    assert engine.hits("r", names) == 0
    assert engine.jobs.take() == []


def test_an_end_gives_vllms_memory_back(store: Store):
    mapped = mmap.mmap(-1, ROWS * LAYOUT.page_bytes)
    rows = np.frombuffer(mapped, dtype=np.int8).reshape(ROWS, -1)
    view = memoryview(rows)
    space = Namespace(model_fingerprint="f", layout=LAYOUT)
    tier = OffloadTier(store, space, chunk_rows(view, LAYOUT), ChunkJobs(), VllmConfig())
    view.release()
    tier.close()
    del rows
    # Raises BufferError while anybody has it.
    mapped.close()


def test_a_chain_knows_each_group_apart():
    ends = {b"a" + bytes([0, 0, 0, g]): 8 for g in range(2)} | {
        b"b" + bytes([0, 0, 0, g]): 16 for g in range(2)
    }
    chain = Chain(ends)
    first, second = b"a" + bytes([0, 0, 0, 1]), b"b" + bytes([0, 0, 0, 1])
    assert chain.before(second) == first
    assert chain.before(first) is None
    assert chain.onward(first) == [first, second]
    third = b"c" + bytes([0, 0, 0, 1])
    assert chain.onward(third) == [third]
    assert chain.before(third) is None
    ends[third] = 24
    assert chain.before(third) == second
    assert chain.place(third) == 2
