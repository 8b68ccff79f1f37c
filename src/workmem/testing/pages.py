"""Builders for store tests: chains of blocks whose page bytes follow from their keys.

A page that is served can so be checked without remembering what was written.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence

from workmem.core.keys import BlockKey, block_keys
from workmem.core.layout import KVLayout, Namespace
from workmem.core.outcomes import TierName
from workmem.store.contract import BlockId, KVStore, Lease, PageWrite, SaveState

SMALL = KVLayout(dtype="fp32", layers=4, kv_heads=2, head_dim=16, block_tokens=4)
"""4 KiB pages of one slice."""
SLICED = KVLayout(dtype="fp32", layers=3, kv_heads=4, head_dim=128, block_tokens=16)
"""192 KiB pages of three slices."""


def namespace(name: str = "model", layout: KVLayout = SMALL) -> Namespace:
    """A namespace told apart by `name`."""
    return Namespace(model_fingerprint=name, layout=layout)


def page_bytes(key: bytes, layout: KVLayout) -> bytes:
    """The bytes that block `key` has in these tests."""
    return hashlib.shake_128(key).digest(64) * (layout.page_bytes // 64)


class Chain:
    """A context: `length` blocks under a namespace, told apart by `seed`; `behind` another, whose tokens come first."""

    def __init__(self, space: Namespace, length: int, seed: int = 0, *, behind: Chain | None = None) -> None:
        self.space = space
        self.root = space.root()
        width = space.layout.block_tokens
        own = [(seed * 7919 + index) % 50_000 for index in range(length * width)]
        self.tokens = [*(behind.tokens if behind is not None else []), *own]
        self.keys: list[BlockKey] = block_keys(self.root, self.tokens, width)

    def block(self, index: int) -> BlockId:
        """Identity of block `index`."""
        width = self.space.layout.block_tokens
        parent = self.keys[index - 1] if index else self.root
        return BlockId(
            self.keys[index], parent, tuple(self.tokens[index * width : (index + 1) * width]), index
        )

    def writes(
        self, done: Callable[[SaveState], None] = lambda _: None, indices: Iterable[int] | None = None
    ) -> list[PageWrite]:
        """Pages to save, all or those at `indices`."""
        picked = range(len(self.keys)) if indices is None else indices
        return [PageWrite(self.block(index), self._copier(self.keys[index]), done) for index in picked]

    def save(self, store: KVStore, *, timeout_s: float = 20.0) -> list[SaveState]:
        """Save all blocks, in order, and wait until they are in their last tier."""
        states: list[SaveState] = []
        store.register(self.space)
        store.save(self.root, self.writes(states.append))
        if not store.flush(timeout_s):
            raise TimeoutError(f"saves not settled in {timeout_s} s")
        return states

    def tiers(self, store: KVStore) -> tuple[TierName, ...]:
        """Where the resident prefix lies."""
        return store.lookup(self.root, self.keys).tiers

    def _copier(self, key: bytes) -> Callable[[memoryview], None]:
        def copy_into(view: memoryview) -> None:
            view[:] = page_bytes(key, self.space.layout)

        return copy_into


def settle(lease: Lease, timeout_s: float = 20.0) -> None:
    """Wait until `lease` is settled."""
    event = threading.Event()
    lease.on_settled(event.set)
    if not event.wait(timeout_s):
        raise TimeoutError(f"lease not settled in {timeout_s} s")


def read_all(store: KVStore, root: bytes, keys: Sequence[BlockKey]) -> int:
    """Lease `keys`, compare every page that arrives with what its key demands; returns how many arrived."""
    lease = store.lease(root, keys, owner="reader", ttl_s=60.0)
    try:
        settle(lease)
        for index in range(lease.ready):
            if bytes(lease.page(index)) != page_bytes(keys[index], lease.layout):
                raise AssertionError(f"page {index} is not what was written")
        return lease.ready
    finally:
        lease.release()
