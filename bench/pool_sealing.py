"""What it costs to encrypt what goes into a pool of several hosts: the tier `mooncake`, plain beside sealed.

    python bench/pool_sealing.py [--batches 24] [--out FILE]

One master and one owner of memory on 127.0.0.1; batches of 32 pages of 192 KiB are put and got by two tiers, one of them
with a key file, in turns. Also the seal alone, by one thread. Rates are of page bytes; a ratio is that of two neighbours.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import environment, spread, write_result

from workmem.store.arena import align
from workmem.store.codecs.pool_sealing import SEAL_BYTES, PoolCipher
from workmem.store.tiers.contract import ArenaMemory, Outcome, PageIn
from workmem.store.tiers.mooncake.tier import MooncakeTier, mooncake_tier
from workmem.store.tiers.page_header import header_bytes
from workmem.testing.mooncake import pool
from workmem.testing.pages import SLICED, Chain, namespace
from workmem.testing.tier_bench import Bench, outcomes_of, page_of

PAGES = 32
PAGE_BYTES = header_bytes(SLICED) + align(SLICED.page_bytes)
POOL_BYTES = 1 << 30


def main() -> None:
    """Measure, print, write."""
    args = _arguments()
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, pool(POOL_BYTES) as master:
        key = Path(folder, "key")
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
        tiers = {
            "plain": _opened(master.address, "plain", ""),
            "sealed": _opened(master.address, "sealed", str(key)),
        }
        for number in range(args.batches):
            for name, bench in tiers.items():
                for what, rate in _measured(bench, number).items():
                    rates.setdefault(f"{name} {what}", []).append(rate)
        for bench in tiers.values():
            bench.tier.close(20)
    rates["seal alone"], rates["open alone"] = _alone(args.batches)
    found: dict[str, Any] = {name: spread(values) for name, values in rates.items()}
    for what in ("put", "get"):
        pairs = zip(rates[f"sealed {what}"], rates[f"plain {what}"], strict=True)
        found[f"sealed / plain {what}"] = spread([sealed / plain for sealed, plain in pairs])
    for name, one in found.items():
        print(f"{name:20} {json.dumps(one)}")
    if args.out:
        write_result(Path(args.out), {"environment": environment(), "gb_per_s": found})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--out", default="")
    return parser.parse_args()


def _opened(master: str, name: str, key_file: str) -> Bench:
    options = {"master": master, "pool": name, "capacity": POOL_BYTES, "key_file": key_file}
    tier: MooncakeTier = mooncake_tier(options)
    memory = memoryview(mmap.mmap(-1, PAGES * PAGE_BYTES))
    held = list(tier.open(ArenaMemory(int(np.frombuffer(memory, np.uint8).ctypes.data), len(memory))))
    return Bench(tier, PAGES, held, memory)


def _measured(bench: Bench, number: int) -> dict[str, float]:
    chain = Chain(namespace(layout=SLICED), PAGES, seed=number)
    pages = [page_of(chain, index, bench.room(index)) for index in range(PAGES)]
    size = sum(page.about.length for page in pages)
    asked = [PageIn(page.about.name, bench.room(index)) for index, page in enumerate(pages)]
    found = {
        "put": _rate(size, lambda: outcomes_of(PAGES, lambda done: bench.tier.put(pages, done))),
        "get": _rate(size, lambda: outcomes_of(PAGES, lambda done: bench.tier.get(asked, done))),
    }
    names = [page.about.name for page in pages]
    outcomes_of(PAGES, lambda done: bench.tier.drop(names, done))
    return found


def _rate(size: int, call: Callable[[], list[Outcome]]) -> float:
    started = time.perf_counter()
    outcomes = call()
    seconds = time.perf_counter() - started
    if set(outcomes) != {Outcome.DONE}:
        raise SystemExit(f"not all pages were put and got: {outcomes}")
    return size / seconds / 1e9


def _alone(batches: int) -> tuple[list[float], list[float]]:
    cipher = PoolCipher(os.urandom(32))
    plain = memoryview(bytearray(os.urandom(PAGE_BYTES)))
    sealed = memoryview(bytearray(PAGE_BYTES + SEAL_BYTES))
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(batches):
        for into, call in (
            (rates[0], lambda: cipher.seal_page("name", 0, plain, sealed)),
            (rates[1], lambda: cipher.open_page("name", 0, sealed, plain)),
        ):
            started = time.perf_counter()
            for _ in range(PAGES):
                call()
            into.append(PAGES * PAGE_BYTES / (time.perf_counter() - started) / 1e9)
    return rates


if __name__ == "__main__":
    main()
