"""A tenant of a million blocks is purged while another one goes on: how long it takes, and how long the other waits.

    python bench/store_peers/records.py make FOLDER --count 1000000
    python bench/store_peers/purges.py FOLDER

The folder is one that `records.py` made: all of it is purged. The other tenant's context is put in first, into
segments of its own. Its thread looks it up, and leases it, a millisecond after the last time: for a second before the purge, then until
nothing of what was purged is left in memory, in the journal or on the disk. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

from records import CHAIN, chain_keys, layout

from workmem.core.keys import BlockKey
from workmem.core.layout import Namespace
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.contract import BlockId, SaveState
from workmem.store.store import Store

FLUSH_S = 300.0
PAUSE_S = 0.001
"""Between two questions. A thread that never pauses takes the interpreter's lock from everybody else."""


class Other:
    """A tenant with one context in memory, and a thread that keeps asking for it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = store.register(
            Namespace(model_fingerprint="bench", layout=layout(), tenant_salt="other")
        )
        self._keys = [BlockKey(key) for key in chain_keys(self._root, 0)]
        self._until = threading.Event()
        self.waits: dict[str, list[float]] = {}
        self.misses = 0
        self._put()

    def _put(self) -> None:
        page, parent, pages = bytes(layout().page_bytes), self._root, []
        for depth, key in enumerate(self._keys):
            pages.append((BlockId(key, parent, tuple(range(layout().block_tokens)), depth), page))
            parent = key
        states = self._store.put(self._root, pages)
        if states != [SaveState.STORED] * CHAIN or not self._store.flush(FLUSH_S):
            raise RuntimeError("the other tenant's context was not stored")

    def start(self) -> None:
        """Ask until `stop`."""
        self._until.clear()
        self.waits = {"lookup": [], "lease": []}
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, dict[str, float]]:
        """What the questions took, microseconds."""
        self._until.set()
        self._thread.join()
        found = {}
        for name, waits in self.waits.items():
            ordered = sorted(1e6 * seconds for seconds in waits)
            p50, p99 = (ordered[len(ordered) * part // 100] for part in (50, 99))
            found[name] = {"n": len(ordered), "p50_us": p50, "p99_us": p99, "max_us": ordered[-1]}
        return found

    def _ask(self) -> None:
        while not self._until.wait(PAUSE_S):
            begin = time.perf_counter()
            found = self._store.lookup(self._root, self._keys)
            middle = time.perf_counter()
            lease = self._store.lease(self._root, self._keys, owner="other", ttl_s=60.0)
            end = time.perf_counter()
            lease.release()
            self.misses += (found.blocks, lease.ready) != (CHAIN, CHAIN)
            self.waits["lookup"].append(middle - begin)
            self.waits["lease"].append(end - middle)


def measure(folder: Path) -> dict[str, Any]:
    """Purge all that `records.py` made."""
    # No scrubber: what it would read are the holes of the segment files.
    ssd = SsdConfig(path=str(folder), bytes="1TiB", scrub_bytes_per_s=0)
    config = StoreConfig(dram=DramConfig(bytes="64MiB"), ssd=ssd)
    with Store(config) as store:
        root = store.register(Namespace(model_fingerprint="bench", layout=layout()))
        keys = [BlockKey(key) for key in chain_keys(root, 0)]
        other = Other(store)
        other.start()
        time.sleep(1.0)
        before = other.stop()
        if store.lookup(root, keys).blocks != CHAIN:
            raise RuntimeError(f"{folder} does not hold what records.py makes")
        other.start()
        begin = time.perf_counter()
        gone = store.purge(lambda space: space.root() == root)
        purged = time.perf_counter()
        is_flushed = store.flush(FLUSH_S)
        flushed = time.perf_counter()
        meanwhile = other.stop()
        if not is_flushed or other.misses or store.lookup(root, keys).blocks:
            raise RuntimeError(f"flushed: {is_flushed}; the other tenant missed {other.misses} times")
        pages = store.gauges()["store_ssd_pages"]
    return {
        "blocks": gone.blocks,
        "purge_s": purged - begin,
        "gone_from_disk_s": flushed - begin,
        "pages_left": pages,
        "other_before": before,
        "other_meanwhile": meanwhile,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    print(json.dumps(measure(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
