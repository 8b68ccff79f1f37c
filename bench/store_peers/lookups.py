"""What a prefix costs before any byte moves, in microseconds: hashing, lookup, lease.

    python bench/store_peers/lookups.py --seconds 0.5

Prints JSON. What it costs from another process: `bench/host_latency.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from workmem.config import cache_dir
from workmem.core.keys import BlockKey, block_keys
from workmem.core.layout import BLOCK_TOKENS, KVLayout, Namespace
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.contract import BlockId, KVStore, PageWrite, SaveState
from workmem.store.copying import use_native_copy
from workmem.store.store import Store

BLOCKS = (32, 512)
LAYOUT = KVLayout(dtype="bf16", layers=1, kv_heads=1, head_dim=64)
KEY_BYTES = 32


def timed(
    call: Callable[[], object], seconds: float, after: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Microseconds of one call, after a tenth of the calls as a warm-up. `after` follows each call, untimed."""
    times: list[float] = []
    until = time.perf_counter() + seconds * 1.1
    begin = time.perf_counter() + seconds * 0.1
    while (start := time.perf_counter()) < until or len(times) < 20:
        call()
        end = time.perf_counter()
        after()
        if start >= begin:
            times.append(end - start)
    ordered = np.sort(times) * 1e6
    return {
        "p50_us": float(ordered[len(ordered) // 2]),
        "p99_us": float(ordered[int(len(ordered) * 0.99)]),
        "n": len(ordered),
    }


def saved_prefix(store: KVStore, blocks: int) -> tuple[bytes, list[int], list[BlockKey]]:
    """A chain in dram: root, token ids, keys."""
    root = store.register(Namespace(model_fingerprint="bench", layout=LAYOUT))
    tokens = list(range(blocks * BLOCK_TOKENS))
    keys = block_keys(root, tokens, BLOCK_TOKENS)
    pages = []
    for depth, key in enumerate(keys):
        own = tuple(tokens[depth * BLOCK_TOKENS : (depth + 1) * BLOCK_TOKENS])
        block = BlockId(key, keys[depth - 1] if depth else root, own, depth)
        pages.append(PageWrite(block, _ignore, _ignore))
    store.save(root, pages)
    assert store.flush(30.0)
    assert len(store.lookup(root, keys).tiers) == blocks
    return root, tokens, keys


def _ignore(_: object) -> None:
    """What the pages hold does not matter here."""


def measure_store(seconds: float) -> dict[str, dict[str, Any]]:
    """Within one process."""
    config = StoreConfig(dram=DramConfig(bytes="256MiB"), ssd=SsdConfig(enabled=False))
    found: dict[str, dict[str, Any]] = {}
    with Store(config) as store:
        root, tokens, keys = saved_prefix(store, max(BLOCKS))
        for n in BLOCKS:
            prefix, ids = keys[:n], tokens[: n * BLOCK_TOKENS]

            def lease(prefix: list[BlockKey] = prefix) -> None:
                store.lease(root, prefix, owner="bench", ttl_s=60.0).release()

            def hashing(ids: list[int] = ids) -> list[BlockKey]:
                return block_keys(root, ids, BLOCK_TOKENS)

            found[f"hashing_{n}"] = timed(hashing, seconds)
            found[f"lookup_{n}"] = timed(lambda prefix=prefix: store.lookup(root, prefix), seconds)
            found[f"lease_and_release_{n}"] = timed(lease, seconds)
    return found


def measure_saves(seconds: float) -> dict[str, dict[str, Any]]:
    """What an engine waits for: offering 64 pages of 360 KiB to be copied behind it, and putting one at once."""
    layout = KVLayout(dtype="bf16", layers=30, kv_heads=3, head_dim=64)
    tokens, source = tuple(range(BLOCK_TOKENS)), np.ones(layout.page_bytes, dtype=np.uint8)
    numbers = itertools.count(1)
    told: queue.SimpleQueue[SaveState] = queue.SimpleQueue()

    def block() -> BlockId:
        return BlockId(BlockKey(next(numbers).to_bytes(KEY_BYTES, "big")), root, tokens, 0)

    def copy(page: memoryview) -> None:
        np.copyto(np.frombuffer(page, dtype=np.uint8), source)

    def offer() -> None:
        store.save(root, [PageWrite(block(), copy, told.put) for _ in range(64)])

    with Store(StoreConfig(dram=DramConfig(bytes="256MiB"), ssd=SsdConfig(enabled=False))) as store:
        root = store.register(Namespace(model_fingerprint="bench", layout=layout))
        return {
            "save_64_offered": timed(offer, seconds, lambda: [told.get() for _ in range(64)]),
            "put_1": timed(lambda: store.put(root, [(block(), source)]), seconds),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0)
    seconds: float = parser.parse_args().seconds
    use_native_copy(cache_dir())
    print(json.dumps(measure_store(seconds) | measure_saves(seconds)))


if __name__ == "__main__":
    main()
