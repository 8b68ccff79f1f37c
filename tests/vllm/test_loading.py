"""A load from below dram: in windows, each copied while the next ones are read, all of them given back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from small import FACTS, LAYERS, SIZE, open_store

from workmem.core.errors import CapacityError
from workmem.core.keys import BlockKey, block_keys
from workmem.core.layout import Namespace
from workmem.core.outcomes import MissReason
from workmem.engines.vllm import loading
from workmem.engines.vllm.kv_blocks import KVBlocks
from workmem.engines.vllm.loading import Loading
from workmem.engines.vllm.steps import NO_ROOM, LoadOp
from workmem.store.contract import BlockId
from workmem.store.store import Store

LAYOUT = FACTS.layout(0)
NAMESPACE = Namespace(model_fingerprint="m", layout=LAYOUT)
WINDOW = 4
"""Pages of a window in these tests."""


@pytest.fixture(autouse=True)
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "WINDOW_BYTES", WINDOW * LAYOUT.page_bytes)


def op_of(keys: Sequence[BlockKey], *, is_async: bool = True) -> LoadOp:
    return LoadOp(
        request="r", blocks=tuple(range(len(keys))), is_async=is_async, namespace=NAMESPACE, keys=tuple(keys)
    )


def save(store: Store, pages: int) -> tuple[bytes, list[BlockKey], np.ndarray]:
    root = store.register(NAMESPACE)
    tokens = list(range(pages * SIZE))
    keys = block_keys(root, tokens, SIZE)
    content = np.random.default_rng(1).integers(0, 256, (pages, LAYOUT.page_bytes), dtype=np.uint8)
    for depth, key in enumerate(keys):
        own = tuple(tokens[depth * SIZE : (depth + 1) * SIZE])
        block = BlockId(BlockKey(key), keys[depth - 1] if depth else root, own, depth)
        store.put(root, [(block, content[depth])])
    assert store.flush(10)
    return root, [BlockKey(key) for key in keys], content


def test_a_context_longer_than_dram_comes_whole_from_ssd(tmp_path: Path):
    pages = 600
    with open_store(tmp_path / "ssd") as store:
        root, keys, content = save(store, pages)
    with open_store(tmp_path / "ssd") as store:
        assert store.register(NAMESPACE) == root
        with pytest.raises(CapacityError):
            store.lease(root, keys, owner="all", ttl_s=5).release()
        tensors = [np.zeros((pages, FACTS.layer_bytes), dtype=np.uint8) for _ in range(LAYERS)]
        blocks = KVBlocks(LAYOUT, [[tensor] for tensor in tensors])
        found = Loading(store, blocks, Counter()).load(op_of(keys), root, blocks.mark(), [], 30.0)
        assert found == (pages, "")
        wanted = content.reshape(pages, LAYERS, FACTS.layer_bytes)
        for layer, tensor in enumerate(tensors):
            assert np.array_equal(tensor, wanted[:, layer])
        store.audit()
        # Nothing is held any more: other contexts find room.
        store.lease(root, keys[: pages // 6], owner="next", ttl_s=5).release()


class ScriptedLease:
    """Settles when told; its pages say their own number."""

    def __init__(self, keys: tuple[BlockKey, ...]) -> None:
        self.keys, self.ready, self.failed = keys, 0, None
        self.released = 0
        self._tell: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def settle(self, ready: int, failed: MissReason | None = None) -> None:
        with self._lock:
            self.ready, self.failed = ready, failed
            tell = self._tell
        if tell is not None:
            tell()

    def on_settled(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._tell = callback
            if self.ready < len(self.keys) and self.failed is None:
                return
        callback()

    def checksums(self, index: int) -> tuple[int, ...]:
        return (int.from_bytes(self.keys[index], "big"),)

    @contextmanager
    def page(self, index: int):
        yield memoryview(self.keys[index])

    def quarantine(self, index: int) -> None:
        self.quarantined = self.keys[index]

    def release(self) -> None:
        self.released += 1


class ScriptedStore:
    def __init__(self, *, holds: int = 100) -> None:
        self.leases: list[ScriptedLease] = []
        self._holds = holds

    def lease(self, root: bytes, keys: Sequence[BlockKey], *, owner: str, ttl_s: float) -> ScriptedLease:
        if sum(not lease.released for lease in self.leases) >= self._holds:
            raise CapacityError("all is held")
        self.leases.append(ScriptedLease(tuple(keys)))
        return self.leases[-1]


class ScriptedBlocks:
    """Blocks, and in-way of them, that note what they are given."""

    layout = LAYOUT

    def __init__(self, on_copy: Callable[[int], None] = lambda block: None) -> None:
        self.copied: list[int] = []
        self.cleared: list[int] = []
        self.ended = 0
        self._on_copy = on_copy

    def begin_in(self, after: object, fences: object, *, is_aside: bool) -> ScriptedBlocks:
        return self

    def copy_in(self, block: int, source: memoryview) -> tuple[int, ...]:
        self.copied.append(block)
        self._on_copy(block)
        return (int.from_bytes(source, "big"),)

    def clear(self, block: int) -> None:
        self.cleared.append(block)

    def end(self) -> None:
        self.ended += 1


def keys_of(count: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(32, "big")) for number in range(1, count + 1)]


def run(store: ScriptedStore, blocks: ScriptedBlocks, op: LoadOp, wait_s: float = 5.0) -> tuple[int, str]:
    found = Loading(store, blocks, Counter()).load(op, b"root", None, [], wait_s)
    assert blocks.ended == (1 if store.leases else 0)
    assert all(lease.released == 1 for lease in store.leases)
    return found


def test_a_window_is_copied_while_the_next_one_is_still_read():
    store = ScriptedStore()

    def next_arrives(block: int) -> None:
        # Were pages copied only once all had come, nobody would ever bring the later ones.
        if (block + 1) % WINDOW == 0 and block + 1 < 12:
            store.leases[(block + 1) // WINDOW].settle(WINDOW)

    blocks = ScriptedBlocks(next_arrives)
    started = threading.Timer(0.05, lambda: store.leases[0].settle(WINDOW))
    started.start()
    assert run(store, blocks, op_of(keys_of(12))) == (12, "")
    assert blocks.copied == list(range(12))
    assert [len(lease.keys) for lease in store.leases] == [WINDOW] * 3


def test_what_a_step_waits_for_is_one_lease():
    store = ScriptedStore()
    started = threading.Timer(0.05, lambda: store.leases[0].settle(12))
    started.start()
    assert run(store, ScriptedBlocks(), op_of(keys_of(12), is_async=False)) == (12, "")
    assert len(store.leases) == 1


@pytest.mark.parametrize(
    ("ready", "failed", "why"), [(1, MissReason.CORRUPT, MissReason.CORRUPT.value), (2, None, "late")]
)
def test_a_load_ends_with_the_first_page_that_does_not_come(ready: int, failed: MissReason | None, why: str):
    store = ScriptedStore()

    def second_stops(block: int) -> None:
        if block == WINDOW - 1:
            store.leases[1].settle(ready, failed)

    blocks = ScriptedBlocks(second_stops)
    threading.Timer(0.05, lambda: store.leases[0].settle(WINDOW)).start()
    assert run(store, blocks, op_of(keys_of(12)), 0.5) == (WINDOW + ready, why)
    assert blocks.copied == list(range(WINDOW + ready))


def test_a_page_that_is_not_what_was_stored_ends_the_load_and_its_block_is_cleared():
    store = ScriptedStore()
    threading.Timer(0.05, lambda: [lease.settle(WINDOW) for lease in store.leases]).start()

    class Damaging(ScriptedBlocks):
        def copy_in(self, block: int, source: memoryview) -> tuple[int, ...]:
            (found,) = super().copy_in(block, source)
            return (found ^ (block == WINDOW + 1),)

    blocks = Damaging()
    assert run(store, blocks, op_of(keys_of(12))) == (WINDOW + 1, "corrupt")
    assert blocks.cleared == [WINDOW + 1]
    assert store.leases[1].quarantined == keys_of(12)[WINDOW + 1]


def test_where_little_can_be_held_windows_take_turns():
    store = ScriptedStore(holds=1)

    def settle_all(block: int = 0) -> None:
        threading.Timer(0.02, lambda: store.leases[-1].settle(WINDOW)).start()

    blocks = ScriptedBlocks(lambda block: settle_all() if (block + 1) % WINDOW == 0 else None)
    settle_all()
    assert run(store, blocks, op_of(keys_of(12))) == (12, "")


def test_where_nothing_can_be_held_the_load_says_so():
    assert run(ScriptedStore(holds=0), ScriptedBlocks(), op_of(keys_of(12))) == (0, NO_ROOM)
