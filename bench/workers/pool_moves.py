"""A client of a Mooncake pool, ours or Mooncake's own: batches into it and out of it, timed where they are made.

Requests (`do`): `put`, `get` and `drop` of a batch of `batch` bytes in blocks of `block` bytes, told apart by `number`;
`flood` writes `bytes` in all over a store, and says what was refused.
"""

from __future__ import annotations

import hashlib
import mmap
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from protocol import Handle, serve_requests

RING_BYTES = 32 << 20
"""What is read from, and as much that is written to: larger than any cache."""
NO_ROOM = -200
WAIT_S = 60.0


class Ring:
    """Registered memory: the first half is what is put, the second where it comes back."""

    def __init__(self) -> None:
        import numpy as np  # noqa: PLC0415

        self._map = mmap.mmap(-1, 2 * RING_BYTES)
        self.view = memoryview(self._map)
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        words = np.frombuffer(self._map, np.uint64)
        # Every 8 bytes of it are others: a block in another's place is seen.
        words[: len(words) // 2] = np.arange(len(words) // 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self._next = 0

    def take(self, size: int) -> int:
        """Offset of the next `size` bytes, the same ones again after a while."""
        if self._next + size > RING_BYTES:
            self._next = 0
        offset, self._next = self._next, self._next + size
        return offset


class Ours:
    """The remote tier, with all that it does for a batch: names, groups, where it lies, what others are told."""

    def __init__(self, options: dict[str, Any], ring: Ring) -> None:
        from workmem.core.layout import KVLayout, Namespace  # noqa: PLC0415
        from workmem.store.tiers.contract import ArenaMemory  # noqa: PLC0415
        from workmem.store.tiers.mooncake.tier import mooncake_tier  # noqa: PLC0415

        layout = KVLayout(dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=16)
        self._space = Namespace(model_fingerprint="bench", layout=layout)
        self._ring = ring
        self._tier = mooncake_tier(
            {"master": options["master"], "capacity": options["capacity"]} | options.get("more", {})
        )
        self._tier.open(ArenaMemory(ring.address, 2 * RING_BYTES))
        self.about = {"mooncake": metadata.version("mooncake-transfer-engine-non-cuda")}

    def put(self, names: Sequence[bytes], offset: int, block: int) -> int:
        """How many of `names` were not stored."""
        from workmem.store.tiers.contract import HeldPage, PageOut  # noqa: PLC0415

        pages = [
            PageOut(
                HeldPage(name, self._space, names[at - 1] if at else name, at, block, 1),
                self._ring.view[offset + at * block : offset + (at + 1) * block].toreadonly(),
            )
            for at, name in enumerate(self._names(names))
        ]
        return self._count(len(pages), lambda done: self._tier.put(pages, done))

    def get(self, names: Sequence[bytes], offset: int, block: int) -> int:
        """How many did not come."""
        from workmem.store.tiers.contract import PageIn  # noqa: PLC0415

        start = RING_BYTES + offset
        pages = [
            PageIn(name, self._ring.view[start + at * block : start + (at + 1) * block])
            for at, name in enumerate(self._names(names))
        ]
        return self._count(len(pages), lambda done: self._tier.get(pages, done))

    def drop(self, names: Sequence[bytes]) -> None:
        """Forget them."""
        found = self._names(names)
        self._count(len(found), lambda done: self._tier.drop(found, done))

    def close(self) -> None:
        """Leave the pool."""
        self._tier.close(10.0)

    def _names(self, names: Sequence[bytes]) -> list[Any]:
        from workmem.store.tiers.contract import PageName  # noqa: PLC0415

        return [PageName(self._space.root(), name) for name in names]

    def _count(self, count: int, call: Callable[[Callable[[int, Any], None]], None]) -> int:
        from workmem.store.tiers.contract import Outcome  # noqa: PLC0415

        ended, left, short = threading.Event(), count, 0
        lock = threading.Lock()

        def done(_: int, outcome: Outcome) -> None:
            nonlocal left, short
            with lock:
                left -= 1
                short += outcome is not Outcome.DONE
                if not left:
                    ended.set()

        call(done)
        if not ended.wait(WAIT_S):
            raise TimeoutError(f"{left} of {count} blocks were not answered for in {WAIT_S:g} s")
        return short


class Theirs:
    """Mooncake's own client, with one object for each block and no more calls than one for a batch."""

    def __init__(self, options: dict[str, Any], ring: Ring) -> None:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415

        self._address = ring.address
        self._store = MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", options["master"])
        if code or self._store.register_buffer(ring.address, 2 * RING_BYTES):
            raise RuntimeError(f"no client of Mooncake: setup answered {code}")
        self.about = {"mooncake": metadata.version("mooncake-transfer-engine-non-cuda")}

    def put(self, names: Sequence[bytes], offset: int, block: int) -> int:
        """How many of `names` were not stored."""
        places = [self._address + offset + at * block for at in range(len(names))]
        codes = self._store.batch_put_from([name.hex() for name in names], places, [block] * len(names))
        return sum(code != 0 for code in codes)

    def get(self, names: Sequence[bytes], offset: int, block: int) -> int:
        """How many did not come."""
        places = [self._address + RING_BYTES + offset + at * block for at in range(len(names))]
        sizes = self._store.batch_get_into([name.hex() for name in names], places, [block] * len(names))
        return sum(size != block for size in sizes)

    def drop(self, names: Sequence[bytes]) -> None:
        """Forget them."""
        self._store.batch_remove([name.hex() for name in names], True)

    def close(self) -> None:
        """Leave the pool."""
        self._store.close()


class Mover:
    """One client and its memory."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._ring = Ring()
        self._client: Ours | Theirs = (Ours if options["ours"] else Theirs)(options, self._ring)
        self.about = self._client.about
        self._offsets: dict[int, int] = {}

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """See the module."""
        match request["do"]:
            case "put" | "get" | "drop":
                return self._move(request)
            case "flood":
                return self._flood(request["bytes"], request["block"])
            case "close":
                self._client.close()
                return {}
            case other:
                raise ValueError(f"no such request: {other}")

    def _move(self, request: dict[str, Any]) -> dict[str, Any]:
        block, number = request["block"], request["number"]
        names = [
            hashlib.sha256(f"{number} {block} {at}".encode()).digest()
            for at in range(request["batch"] // block)
        ]
        if request["do"] == "drop":
            self._client.drop(names)
            return {}
        offset = self._offsets.setdefault(number, self._ring.take(request["batch"]))
        move = self._client.put if request["do"] == "put" else self._client.get
        cpu = _cpu_s()
        begin = time.perf_counter()
        short = move(names, offset, block)
        seconds = time.perf_counter() - begin
        used = _cpu_s() - cpu
        if request["do"] == "get" and not short:
            # After the clock.
            there, here = (
                self._ring.view[at : at + request["batch"]] for at in (offset, RING_BYTES + offset)
            )
            if there != here:
                raise RuntimeError("what came back is not what was put")
            here[:] = bytes(len(here))
        return {"seconds": seconds, "cpu_s": used, "short": short}

    def _flood(self, size: int, block: int) -> dict[str, Any]:
        """Write on and on, as a store in front of a pool does, or as a plain client does."""
        if isinstance(self._client, Ours):
            return _flood_a_store(self._options, size)
        refused = 0
        for at in range(size // block):
            names = [hashlib.sha256(f"flood {at}".encode()).digest()]
            refused += self._client.put(names, self._ring.take(block), block)
        return {"objects": size // block, "refused": refused}


def _flood_a_store(options: dict[str, Any], size: int) -> dict[str, Any]:
    from workmem.core.layout import KVLayout  # noqa: PLC0415
    from workmem.store.config import BelowConfig, DramConfig, SsdConfig, StoreConfig  # noqa: PLC0415
    from workmem.store.store import Store  # noqa: PLC0415
    from workmem.testing.pages import Chain, namespace  # noqa: PLC0415

    layout = KVLayout(dtype="bf16", layers=30, kv_heads=3, head_dim=64, block_tokens=16)
    below = BelowConfig(
        tier="mooncake",
        options={"master": options["master"], "capacity": options["capacity"]} | options.get("more", {}),
    )
    config = StoreConfig(dram=DramConfig(bytes="64MiB"), below=below, ssd=SsdConfig(enabled=False))
    pages = 64
    with Store(config, lambda _: None) as store:
        for seed in range(size // (pages * layout.page_bytes)):
            Chain(namespace(layout=layout), pages, seed=seed).save(store, timeout_s=WAIT_S)
        gauges = store.gauges()
    given_up = int(gauges["store_writes_given_up_total"])
    return {"objects": size // layout.page_bytes, "refused": given_up}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def load(options: dict[str, Any]) -> tuple[dict[str, Any], Handle]:
    sys.path.insert(0, options["source"])
    mover = Mover(options)
    return mover.about, mover.handle


if __name__ == "__main__":
    serve_requests(load)
