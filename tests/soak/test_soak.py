"""Lives of a store, most of them ended by SIGKILL; then everything that is left must be right.

10 seconds here; `make soak` for the long form.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from world import CHAINS, config

from workmem.core.events import BlockQuarantined, Event
from workmem.core.layout import Namespace
from workmem.store.store import Store
from workmem.testing.pages import page_bytes, settle

SECONDS = float(os.environ.get("SOAK_SECONDS", "10"))
FRAGMENTED_MAX = 0.05
"""Share of the arena that holds no page while six layouts fight for it, each time somebody looks."""

pytestmark = [pytest.mark.timeout(SECONDS * 2 + 160), pytest.mark.slow]


class Lives:
    """Runs one process after another on the same folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.count: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.fragmented: list[tuple[float, float]] = []
        """The median of each life that came to its end, and the most."""

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self.chance.random() < 0.25:
                self.to_the_end(min(left, self.chance.uniform(1.0, 6.0)))
            else:
                self.killed(min(left, self.chance.expovariate(1 / 2.0)))
        self.to_the_end(8.0)

    def to_the_end(self, seconds: float) -> None:
        process = self._begin(seconds)
        out, err = process.communicate(timeout=seconds + 150)
        assert process.returncode == 0, err
        report = json.loads(out.splitlines()[-1])
        assert report["gauges"]["store_dram_quarantined_bytes"] == 0
        self.done.update(report["done"])
        if report["fragmented"] is not None:
            self.fragmented.append((report["fragmented"], report["fragmented_max"]))
        self.count["ended"] += 1

    def killed(self, seconds: float) -> None:
        process = self._begin(3600.0)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
        self.count["killed"] += 1

    def _begin(self, seconds: float) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("life.py")
        process = subprocess.Popen(
            [sys.executable, str(script), str(self.folder), str(self.chance.randrange(2**32)), str(seconds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        assert first == "open\n", first + process.stderr.read()
        return process


def read_everything(store: Store) -> int:
    """Compare every block that can be read, alone, so that a missing parent hides none. Returns how many."""
    found = 0
    for chain in CHAINS:
        store.register(chain.space)
        held = [key for key in chain.keys if store.lookup(chain.root, [key]).blocks]
        lease = store.lease(chain.root, held, owner="end", ttl_s=120)
        settle(lease, 60)
        assert lease.failed is None
        for index, key in enumerate(held):
            assert bytes(lease.page(index)) == page_bytes(key, chain.space.layout)
        lease.release()
        found += len(held)
    return found


def blocks_of(store: Store, space: Namespace) -> int:
    """How many blocks of a namespace can be found."""
    store.register(space)
    mine = [chain for chain in CHAINS if chain.space == space]
    return sum(store.lookup(chain.root, [key]).blocks for chain in mine for key in chain.keys)


def test_lives_and_deaths_leave_only_what_is_right(tmp_path, record_property):
    lives = Lives(tmp_path / "store", seed=int(os.environ.get("SOAK_SEED", "1")))
    lives.run(SECONDS)
    struck: list[BlockQuarantined] = []

    def hear(event: Event) -> None:
        if isinstance(event, BlockQuarantined):
            struck.append(event)

    with Store(config(tmp_path / "store"), hear) as store:
        found = read_everything(store)
        store.audit()
        assert struck == [], "a page was not what was written"
        assert store.gauges()["store_dram_quarantined_bytes"] == 0
        purged = CHAINS[0].space
        store.purge(lambda namespace: namespace == purged)
        assert blocks_of(store, purged) == 0
        store.audit()
    with Store(config(tmp_path / "store"), hear) as store:
        again = read_everything(store)
        assert blocks_of(store, purged) == 0
    report = {
        "lives": lives.count,
        "done": lives.done,
        "blocks at the end": found,
        "after a purge": again,
        "fragmented share of the arena": lives.fragmented,
    }
    # As text: a property travels between processes, and a Counter does not.
    record_property("soak", json.dumps(report, default=str))
    print(json.dumps(report, indent=1))
    assert lives.count["killed"] > 0
    assert lives.count["ended"] > 0
    assert 0 < again < found
    assert all(most <= FRAGMENTED_MAX for _, most in lives.fragmented)
