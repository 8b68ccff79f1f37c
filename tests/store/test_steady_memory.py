"""A store in use for long takes what it was given: no count drifts, no memory grows, hits stay what they were."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path

from workmem.store.contract import BlockId, SaveState
from workmem.store.frames import FrameState
from workmem.store.store import Store
from workmem.testing.pages import Chain, namespace, page_bytes

CYCLES = 100_000
CONTEXTS, BLOCKS = 256, 1
"""Twice what dram holds: gets miss about as often as they hit, and every miss is put in again."""


class Use:
    """Puts, gets and puts that are given up, of contexts drawn by chance, one after the other."""

    def __init__(self, store, seed: int) -> None:
        self._store = store
        self._random = random.Random(seed)
        self.chains = [Chain(namespace(), BLOCKS, seed=number) for number in range(CONTEXTS)]
        self.root = store.register(namespace())
        self._pages = [
            [(chain.block(i), page_bytes(key, chain.space.layout)) for i, key in enumerate(chain.keys)]
            for chain in self.chains
        ]
        self._given_up = [chain.block(0) for chain in self.chains]
        self.gets = self.hits = 0

    def cycles(self, count: int) -> float:
        """So many; the part of the gets that hit."""
        self.gets = self.hits = 0
        for _ in range(count // 3):
            which = int(CONTEXTS * self._random.random() ** 2)
            self._get(which)
            self._give_up(self._given_up[-1 - which])
        return self.hits / self.gets

    def _get(self, which: int) -> None:
        chain = self.chains[which]
        self.gets += 1
        lease = self._store.lease(self.root, chain.keys, owner="use", ttl_s=60.0)
        is_hit = lease.ready == BLOCKS
        self.hits += is_hit
        lease.release()
        if not is_hit:
            self._store.put(self.root, self._pages[which])

    def _give_up(self, block: BlockId) -> None:
        pool = self._store.pool
        space = pool.space(self.root)
        frame = pool.begin_save(space, block, 0.0)
        if not isinstance(frame, SaveState):
            pool.abort_save(space, block, frame)


def private_bytes() -> int:
    """Memory of this process that is nobody else's. The arena is shared memory, apart."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def taken() -> tuple[int, int]:
    """Objects that the interpreter has allocated, and private bytes."""
    gc.collect()
    return sys.getallocatedblocks(), private_bytes()


def test_a_hundred_thousand_puts_gets_and_aborts_leave_no_trace(kit):
    with Store(kit.config(dram="1MiB", ssd=0)) as store:
        use = Use(store, seed=7)
        # Until ghosts, and whatever else is kept of a block that left, are as many as they become.
        use.cycles(CYCLES // 4)
        objects, memory = taken()
        rates = [use.cycles(CYCLES // 4) for _ in range(4)]
        more_objects, more_memory = taken()
        assert more_objects - objects < 500, "objects are left behind"
        assert more_memory - memory < 2**20, "memory grows"
        assert 0.3 < rates[0] < 0.9
        assert max(rates) - min(rates) < 0.05, "hits decay"
        state = store.pool.state
        states = {name for name, size in state.frames.ledger.items() if size}
        assert states <= {FrameState.RESIDENT, FrameState.FREE}
        assert {frame.pins for frame in state.catalog.frame if frame is not None} == {0}
        assert not store.pool.space(use.root).filling
        store.audit()


CAP_MIB, MOVED_MIB = 64, 320
_MOVER = f"""
import json, sys
from pathlib import Path
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.testing.pages import SLICED, Chain, namespace, page_bytes, read_all

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

space = namespace("big", SLICED)
chains = [Chain(space, 8, seed=seed) for seed in range({MOVED_MIB} * 2**20 // (8 * SLICED.page_bytes))]
before, seen = resident(), []
ssd = SsdConfig(path=sys.argv[1], bytes="1GiB")
with Store(StoreConfig(dram=DramConfig(bytes="{CAP_MIB}MiB"), ssd=ssd)) as store:
    store.register(space)
    for chain in chains:
        pages = [(chain.block(i), page_bytes(key, SLICED)) for i, key in enumerate(chain.keys)]
        store.put(chain.root, pages)
        seen.append(resident())
    assert store.flush(60)
    # All of it once more, from the disk.
    for chain in chains:
        assert read_all(store, chain.root, chain.keys) == 8
        seen.append(resident())
    gauges = store.gauges()
print(json.dumps([max(seen) - before, gauges["store_ssd_pages"], gauges["store_promoted_total"], 8 * len(chains)]))
"""


def test_a_process_grows_by_its_dram_and_no_tenth_more(tmp_path):
    """Five times as much goes through it, to the disk and back."""
    command = [sys.executable, "-c", textwrap.dedent(_MOVER), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    grown, on_ssd, promoted, pages = json.loads(done.stdout)
    assert on_ssd == pages
    assert promoted >= pages // 2
    assert 0.9 * CAP_MIB * 2**20 < grown <= 1.1 * CAP_MIB * 2**20
