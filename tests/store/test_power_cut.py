"""Power goes at any moment: what was acknowledged is there and right, and nothing else is wrong."""

from __future__ import annotations

import random
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from workmem.core.events import BlockEvicted, BlockQuarantined, Event
from workmem.core.outcomes import TierName
from workmem.store.codecs.settings import page_keyring
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.contract import SaveState
from workmem.store.device import Access, BlockDevice
from workmem.store.store import Store
from workmem.store.tiers import journal
from workmem.store.tools.folder_view import read_folder
from workmem.testing.faulty_device import FaultPlan, FaultyDevice
from workmem.testing.pages import SMALL, Chain, namespace, page_bytes, settle
from workmem.testing.power_cut import SECTOR_BYTES, PowerCutDevice

pytestmark = pytest.mark.timeout(170)

WIDE = type(SMALL)(dtype="fp32", layers=4, kv_heads=4, head_dim=32, block_tokens=4)
SPACES = (namespace("small weights", SMALL), namespace("wide weights", WIDE))
"""Named so that no other bytes say the same."""
CHAINS = tuple(Chain(space, 4, seed=seed) for space in SPACES for seed in range(5))
ROOTS = {key: chain.root for chain in CHAINS for key in chain.keys}


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Settings of how pages are kept, which a test may add to."""
    settings: dict[str, str] = {}
    monkeypatch.setattr(sys.modules[__name__], "KEPT", settings)
    return settings


KEPT: dict[str, str] = {}


def store_config(folder: Path) -> StoreConfig:
    ssd = msgspec.structs.replace(SsdConfig(path=str(folder), bytes="256KiB", readers=1), **KEPT)
    return StoreConfig(dram=DramConfig(bytes="512KiB"), ssd=ssd)


def open_store(folder: Path, device: BlockDevice | None = None, sink=lambda event: None) -> Store:
    return Store(store_config(folder), sink, None, device)


class Workload:
    """Random work on a store over a disk that logs, and what a cut at each operation may not take away."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.device = PowerCutDevice(folder)
        self.plan = FaultPlan()
        self.saved: list[tuple[int, int, bytes]] = []
        """Operations done before the save and before its acknowledgement, and the key."""
        self.lost: list[tuple[int, str]] = []
        """Operations done before a block was struck out, and its key as events show it."""
        self.purged: list[tuple[int, int, bytes]] = []
        """Operations done before a purge and before its acknowledgement, and the namespace's root."""
        self.store = self._open()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.chance.choice(
                (
                    self.save,
                    self.save,
                    self.save,
                    self.burst,
                    self.trouble,
                    self.strike,
                    self.purge,
                    self.reopen,
                )
            )()
        self.store.audit()
        self.store.close()

    def save(self) -> None:
        self.save_all([self.chance.choice(CHAINS)])

    def burst(self) -> None:
        self.save_all(self.chance.sample(CHAINS, 3))

    def trouble(self) -> None:
        """One call to the disk fails on the way."""
        self.plan.fail_at = self.plan.calls + self.chance.randint(1, 8)
        self.burst()
        self.plan.fail_at = None

    def save_all(self, chains: Sequence[Chain]) -> None:
        started = self.device.operations
        states: list[tuple[bytes, SaveState]] = []
        for chain in chains:
            for index in range(self.chance.randint(1, len(chain.keys))):
                key = chain.keys[index]
                self.store.save(
                    chain.root, chain.writes(lambda state, key=key: states.append((key, state)), [index])
                )
        assert self.store.flush(20)
        acknowledged = self.device.operations
        # A block that was there already may be in dram alone: the tier below has let it go.
        self.saved += [(started, acknowledged, key) for key, state in states if state is SaveState.STORED]

    def strike(self) -> None:
        chain = self.chance.choice(CHAINS)
        with_key = self.chance.choice(chain.keys)
        if not self.store.lookup(chain.root, [with_key]).blocks:
            return
        lease = self.store.lease(chain.root, [with_key], owner="strike", ttl_s=60)
        settle(lease)
        lease.quarantine(0)
        lease.release()

    def purge(self) -> None:
        if self.chance.random() < 0.5:
            return
        started, space = self.device.operations, self.chance.choice(SPACES)
        self.store.purge(lambda namespace: namespace == space)
        assert self.store.flush(20)
        self.purged.append((started, self.device.operations, space.root()))

    def reopen(self) -> None:
        self.store.close()
        self.store = self._open()

    def promised(self, at: int) -> set[bytes]:
        """Keys that a cut after `at` operations must leave readable."""
        lost = [(when, name) for when, name in self.lost if when <= at]
        return {
            key
            for started, acknowledged, key in self.saved
            if acknowledged <= at
            and not any(when >= started and key.hex().startswith(name) for when, name in lost)
            and not any(started <= when <= at and root == ROOTS[key] for when, _, root in self.purged)
        }

    def forbidden(self, at: int) -> set[bytes]:
        """Keys that a cut after `at` operations must not bring back: purged, and not saved since."""
        gone = {
            root: max(start for start, done, other in self.purged if other == root and done <= at)
            for _, acknowledged, root in self.purged
            if acknowledged <= at
        }
        return {
            key
            for key, root in ROOTS.items()
            if root in gone and not any(key == saved and done >= gone[root] for _, done, saved in self.saved)
        }

    def forgotten(self, at: int) -> list[bytes]:
        """Fingerprints that a cut after `at` operations must not leave in any file: purged, and nothing saved since."""
        return [
            space.model_fingerprint.encode()
            for space in SPACES
            if any(
                root == space.root()
                and acknowledged <= at
                and not any(ROOTS[key] == root and done >= started for _, done, key in self.saved)
                for started, acknowledged, root in self.purged
            )
        ]

    def _open(self) -> Store:
        store = open_store(self.folder, FaultyDevice(self.plan, self.device), self._hear)
        for space in SPACES:
            store.register(space)
        return store

    def _hear(self, event: Event) -> None:
        if isinstance(event, BlockQuarantined) or (
            isinstance(event, BlockEvicted) and event.tier is TierName.SSD
        ):
            self.lost.append((self.device.operations, event.key))


def check(folder: Path, work: Workload, at: int) -> None:
    """Open what the cut left: all that was promised is there, and all that is there is right."""
    promised, forgotten = work.promised(at), work.forgotten(at)
    left = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    assert not [name for name in forgotten if name in left], "a purged namespace is still named"
    with open_store(folder) as store:
        found: set[bytes] = set()
        for chain in CHAINS:
            store.register(chain.space)
            held = [key for key in chain.keys if store.lookup(chain.root, [key]).blocks]
            lease = store.lease(chain.root, held, owner="check", ttl_s=60)
            settle(lease)
            assert lease.failed is None, "the journal names a page that is not what was written"
            for index, key in enumerate(held):
                assert bytes(lease.page(index)) == page_bytes(key, chain.space.layout)
            lease.release()
            found.update(held)
        missing = {key.hex()[:16] for key in set(promised) - found}
        assert missing == set()
        assert found.isdisjoint(work.forbidden(at)), "purged blocks came back"
        assert store.flush(20)
        named = {
            space.root for space in read_folder(folder, keyring=page_keyring(store_config(folder).ssd)).spaces
        }
        assert named == {ROOTS[key] for key in found}, "a namespace without pages is named"
        states = CHAINS[0].save(store)
        assert SaveState.DROPPED not in states
        store.audit()
    # A segment that was just begun is not left behind for ever.
    assert all(any(file.read_bytes()[:40]) for file in (folder / "segments").iterdir())


@pytest.fixture
def small_journal(monkeypatch):
    """Rewrites happen after a handful of records."""
    monkeypatch.setattr(journal, "REWRITE_RECORDS", 6)


@pytest.mark.usefixtures("small_journal")
def test_power_cut_at_every_operation_keeps_what_was_acknowledged(tmp_path):
    work = Workload(tmp_path / "store", seed=3)
    work.run(14)
    operations = work.device.operations
    assert operations > 60
    for at in range(operations + 1):
        left = tmp_path / "left"
        work.device.cut(left, seed=at, at=at)
        check(left, work, at)
        shutil.rmtree(left)


@pytest.mark.usefixtures("small_journal")
def test_power_cut_at_every_operation_keeps_pages_that_are_compressed_and_sealed(tmp_path, kept):
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    kept |= {"compression": "zstd", "key_file": str(key)}
    work = Workload(tmp_path / "store", seed=5)
    work.run(7)
    operations = work.device.operations
    assert operations > 30
    for at in range(0, operations + 1, 2):
        left = tmp_path / "left"
        work.device.cut(left, seed=at, at=at)
        check(left, work, at)
        shutil.rmtree(left)


# Threads decide the order of operations: a smaller example would be another run.
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_power_cut_anywhere_in_long_runs_and_again_in_the_recovery(seed):
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(journal, "REWRITE_RECORDS", 6)
        folder = Path(name)
        work = Workload(folder / "store", seed)
        work.run(60)
        for number in range(4):
            at = work.chance.randint(0, work.device.operations)
            first, again = folder / f"first-{number}", folder / f"again-{number}"
            work.device.cut(first, seed=seed + number, at=at)
            recovery = PowerCutDevice(first)
            open_store(first, recovery).close()
            recovery.cut(again, seed=seed, at=work.chance.randint(0, recovery.operations))
            check(first, work, at)
            check(again, work, at)


def test_a_cut_keeps_what_was_synced_and_any_part_of_what_was_not(tmp_path):
    device = PowerCutDevice(tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    file = device.open(tmp_path / "disk" / "a", Access.CREATE, direct=False)
    device.sync_folder(tmp_path / "disk")
    file.writev([memoryview(b"1" * 2048)], 0)
    file.sync()
    file.writev([memoryview(b"2" * 1024)], 512)
    file.writev([memoryview(b"3" * 1024)], 2048)
    file.close()
    seen = set()
    for seed in range(200):
        device.cut(tmp_path / str(seed), seed=seed)
        raw = (tmp_path / str(seed) / "a").read_bytes()
        assert len(raw) in (2048, 3072)
        sectors = [raw[at : at + SECTOR_BYTES] for at in range(0, len(raw), SECTOR_BYTES)]
        assert all(len(set(sector)) == 1 for sector in sectors)
        seen.add(b"".join(sector[:1] for sector in sectors))
    assert all(state.startswith(b"1") and state[3:4] == b"1" for state in seen)
    assert {b"1111", b"1221", b"1211", b"1121", b"122133", b"1111\0\0", b"111133", b"12213\0"} <= seen


def test_a_cut_may_undo_names_until_their_folder_is_synced(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    (root / "old").write_bytes(b"old")
    (root / "gone").write_bytes(b"gone")
    device = PowerCutDevice(root)
    file = device.open(root / "fresh", Access.CREATE, direct=False)
    file.writev([memoryview(b"new")], 0)
    file.sync()
    file.close()
    device.unlink(root / "gone")
    device.rename(root / "fresh", root / "old")
    assert device.operations == 6

    def states(at: int) -> set[tuple[tuple[str, bytes], ...]]:
        found = set()
        for seed in range(100):
            left = tmp_path / f"{at}-{seed}"
            device.cut(left, seed=seed, at=at)
            found.add(tuple(sorted((path.name, path.read_bytes()) for path in left.iterdir())))
        return found

    gone, old, fresh = ("gone", b"gone"), ("old", b"old"), ("fresh", b"new")
    assert states(3) == {(gone, old), (fresh, gone, old)}
    unlinked = {(gone, old), (fresh, gone, old), (old,), (fresh, old)}
    assert states(4) == unlinked
    renamed = ("old", b"new")
    assert states(5) == {*unlinked, (gone, renamed), (renamed,)}
    assert states(6) == {(renamed,)}
    with pytest.raises(FileExistsError):
        device.cut(tmp_path / "6-0", seed=0)
