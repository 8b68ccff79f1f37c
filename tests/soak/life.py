"""One life of a store, as a process: random work from two threads until time is up, or until it is killed.

`python life.py FOLDER SEED SECONDS`; prints `open` once it works and a line of JSON if it gets to its end.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from world import CHAINS, config

from workmem.core.errors import CapacityError, LeaseError
from workmem.core.events import BoundReached, Event
from workmem.store.store import Store
from workmem.testing.pages import Chain, page_bytes, settle

HELD_MAX = 6
EVICTIONS_MIN = 100
"""From then on the arena is as full as it gets."""


class Work:
    """Random steps of one thread."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.chance = random.Random(seed)
        self.held: list[tuple[Chain, object]] = []
        self.done: Counter[str] = Counter()
        self.fragmented: list[float] = []
        """Share of the arena that holds no page and not every size can have, each time it was looked at."""

    def run(self, until: float) -> None:
        steps = [self.save] * 6 + [self.read] * 5 + [self.hold] * 2 + [self.look] * 2 + [self.let_go] * 2
        rare = [self.strike, self.strike, self.flush, self.flush, self.purge]
        while time.monotonic() < until:
            self.chance.choice(rare if self.chance.random() < 0.01 else steps)()
        while self.held:
            self.let_go()

    def save(self) -> None:
        chain = self.chance.choice(CHAINS)
        self.store.save(chain.root, chain.writes(self._saved, range(self.chance.randint(1, len(chain.keys)))))
        gauges = self.store.gauges()
        if gauges["store_dram_evictions_total"] > EVICTIONS_MIN:
            self.fragmented.append(
                gauges["store_dram_fragmented_bytes"] / gauges["store_dram_capacity_bytes"]
            )
        if gauges["store_save_queue_pages"] > 200:
            self.store.flush(0.2)

    def read(self) -> None:
        chain = self.chance.choice(CHAINS)
        lease = self._lease(chain, ttl_s=30.0)
        if lease is None:
            return
        settle(lease, 60.0)
        self._compare(chain, lease)
        lease.release()

    def hold(self) -> None:
        if len(self.held) < HELD_MAX:
            chain = self.chance.choice(CHAINS)
            lease = self._lease(chain, ttl_s=self.chance.choice((0.05, 0.5, 5.0)))
            if lease is not None:
                self.held.append((chain, lease))

    def look(self) -> None:
        if self.held:
            chain, lease = self.chance.choice(self.held)
            self._compare(chain, lease)

    def let_go(self) -> None:
        if self.held:
            _, lease = self.held.pop(self.chance.randrange(len(self.held)))
            lease.release()

    def strike(self) -> None:
        chain = self.chance.choice(CHAINS)
        lease = self._lease(chain, ttl_s=30.0)
        if lease is not None:
            settle(lease, 60.0)
            if lease.ready:
                lease.quarantine(self.chance.randrange(lease.ready))
                self.done["struck"] += 1
            lease.release()

    def flush(self) -> None:
        self.store.flush(5.0)

    def purge(self) -> None:
        space = self.chance.choice(CHAINS).space
        self.done["purged"] += self.store.purge(lambda namespace: namespace == space).blocks

    def _saved(self, state: object) -> None:
        self.done[f"saves {state}"] += 1

    def _lease(self, chain: Chain, ttl_s: float):
        try:
            return self.store.lease(chain.root, chain.keys, owner="soak", ttl_s=ttl_s)
        except CapacityError:
            self.done["leases refused"] += 1
            return None

    def _compare(self, chain: Chain, lease) -> None:
        try:
            for index in range(lease.ready):
                if bytes(lease.page(index)) != page_bytes(chain.keys[index], chain.space.layout):
                    # Read first and asked after: a lease that has ended says nothing of its page (R3).
                    lease.page(index)
                    raise AssertionError(f"block {chain.keys[index].hex()} is not what was written")
                self.done["pages compared"] += 1
        except LeaseError:
            self.done["leases ended meanwhile"] += 1


def main(folder: Path, seed: int, seconds: float) -> None:
    bounds: Counter[str] = Counter()

    def hear(event: Event) -> None:
        if isinstance(event, BoundReached):
            bounds[event.name] += 1

    failures: list[BaseException] = []
    with Store(config(folder), hear) as store:
        for chain in CHAINS:
            store.register(chain.space)
        print("open", flush=True)
        until = time.monotonic() + seconds
        works = [Work(store, seed + number) for number in range(2)]

        def run(work: Work) -> None:
            try:
                work.run(until)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        assert store.flush(60)
        store.audit()
        done = sum((work.done for work in works), Counter())
        fragmented = [share for work in works for share in work.fragmented]
        report = {
            "done": done,
            "bounds": bounds,
            "gauges": store.gauges(),
            "fragmented": statistics.median(fragmented) if fragmented else None,
            "fragmented_max": max(fragmented, default=None),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
