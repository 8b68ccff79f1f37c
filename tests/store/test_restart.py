"""What outlives a process: replay, torn tails, killed writers, foreign folders."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from workmem.core.errors import ConfigError
from workmem.core.outcomes import MissReason, TierName
from workmem.store.config import DramConfig, StoreConfig
from workmem.store.contract import PageWrite, SaveState
from workmem.store.store import Store
from workmem.testing.pages import SLICED, Chain, namespace, read_all, settle

pytestmark = pytest.mark.timeout(60)


def test_what_was_saved_yesterday_is_a_hit_today(kit):
    small, large = Chain(namespace("a"), 20), Chain(namespace("b", SLICED), 3)
    store = kit.open()
    small.save(store)
    large.save(store)
    store.close()
    again = kit.open()
    assert again.register(small.space) == small.root
    again.register(large.space)
    assert small.tiers(again) == (TierName.SSD,) * 20
    assert read_all(again, small.root, small.keys) == 20
    assert read_all(again, large.root, large.keys) == 3
    assert small.tiers(again) == (TierName.DRAM,) * 20
    assert small.save(again) == [SaveState.ALREADY_THERE] * 20


def test_promotion_is_shared_by_leases_that_overlap(kit):
    chain = Chain(namespace(), 12)
    store = kit.open()
    chain.save(store)
    store.close()
    again = kit.open()
    again.register(chain.space)
    leases = [again.lease(chain.root, chain.keys, owner=str(number), ttl_s=60) for number in range(3)]
    for lease in leases:
        settle(lease)
        assert lease.ready == 12
        lease.release()
    assert again.gauges()["store_promoted_total"] == 12


def test_lease_given_back_while_its_pages_are_on_the_way(kit):
    chain = Chain(namespace(), 30)
    store = kit.open()
    chain.save(store)
    store.close()
    again = kit.open()
    again.register(chain.space)
    again.lease(chain.root, chain.keys, owner="hasty", ttl_s=60).release()
    assert read_all(again, chain.root, chain.keys) == 30
    again.audit()


def reopened_with_slow_reads(kit, monkeypatch, chain):
    """A store that has `chain` on ssd only, and the event that its reads wait for."""
    store = kit.open()
    chain.save(store)
    store.close()
    again = kit.open()
    again.register(chain.space)
    may_read, inner = threading.Event(), again._below.reader._fill

    def fill(run, pages):
        assert may_read.wait(30)
        return inner(run, pages)

    monkeypatch.setattr(again._below.reader, "_fill", fill)
    return again, may_read


def test_a_holder_hears_of_each_page_and_of_the_end(kit, monkeypatch):
    chain = Chain(namespace(), 12)
    again, is_subscribed = reopened_with_slow_reads(kit, monkeypatch, chain)
    lease = again.lease(chain.root, chain.keys, owner="watcher", ttl_s=60)
    seen, settled = [], threading.Event()
    lease.on_ready(lambda: seen.append(lease.ready))
    lease.on_settled(settled.set)
    is_subscribed.set()
    assert settled.wait(30)
    lease.on_ready(lambda: seen.append(-1))
    assert seen[-1] == -1, "a lease that has settled says so at once"
    assert seen[-2] == 12
    assert seen[:-1] == sorted(set(seen[:-1]))
    assert len(seen) > 2
    lease.release()


def test_a_lease_that_ends_early_tells_who_waits_for_its_pages(kit, monkeypatch):
    chain = Chain(namespace(), 3)
    again, is_ended = reopened_with_slow_reads(kit, monkeypatch, chain)
    lease = again.lease(chain.root, chain.keys, owner="late", ttl_s=60)
    seen = []
    lease.on_ready(lambda: seen.append(lease.failed))
    again.pool.leases.end_leases()
    is_ended.set()
    assert seen == [MissReason.EXPIRED]


def test_a_start_takes_the_memory_that_its_hits_will_need(kit, monkeypatch):
    for name in ("_WARM_AHEAD_BYTES", "_WARM_LOW_BYTES"):
        monkeypatch.setattr(f"workmem.store.store.{name}", 0)
    chain = Chain(namespace(), 12)
    store = kit.open()
    chain.save(store)
    store.close()
    again = kit.open()
    live = again.gauges()["store_ssd_live_bytes"]
    assert live > 0
    for _ in range(500):
        if again.arena._warm_bytes >= live:
            return
        time.sleep(0.01)
    raise AssertionError(f"{again.arena._warm_bytes} of {live} bytes")


def test_journal_torn_at_any_byte_of_its_end_serves_what_is_whole(kit):
    chain = Chain(namespace(), 4)
    store = kit.open()
    store.register(chain.space)
    ends = []
    for index in range(4):
        store.save(chain.root, chain.writes(indices=[index]))
        assert store.flush(10)
        ends.append((kit.folder / "journal").stat().st_size)
    store.close()
    whole = (kit.folder / "journal").read_bytes()
    assert len(whole) == ends[-1]
    for cut in range(ends[-2], ends[-1] + 1, 3):
        copy = kit.folder.parent / "torn"
        shutil.copytree(kit.folder, copy)
        (copy / "journal").write_bytes(whole[:cut])
        again = kit.open(path=copy)
        again.register(chain.space)
        expected = 4 if cut == ends[-1] else 3
        assert again.lookup(chain.root, chain.keys).blocks == expected
        assert read_all(again, chain.root, chain.keys) == expected
        assert chain.save(again)[3] is (SaveState.ALREADY_THERE if expected == 4 else SaveState.STORED)
        again.close()
        shutil.rmtree(copy)


@pytest.mark.parametrize("distance", [1, 40, 97, 130, 200])
def test_flipped_journal_byte_ends_replay_there(kit, distance):
    chain = Chain(namespace(), 4)
    store = kit.open()
    store.register(chain.space)
    for index in range(4):
        store.save(chain.root, chain.writes(indices=[index]))
        store.flush(10)
    store.close()
    journal = kit.folder / "journal"
    raw = bytearray(journal.read_bytes())
    raw[-distance] ^= 0x40
    journal.write_bytes(raw)
    again = kit.open()
    again.register(chain.space)
    found = again.lookup(chain.root, chain.keys).blocks
    assert found in (2, 3)
    assert read_all(again, chain.root, chain.keys) == found
    assert chain.save(again).count(SaveState.STORED) == 4 - found


@pytest.mark.parametrize("damage", [b"", b"no journal at all" * 10])
def test_journal_that_is_none_starts_empty(kit, damage):
    chain = Chain(namespace(), 2)
    store = kit.open()
    chain.save(store)
    store.close()
    (kit.folder / "journal").write_bytes(damage)
    again = kit.open()
    assert chain.save(again) == [SaveState.STORED] * 2
    assert "store.ssd.journal" in kit.names()
    assert len(list((kit.folder / "segments").iterdir())) == 1


def test_segment_files_swapped_give_misses_never_wrong_bytes(kit):
    first, second = Chain(namespace(), 4, seed=1), Chain(namespace(), 4, seed=2)
    store = kit.open(ssd="256KiB")
    first.save(store)
    second.save(store)
    store.close()
    files = sorted((kit.folder / "segments").iterdir())
    assert len(files) >= 2
    a, b = files[0].read_bytes(), files[1].read_bytes()
    files[0].write_bytes(b)
    files[1].write_bytes(a)
    again = kit.open(ssd="256KiB")
    again.register(first.space)
    assert sum(read_all(again, chain.root, chain.keys) for chain in (first, second)) < 8
    again.audit()


def test_pages_swapped_inside_a_segment_are_quarantined(kit):
    chain = Chain(namespace(), 2)
    store = kit.open()
    chain.save(store)
    store.close()
    (file,) = (kit.folder / "segments").iterdir()
    raw = file.read_bytes()
    assert len(raw) == 4096 + 2 * 8192
    file.write_bytes(raw[:4096] + raw[4096 + 8192 :] + raw[4096 : 4096 + 8192])
    again = kit.open()
    again.register(chain.space)
    lease = again.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    settle(lease)
    assert (lease.ready, lease.failed) == (0, MissReason.CORRUPT)
    lease.release()


def test_segment_of_a_copied_store_is_left_out(kit):
    chain = Chain(namespace(), 2)
    other = kit.folder.parent / "other"
    for path in (kit.folder, other):
        store = kit.open(path=path)
        chain.save(store)
        store.close()
    (mine,), (theirs,) = (kit.folder / "segments").iterdir(), (other / "segments").iterdir()
    mine.write_bytes(theirs.read_bytes())
    again = kit.open()
    again.register(chain.space)
    assert chain.tiers(again) == ()


def test_folder_of_another_model_gives_no_hit(kit):
    chain = Chain(namespace("weights of today"), 3)
    store = kit.open()
    chain.save(store)
    store.close()
    again = kit.open()
    changed = Chain(namespace("weights of tomorrow"), 3)
    again.register(changed.space)
    assert changed.tokens == chain.tokens
    assert changed.tiers(again) == ()
    assert again.lookup(changed.root, chain.keys).blocks == 0


def test_format_of_a_later_version_stops_the_start(kit):
    kit.open().close()
    (kit.folder / "FORMAT").write_text('{"format":99,"store_id":"' + "00" * 16 + '"}')
    with pytest.raises(ConfigError, match="format 99"):
        kit.open()
    (kit.folder / "FORMAT").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        kit.open()


def test_two_processes_never_share_a_folder(kit):
    kit.open()
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}"):
        kit.open()


def test_folder_that_cannot_be_made_names_the_setting(kit, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"\$\.store\.ssd\.path"):
        kit.open(path=tmp_path / "file" / "below")


def test_removed_segments_are_no_crash(kit):
    chain = Chain(namespace(), 5)
    store = kit.open()
    chain.save(store)
    store.close()
    shutil.rmtree(kit.folder / "segments")
    again = kit.open()
    again.register(chain.space)
    assert chain.tiers(again) == ()
    assert chain.save(again) == [SaveState.STORED] * 5


_WRITER = """
import sys
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.testing.pages import Chain, namespace
config = StoreConfig(dram=DramConfig(bytes="2MiB"), ssd=SsdConfig(path=sys.argv[1], bytes="1MiB"))
store = Store(config)
start = int(sys.argv[2])
for seed in range(start, start + 10_000):
    chain = Chain(namespace(), 6, seed=seed)
    chain.save(store)
    print(seed, flush=True)
"""


def test_killed_writer_leaves_every_flushed_page_and_no_wrong_one(kit):
    start = 0
    for round_number in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(kit.folder), str(start)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        last = start
        for _ in range(3 + 23 * round_number):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        for line in process.stdout:
            last = int(line)
        process.wait()
        process.stdout.close()
        store = kit.open(ssd="1MiB", dram="2MiB")
        store.register(namespace())
        newest = Chain(namespace(), 6, seed=last)
        assert read_all(store, newest.root, newest.keys) == 6
        for seed in range(last + 2):
            chain = Chain(namespace(), 6, seed=seed)
            read_all(store, chain.root, chain.keys)
        store.audit()
        assert store.gauges()["store_quarantines_total"] == 0
        store.close()
        start = last + 1


def test_no_folder_is_never_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^\$\.store\.ssd\.path: is empty"):
        Store(StoreConfig(dram=DramConfig(bytes="1MiB")))
    assert list(tmp_path.iterdir()) == []


def test_quarantined_page_stays_gone_after_a_restart(kit):
    chain = Chain(namespace(), 3)
    store = kit.open()
    chain.save(store)
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    lease.quarantine(1)
    lease.release()
    store.close()
    again = kit.open()
    again.register(chain.space)
    found = again.lookup(chain.root, chain.keys)
    assert (found.blocks, found.reason) == (1, MissReason.EVICTED)


def test_page_of_the_same_key_from_another_store_is_not_ours(kit):
    chain = Chain(namespace(), 1)
    other = kit.folder.parent / "other"
    for path, byte in ((kit.folder, b"a"), (other, b"b")):
        store = kit.open(path=path)
        store.register(chain.space)

        def fill(view: memoryview, byte: bytes = byte) -> None:
            view[:] = byte * len(view)

        store.save(chain.root, [PageWrite(chain.block(0), fill, lambda _: None)])
        store.flush(10)
        store.close()
    (mine,), (theirs,) = (kit.folder / "segments").iterdir(), (other / "segments").iterdir()
    mine.write_bytes(mine.read_bytes()[:4096] + theirs.read_bytes()[4096:])
    again = kit.open()
    again.register(chain.space)
    lease = again.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    settle(lease)
    assert (lease.ready, lease.failed) == (0, MissReason.CORRUPT)
    lease.release()
