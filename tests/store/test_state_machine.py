"""The store against a dict: whatever happens in whatever order, pages are right, frames are counted."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from workmem.core.errors import CapacityError
from workmem.core.outcomes import MissReason, TierName
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.contract import SaveState
from workmem.store.store import Store
from workmem.testing.pages import SMALL, Chain, namespace, page_bytes, read_all, settle

pytestmark = pytest.mark.timeout(120)

WIDE = type(SMALL)(dtype="fp32", layers=4, kv_heads=4, head_dim=32, block_tokens=4)
LENGTH = 5
SPACES = (namespace("small", SMALL), namespace("wide", WIDE))
CHAINS = tuple(Chain(space, LENGTH, seed=seed) for space in SPACES for seed in range(5))
DRAM_BYTES = 288 * 1024
SSD_BYTES = 640 * 1024


class StoreMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    @initialize(eviction=st.sampled_from(["value", "segmented_lru", "s3fifo", "lru"]))
    def start(self, eviction: str) -> None:
        self.eviction = eviction
        self.folder = Path(tempfile.mkdtemp(prefix="workmem-machine-"))
        self.saved: set[bytes] = set()
        self.held: list = []
        self.open()

    def open(self) -> None:
        ssd = SsdConfig(
            path=str(self.folder / "store"), bytes=SSD_BYTES, readers=2, eviction=self.eviction, **self.kept()
        )
        dram = DramConfig(bytes=DRAM_BYTES, eviction=self.eviction)
        self.store = Store(StoreConfig(dram=dram, ssd=ssd))
        for space in SPACES:
            self.store.register(space)

    def kept(self) -> dict[str, Any]:
        """Settings of how pages are kept."""
        return {}

    @rule(chain=st.sampled_from(CHAINS), upto=st.integers(1, LENGTH), settled=st.booleans())
    def save(self, chain: Chain, upto: int, *, settled: bool) -> None:
        states: list[SaveState] = []
        self.store.save(chain.root, chain.writes(states.append, range(upto)))
        self.saved.update(chain.keys[:upto])
        if settled:
            assert self.store.flush(20)
            assert len(states) == upto

    @rule(chain=st.sampled_from(CHAINS))
    def look(self, chain: Chain) -> None:
        found = self.store.lookup(chain.root, chain.keys)
        assert set(chain.keys[: found.blocks]) <= self.saved
        assert (found.reason is None) == (found.blocks == LENGTH)
        if found.reason is MissReason.COLD:
            assert set(found.tiers) <= {TierName.DRAM, TierName.SSD}

    @rule(target=leases, chain=st.sampled_from(CHAINS), upto=st.integers(1, LENGTH))
    def lease(self, chain: Chain, upto: int):
        try:
            lease = self.store.lease(chain.root, chain.keys[:upto], owner="machine", ttl_s=600)
        except CapacityError:
            assert self.held, "with nothing held every context fits"
            return None
        settle(lease)
        assert lease.failed in (None, MissReason.COLD, MissReason.EVICTED, MissReason.CORRUPT)
        self.held.append(lease)
        return lease

    @rule(lease=leases)
    def read(self, lease) -> None:
        if lease is None or lease not in self.held:
            return
        for index in range(lease.ready):
            assert lease.page(index) == page_bytes(lease.keys[index], lease.layout)

    @rule(lease=leases, pick=st.integers(0, LENGTH - 1))
    def quarantine(self, lease, pick: int) -> None:
        if lease is None or lease not in self.held or pick >= lease.ready:
            return
        lease.quarantine(pick)
        # Until it is saved again, which a save still on its way may do.
        self.store.flush(20)

    @rule(lease=consumes(leases))
    def release(self, lease) -> None:
        if lease is not None and lease in self.held:
            self.held.remove(lease)
            lease.release()

    @rule()
    @precondition(lambda self: len(self.held) < 4)
    def reopen(self) -> None:
        assert self.store.flush(20)
        durable = [(chain, self.on_ssd(chain)) for chain in CHAINS]
        for lease in self.held:
            lease.release()
        self.held.clear()
        self.store.close()
        self.open()
        for chain, blocks in durable:
            assert self.store.lookup(chain.root, chain.keys).blocks >= blocks

    @rule(settled=st.booleans())
    @precondition(lambda self: len(self.held) < 4)
    def crash(self, *, settled: bool) -> None:
        """As a kill would leave it: what counts is what lay on disk at one moment, and nothing is closed."""
        if settled:
            assert self.store.flush(20)
        durable = [(chain, self.on_ssd(chain)) for chain in CHAINS] if settled else []
        left = self.folder / "left"
        (left / "segments").mkdir(parents=True)
        # The journal first: what it names was in the segments before, as it is at a kill.
        for name in ("FORMAT", "journal"):
            shutil.copy(self.folder / "store" / name, left / name)
        for segment in sorted((self.folder / "store" / "segments").iterdir()):
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(segment, left / "segments")
        for lease in self.held:
            lease.release()
        self.held.clear()
        self.store.close()
        shutil.rmtree(self.folder / "store")
        left.rename(self.folder / "store")
        self.open()
        for chain, blocks in durable:
            assert self.store.lookup(chain.root, chain.keys).blocks >= blocks

    def on_ssd(self, chain: Chain) -> int:
        rows = self.store._pool.space(chain.root).rows
        segment = self.store._pool.state.catalog.segment
        count = 0
        for key in chain.keys:
            row = rows.get(key)
            if row is None or not segment[row]:
                break
            count += 1
        return count

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "store"):
            self.store.audit()

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.flush(20)
        for lease in self.held:
            lease.release()
        for chain in CHAINS:
            read_all(self.store, chain.root, chain.keys)
        self.store.audit()
        gauges = self.store.gauges()
        assert gauges["store_dram_quarantined_bytes"] == 0
        resident = sum(
            space.frame_bytes
            for space in self.store._pool.state.spaces.values()
            for row in space.rows.values()
            if self.store._pool.state.catalog.frame[row] is not None
        )
        assert gauges["store_dram_used_bytes"] == resident
        self.store.close()
        shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreMachine = StoreMachine.TestCase


class SealedStoreMachine(StoreMachine):
    """The same on pages that are compressed and sealed."""

    def kept(self) -> dict[str, Any]:
        key = self.folder / "key"
        if not key.exists():
            key.write_text(secrets.token_hex(32))
            key.chmod(0o600)
        return {"compression": "zstd", "key_file": str(key)}


SealedStoreMachine.TestCase.settings = settings(
    max_examples=8, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSealedStoreMachine = SealedStoreMachine.TestCase
