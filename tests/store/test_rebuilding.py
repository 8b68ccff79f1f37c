"""A tier that keeps failing is drained and opened anew while the store serves: nothing wrong, nothing lost, no restart."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import threading
import time
from pathlib import Path

import pytest

from workmem.core.errors import CapacityError
from workmem.core.events import TierStateChanged
from workmem.core.layout import Namespace
from workmem.core.outcomes import MissReason, TierName
from workmem.store import rebuilding, ticker, writer
from workmem.store.breaker import TRIPS_MAX
from workmem.store.contract import SaveState
from workmem.testing.faulty_device import FaultPlan, FaultyDevice
from workmem.testing.pages import SMALL, Chain, namespace, read_all, settle
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _in_haste(monkeypatch):
    monkeypatch.setattr(ticker, "TICK_S", 0.02)
    monkeypatch.setattr(writer, "_TICK_S", 0.02)


def states(kit) -> list[str]:
    return [event.state for event in kit.of(TierStateChanged)]


def is_back(store) -> bool:
    return store.gauges()["store_ssd_error"] == 0


def fail_reads(kit, store, plan: FaultPlan, chains: list[Chain]) -> None:
    """Have reads fail, pause after pause, until the tier is given up."""
    plan.reads_fail = errno.EIO
    for trips, chain in enumerate(chains):
        read_all(store, chain.root, chain.keys)
        wait_until(lambda trips=trips: states(kit).count("error") > trips)
        if trips < len(chains) - 1:
            wait_until(lambda trips=trips: states(kit).count("ok") > trips)
            wait_until(lambda: store.pool.state.reads_ssd)
    wait_until(lambda: store.gauges()["store_ssd_away"])


class Swapped:
    """The path of a store, which leads to one folder after the other; `to` changes that in one step."""

    def __init__(self, kit, folder: Path) -> None:
        self.path, self.own = kit.folder, folder / "own"
        self.own.mkdir()
        self.to(self.own)

    def to(self, target: Path) -> None:
        link = self.path.with_suffix(".link")
        link.symlink_to(target)
        link.replace(self.path)


@pytest.fixture
def swapped(kit, tmp_path):
    return Swapped(kit, tmp_path)


def test_a_disk_that_fails_for_long_and_heals_is_opened_anew_and_hits_again(kit):
    store = kit.open()
    chains = [Chain(namespace(), 4, seed=seed) for seed in range(12)]
    for chain in chains:
        chain.save(store)
    store.close()
    plan = FaultPlan()
    again = kit.open(device=FaultyDevice(plan), retry_s=0.05)
    again.register(namespace())
    fail_reads(kit, again, plan, chains[:3])
    lookup = again.lookup(chains[11].root, chains[11].keys)
    assert (lookup.blocks, lookup.reason) == (0, MissReason.UNAVAILABLE)
    fresh = Chain(namespace(), 3, seed=77)
    assert fresh.save(again) == [SaveState.STORED] * 3
    # It is tried again and again, each time after a longer pause.
    wait_until(lambda: states(kit).count("rebuilding") >= 2)
    again.audit()
    plan.reads_fail = 0
    wait_until(lambda: is_back(again))
    assert states(kit)[-3:] == ["error", "rebuilding", "ok"]
    assert states(kit).index("draining") < states(kit).index("rebuilding")
    for chain in chains[3:]:
        assert chain.tiers(again) == (TierName.SSD,) * 4
        assert read_all(again, chain.root, chain.keys) == 4
    # What dram alone held while it was away is written now.
    assert again.flush(20)
    again.audit()
    again.close()
    third = kit.open()
    third.register(fresh.space)
    assert read_all(third, fresh.root, fresh.keys) == 3
    assert third.gauges()["store_quarantines_total"] == 0


def test_a_journal_that_cannot_be_written_is_opened_anew(kit):
    plan = FaultPlan()
    store = kit.open(device=FaultyDevice(plan), retry_s=0.05)
    before = Chain(namespace(), 4, seed=1)
    before.save(store)
    plan.writes_fail = errno.EIO
    during = Chain(namespace(), 4, seed=2)
    assert during.save(store) == [SaveState.STORED] * 4
    wait_until(lambda: "rebuilding" in states(kit))
    # It can be read, and so it is there; only that it takes pages is to be waited for.
    wait_until(lambda: not store.gauges()["store_ssd_away"])
    wait_until(lambda: states(kit)[-1] == "error")
    assert store.gauges()["store_ssd_pages"] == 4
    store.audit()
    plan.writes_fail = 0
    wait_until(lambda: is_back(store))
    wait_until(lambda: store.gauges()["store_ssd_pages"] == 8)
    store.close()
    again = kit.open()
    again.register(before.space)
    for chain in (before, during):
        assert read_all(again, chain.root, chain.keys) == 4


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_is_full_goes_on_being_read_and_is_not_given_up(kit, code):
    plan = FaultPlan()
    store = kit.open(device=FaultyDevice(plan), retry_s=0.02)
    Chain(namespace(), 4, seed=1).save(store)
    plan.writes_fail = code
    Chain(namespace(), 4, seed=2).save(store)
    wait_until(lambda: store.gauges()["store_ssd_write_errors_total"] >= 6, 20)
    assert states(kit) == ["error"]
    assert store.gauges()["store_ssd_pages"] == 4


def test_a_folder_that_is_removed_is_made_anew_and_takes_pages(kit):
    store = kit.open(retry_s=0.1, dram="64KiB")
    old = [Chain(namespace(), 4, seed=seed) for seed in range(8)]
    for chain in old:
        chain.save(store)
    below = next(chain for chain in old if set(chain.tiers(store)) == {TierName.SSD})
    shutil.rmtree(kit.folder)
    wait_until(lambda: states(kit) == ["error", "draining", "rebuilding", "ok"])
    assert "the folder is gone" in kit.of(TierStateChanged)[0].reason
    assert store.gauges()["store_ssd_rebuilds_total"] == 1
    lookup = store.lookup(below.root, below.keys)
    assert (lookup.blocks, lookup.reason) == (0, MissReason.UNAVAILABLE)
    store.audit()
    more = [Chain(namespace(), 4, seed=100 + seed) for seed in range(8)]
    for chain in (*more, below):
        assert chain.save(store) == [SaveState.STORED] * 4
    store.audit()
    store.close()
    again = kit.open()
    again.register(below.space)
    for chain in (*more, below):
        assert read_all(again, chain.root, chain.keys) == 4
    assert again.gauges()["store_quarantines_total"] == 0


def test_the_folder_of_another_store_is_not_taken(kit, tmp_path, swapped):
    other, stranger = Chain(namespace(), 4, seed=5), tmp_path / "stranger"
    with kit.open(path=stranger) as store:
        other.save(store)
    store = kit.open(retry_s=0.1)
    own = Chain(namespace(), 4, seed=1)
    own.save(store)
    swapped.to(stranger)
    wait_until(lambda: states(kit).count("rebuilding") >= 3)
    assert "another store" in store.ssd_problem
    assert other.tiers(store) == ()
    assert own.save(store) == [SaveState.ALREADY_THERE] * 4
    more = Chain(namespace(), 4, seed=2)
    assert more.save(store) == [SaveState.STORED] * 4
    store.audit()
    # The pauses grow.
    told = [event.reason for event in kit.of(TierStateChanged) if "again in" in event.reason]
    assert "again in 0.1 s" in told[0]
    assert "again in 0.2 s" in told[1]
    # Its own put back is taken, with what it held, and gets what came meanwhile.
    swapped.to(swapped.own)
    wait_until(lambda: is_back(store))
    assert store.ssd_problem == ""
    wait_until(lambda: store.gauges()["store_ssd_pages"] == 8)
    store.close()
    again = kit.open()
    again.register(own.space)
    assert read_all(again, more.root, more.keys) == 4
    with kit.open(path=stranger) as untouched:
        untouched.register(other.space)
        assert read_all(untouched, other.root, other.keys) == 4


def test_a_folder_that_another_process_holds_or_of_another_format_is_not_taken(kit, tmp_path, swapped):
    store = kit.open(retry_s=0.1)
    Chain(namespace(), 4).save(store)
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "FORMAT").write_bytes(b'{"format":99,"store_id":"' + b"00" * 16 + b'"}')
    swapped.to(strange)
    wait_until(lambda: "has format 99" in store.ssd_problem)
    with kit.open(path=swapped.own):
        swapped.to(swapped.own)
        wait_until(lambda: "in use by process" in store.ssd_problem)
        assert store.gauges()["store_ssd_away"]
    wait_until(lambda: is_back(store))
    assert store.gauges()["store_ssd_pages"] == 4


def test_what_was_purged_while_the_tier_was_away_does_not_come_back_with_it(kit, tmp_path, swapped):
    mine = Chain(Namespace(model_fingerprint="model", layout=SMALL, tenant_salt="mine"), 4, seed=1)
    other, later = Chain(namespace(), 4, seed=2), Chain(namespace("later"), 4, seed=3)
    store = kit.open(retry_s=0.1)
    mine.save(store)
    other.save(store)
    swapped.to(tmp_path / "nowhere")
    wait_until(lambda: store.ssd_problem)
    store.purge(lambda space: space == mine.space)
    later.save(store)
    swapped.to(swapped.own)
    wait_until(lambda: is_back(store))
    assert store.flush(20)
    assert mine.tiers(store) == ()
    assert b'"mine"' not in b"".join(file.read_bytes() for file in swapped.own.rglob("*") if file.is_file())
    for chain in (other, later):
        assert read_all(store, chain.root, chain.keys) == 4
    store.audit()
    store.close()
    again = kit.open()
    for chain in (mine, other, later):
        again.register(chain.space)
    assert mine.tiers(again) == ()
    for chain in (other, later):
        assert read_all(again, chain.root, chain.keys) == 4


def test_a_purge_that_the_failing_journal_never_heard_of_holds_when_it_is_opened_anew(kit):
    mine = Chain(Namespace(model_fingerprint="model", layout=SMALL, tenant_salt="mine"), 4, seed=1)
    other = Chain(namespace(), 4, seed=2)
    plan = FaultPlan()
    store = kit.open(device=FaultyDevice(plan), retry_s=0.05, io="buffered")
    mine.save(store)
    plan.writes_fail = errno.EIO
    other.save(store)
    wait_until(lambda: states(kit))
    store.purge(lambda space: space == mine.space)
    assert not store.flush(0.1)
    wait_until(lambda: store.gauges()["store_ssd_rebuilds_total"] >= 1)
    assert mine.tiers(store) == ()
    assert not store.flush(0.1)
    plan.writes_fail = 0
    assert store.flush(20)
    wait_until(lambda: is_back(store))
    store.close()
    again = kit.open()
    again.register(mine.space)
    again.register(other.space)
    assert mine.tiers(again) == ()
    assert read_all(again, other.root, other.keys) == 4


def test_a_lease_on_a_tier_that_is_given_up_fails_as_a_miss_at_once(kit):
    store = kit.open()
    chain = Chain(namespace(), 4)
    chain.save(store)
    store.close()
    plan = FaultPlan()
    again = kit.open(device=FaultyDevice(plan), readers=1, retry_s=0.1)
    again.register(chain.space)
    may_read = threading.Event()
    plan.before_read = lambda path, offset: path.suffix == ".seg" and may_read.wait(20)
    lease = again.lease(chain.root, chain.keys, owner="t", ttl_s=30)
    shutil.rmtree(kit.folder)
    settle(lease)
    assert (lease.ready, lease.failed) == (0, MissReason.UNAVAILABLE)
    wait_until(lambda: is_back(again))
    again.audit()
    lease.release()
    used = again.gauges()["store_dram_used_bytes"]
    assert used > 0, "the read that is under way gave up its frames under the disk's hand"
    may_read.set()
    wait_until(lambda: again.gauges()["store_dram_used_bytes"] == 0)
    again.audit()
    assert chain.save(again) == [SaveState.STORED] * 4


def test_a_tier_that_could_not_be_opened_at_the_start_is_opened_later(kit):
    before = Chain(namespace("before"), 4, seed=1)
    with kit.open() as store:
        before.save(store)
    plan = FaultPlan()
    plan.fail_at = 1
    again = kit.open(device=FaultyDevice(plan), retry_s=0.3)
    assert again.ssd_problem
    assert again.gauges()["store_ssd_away"]
    # Namespaces get numbers here that the journal has given to others.
    one, two = Chain(namespace("one"), 4, seed=2), Chain(namespace("two"), 4, seed=3)
    one.save(again)
    two.save(again)
    wait_until(lambda: is_back(again))
    again.register(before.space)
    assert again.flush(20)
    chains = (before, one, two)
    for chain in chains:
        assert read_all(again, chain.root, chain.keys) == 4
    again.audit()
    again.close()
    third = kit.open()
    for chain in chains:
        third.register(chain.space)
        assert chain.tiers(third) == (TierName.SSD,) * 4
        assert read_all(third, chain.root, chain.keys) == 4


class Copies(FaultyDevice):
    """Copies the folder before each call that changes it: what a kill there leaves."""

    def __init__(self, plan: FaultPlan, folder: Path, into: Path) -> None:
        super().__init__(plan)
        self.folder, self.into, self.is_on = folder, into, False

    def _copy(self) -> None:
        if self.is_on:
            shutil.copytree(self.folder, self.into / str(len(list(self.into.iterdir()))))

    def open(self, path, access, *, direct):
        self._copy()
        return super().open(path, access, direct=direct)

    def rename(self, source, target):
        self._copy()
        super().rename(source, target)

    def unlink(self, path):
        self._copy()
        super().unlink(path)

    def sync_folder(self, path):
        self._copy()
        super().sync_folder(path)


def test_a_kill_anywhere_in_a_rebuild_leaves_a_folder_that_starts(kit, tmp_path, swapped):
    mine = Chain(Namespace(model_fingerprint="model", layout=SMALL, tenant_salt="mine"), 4, seed=1)
    other, into = Chain(namespace(), 4, seed=2), tmp_path / "left"
    into.mkdir()
    plan = FaultPlan()
    device = Copies(plan, swapped.own, into)
    store = kit.open(device=device, retry_s=0.05, io="buffered")
    for chain in (mine, other):
        chain.save(store)
    swapped.to(tmp_path / "nowhere")
    wait_until(lambda: store.ssd_problem)
    device.is_on = True
    store.purge(lambda space: space == mine.space)
    swapped.to(swapped.own)
    wait_until(lambda: is_back(store))
    assert store.flush(20)
    device.is_on = False
    store.close()
    left = sorted(into.iterdir())
    assert len(left) > 4
    for folder in left:
        with kit.open(path=folder) as again:
            again.register(other.space)
            assert read_all(again, other.root, other.keys) == 4, folder


def test_failing_the_nth_io_of_a_rebuild_delays_it_and_no_more(kit, tmp_path):
    number, is_clean = 0, False
    while not is_clean:
        number += 1
        assert number < 40
        plan = FaultPlan()
        (tmp_path / str(number)).mkdir()
        swapped = Swapped(kit, tmp_path / str(number))
        store = kit.open(device=FaultyDevice(plan), retry_s=0.02, readers=1, scrub_bytes_per_s=0)
        kept, lost = Chain(namespace(), 4, seed=1), Chain(namespace("gone"), 2, seed=2)
        kept.save(store)
        lost.save(store)
        swapped.to(tmp_path / "nowhere")
        wait_until(lambda store=store: store.ssd_problem)
        store.purge(lambda space, lost=lost: space == lost.space)
        plan.calls, plan.fail_at = 0, number
        swapped.to(swapped.own)
        wait_until(lambda store=store: is_back(store))
        is_clean = plan.calls < number
        assert lost.tiers(store) == ()
        assert store.flush(20)
        read_all(store, kept.root, kept.keys)
        store.audit()
        store.close()
        with kit.open(readers=1, scrub_bytes_per_s=0) as again:
            for chain in (kept, lost):
                again.register(chain.space)
            assert lost.tiers(again) == ()
            read_all(again, kept.root, kept.keys)
    assert number > 6


class Crowd:
    """Threads that save, lease, compare and purge until told to stop."""

    def __init__(self, store, chains: list[Chain]) -> None:
        self.store, self.chains = store, chains
        self.hits = 0
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(seed,)) for seed in range(2)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in self._threads)

    def _work(self, seed: int) -> None:
        dice = random.Random(seed)
        try:
            while not self._stop.is_set():
                self._do(dice.choice(self.chains), dice.random())
                time.sleep(0.002)
        except BaseException as error:
            self.errors.append(error)
            raise

    def _do(self, chain: Chain, what: float) -> None:
        if what < 0.45:
            self.store.save(chain.root, chain.writes())
        elif what < 0.98:
            with contextlib.suppress(CapacityError):
                self.hits += read_all(self.store, chain.root, chain.keys)
        else:
            self.store.purge(lambda space: space == chain.space)


def test_lookups_leases_saves_and_purges_while_it_is_drained_and_rebuilt(kit, tmp_path, monkeypatch):
    """No frame is lost, no byte is wrong, the ledger is exact and nobody hangs, however often it happens."""
    monkeypatch.setattr(rebuilding, "PAUSE_MAX_S", 0.01)
    store = kit.open(dram="128KiB", ssd="1MiB", retry_s=0.01)
    spaces = [Namespace(model_fingerprint="model", layout=SMALL, tenant_salt=name) for name in "abc"]
    chains = [Chain(spaces[seed % 3], 6, seed=seed) for seed in range(24)]
    for chain in chains:
        chain.save(store)
    crowd = Crowd(store, chains)
    try:
        for rounds in range(4):
            time.sleep(0.05)
            before = store.gauges()["store_ssd_rebuilds_total"]
            if rounds == 2:
                kit.folder.rename(tmp_path / str(rounds))

            def is_rebuilt(before=before, rounds=rounds) -> bool:
                if rounds != 2:
                    # As after reads that failed pause after pause. One that works meanwhile takes it back.
                    store._below.breaker._read_trips = TRIPS_MAX
                return store.gauges()["store_ssd_rebuilds_total"] > before or bool(crowd.errors)

            wait_until(is_rebuilt)
    finally:
        crowd.end()
    assert not crowd.errors
    wait_until(lambda: is_back(store))
    assert store.flush(20)
    store.audit()
    assert crowd.hits > 0
    assert store.gauges()["store_quarantines_total"] == 0
    store.close()
    again = kit.open()
    for chain in chains:
        again.register(chain.space)
        read_all(again, chain.root, chain.keys)
    assert again.gauges()["store_quarantines_total"] == 0
