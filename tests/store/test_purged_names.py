"""A purge is complete: who was purged is named nowhere in the folder, whatever happened on the way."""

from __future__ import annotations

import errno
import secrets
import shutil
import threading
from pathlib import Path

import pytest

from workmem.core.events import TierStateChanged
from workmem.core.layout import Namespace
from workmem.store import store as store_module
from workmem.store.codecs.settings import page_keyring
from workmem.store.config import SsdConfig
from workmem.store.tiers.entries import namespace_entry
from workmem.store.tiers.journal_records import DropEntry
from workmem.store.tools.folder_view import read_folder
from workmem.store.tools.stat import stat_of
from workmem.testing.faulty_device import FaultPlan, FaultyDevice
from workmem.testing.pages import SMALL, Chain, page_bytes, read_all
from workmem.testing.waiting import wait_until


def namespace(tenant: str, epoch: int = 0) -> Namespace:
    return Namespace(
        model_fingerprint=f"weights of {tenant}",
        layout=SMALL,
        tenant_salt=f"salt of {tenant}",
        weights_epoch=epoch,
    )


MINE, OTHER = Chain(namespace("mine"), 6, seed=1), Chain(namespace("other"), 6, seed=2)


def is_mine(space: Namespace) -> bool:
    return space.tenant_salt == "salt of mine"


def raw(folder: Path) -> bytes:
    """All bytes of all files."""
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


def is_named(folder: Path, chain: Chain = MINE) -> bool:
    """Whether a name of the namespace, its root, or a page of it can be found."""
    space, found = chain.space, raw(folder)
    words = (space.model_fingerprint.encode(), space.tenant_salt.encode(), chain.root)
    pages = (page_bytes(key, SMALL)[:64] for key in chain.keys)
    return any(word in found for word in (*words, *pages))


def save_in_turns(store) -> None:
    """So that they share their segments."""
    for index in range(6):
        for chain in (MINE, OTHER):
            store.register(chain.space)
            store.save(chain.root, chain.writes(indices=[index]))
    assert store.flush(20)


@pytest.mark.parametrize(
    "chosen",
    [
        is_mine,
        lambda space: space.model_fingerprint == "weights of mine",
        lambda space: space.root() == MINE.root,
    ],
    ids=["tenant", "model", "root"],
)
def test_who_was_purged_is_named_nowhere_while_the_store_runs_on(kit, chosen):
    store = kit.open(io="buffered")
    save_in_turns(store)
    assert is_named(kit.folder)
    store.purge(chosen)
    assert store.flush(20)
    assert not is_named(kit.folder)
    assert [space.root for space in stat_of(read_folder(kit.folder), show_names=True).spaces] == [
        OTHER.root.hex()[:12]
    ]
    assert read_all(store, OTHER.root, OTHER.keys) == 6
    # Others' pages do not bring it back; its own do, and under a number of its own.
    Chain(OTHER.space, 3, seed=9).save(store)
    assert not is_named(kit.folder)
    MINE.save(store)
    assert is_named(kit.folder)
    store.close()
    again = kit.open()
    for chain in (MINE, OTHER):
        again.register(chain.space)
        assert read_all(again, chain.root, chain.keys) == 6


def test_an_epoch_that_was_purged_is_listed_no_more(kit):
    store = kit.open()
    chains = [Chain(namespace("mine", epoch), 3, seed=epoch) for epoch in range(3)]
    for chain in chains:
        chain.save(store)
    store.purge(lambda space: space.weights_epoch < 2)
    assert store.flush(20)
    assert [space.namespace.weights_epoch for space in read_folder(kit.folder).spaces] == [2]


def test_a_namespace_is_named_with_its_first_page_only(kit):
    store = kit.open()
    store.register(MINE.space)
    OTHER.save(store)
    assert not is_named(kit.folder)
    MINE.save(store)
    assert is_named(kit.folder)


def test_a_namespace_whose_pages_were_all_evicted_is_forgotten_with_a_purge_and_a_start(kit):
    store = kit.open()
    save_in_turns(store)
    for how in ("purge", "start"):
        for chain in (MINE, OTHER):
            chain.save(store)
        with store.pool.state.outbox:
            for row in list(store.pool.space(MINE.root).rows.values()):
                store.pool.state.withdraw(row, "evicted")
        assert store.flush(20)
        assert MINE.root in (kit.folder / "journal").read_bytes()
        if how == "purge":
            assert store.purge(is_mine).blocks == 0
            assert store.flush(20)
        else:
            store.close()
            store = kit.open()
            store.register(MINE.space)
        assert MINE.root not in (kit.folder / "journal").read_bytes()
        assert b"mine" not in raw(kit.folder)


def test_a_sealed_folder_names_nobody_either(kit, tmp_path):
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    store = kit.open(key_file=str(key))
    save_in_turns(store)
    store.purge(is_mine)
    assert store.flush(20)
    view = read_folder(kit.folder, keyring=page_keyring(SsdConfig(key_file=str(key))))
    assert [space.root for space in view.spaces] == [OTHER.root]
    assert view.record_count == view.live_record_count


def test_a_purge_that_comes_while_the_journal_is_rewritten_is_in_the_next_one(kit, monkeypatch):
    store = kit.open(io="buffered")
    save_in_turns(store)
    index, wanted = store._below.tier.index, [True]
    snapshot = index.snapshot

    def meanwhile():
        records = snapshot()
        if wanted and wanted.pop():
            store.purge(is_mine)
        return records

    monkeypatch.setattr(index, "snapshot", meanwhile)
    store._below.tier._journal.is_broken = True
    Chain(OTHER.space, 1, seed=9).save(store)
    assert store.flush(20)
    assert not wanted
    assert not is_named(kit.folder)


def test_failing_the_nth_io_of_a_purge_delays_it_and_no_more(kit):
    number, clean_runs = 0, 0
    while clean_runs < 2:
        number += 1
        plan = FaultPlan()
        path = kit.folder / str(number)
        store = kit.open(path=path, device=FaultyDevice(plan), retry_s=0.02, io="buffered")
        save_in_turns(store)
        plan.calls, plan.fail_at = 0, number
        store.purge(is_mine)
        assert store.flush(20)
        assert not is_named(path), f"call {number}"
        clean_runs += plan.calls < number
        store.close()
        again = kit.open(path=path)
        again.register(OTHER.space)
        # A page that could not be read for its new place is lost, as any is that the disk does not give back.
        read_all(again, OTHER.root, OTHER.keys)
        again.close()
        assert number < 60
    assert number > 8


def test_a_disk_that_refuses_the_rewrite_keeps_the_purge_from_being_done(kit):
    plan = FaultPlan()
    store = kit.open(device=FaultyDevice(plan), retry_s=0.1, io="buffered")
    save_in_turns(store)
    plan.writes_fail = errno.ENOSPC
    Chain(OTHER.space, 1, seed=9).save(store)
    wait_until(lambda: kit.of(TierStateChanged))
    store.purge(is_mine)
    assert not store.flush(0.3)
    assert is_named(kit.folder)
    plan.writes_fail = 0
    assert store.flush(20)
    assert not is_named(kit.folder)


def test_a_start_that_cannot_rewrite_the_journal_does_it_later(kit, monkeypatch):
    monkeypatch.setattr(store_module, "CLOSE_S", 0.0)
    plan = FaultPlan()
    store = kit.open(device=FaultyDevice(plan), io="buffered")
    save_in_turns(store)
    plan.delay_s = 0.05
    store.purge(is_mine)
    store.close()
    assert is_named(kit.folder), "the close waited for all of it"
    plan.delay_s, plan.writes_fail = 0.0, errno.ENOSPC
    again = kit.open(device=FaultyDevice(plan), retry_s=0.05, io="buffered")
    assert not again.flush(0.2)
    plan.writes_fail = 0
    assert again.flush(20)
    assert not is_named(kit.folder)
    again.register(OTHER.space)
    assert read_all(again, OTHER.root, OTHER.keys) == 6


def left_after_a_kill(kit, left: Path) -> None:
    """Start on a copy of the folder: what is not in it was never written."""
    with kit.open(path=left, io="buffered") as store:
        assert store.flush(20)
        store.register(OTHER.space)
        assert read_all(store, OTHER.root, OTHER.keys) > 0
    assert not is_named(left)


def test_a_kill_while_pages_are_given_up_leaves_a_journal_that_tells_where_they_lie(
    kit, monkeypatch, tmp_path
):
    store = kit.open(io="buffered")
    save_in_turns(store)
    tier, sweep = store._below.tier, store.pool.sweep

    def rewritten_first(space):
        tier._journal.is_broken = True
        with store.pool.state.outbox:
            store.pool.state.outbox.changed.notify_all()
        wait_until(lambda: not tier._journal.is_broken)
        shutil.copytree(kit.folder, tmp_path / "left")
        sweep(space)

    monkeypatch.setattr(store.pool, "sweep", rewritten_first)
    store.purge(is_mine)
    assert store.flush(20)
    left_after_a_kill(kit, tmp_path / "left")


def test_a_kill_behind_a_page_that_was_purged_on_its_way_to_disk_leaves_nothing_of_it(
    kit, monkeypatch, tmp_path
):
    store = kit.open(io="buffered")
    tier, write, is_saved = store._below.tier, store._below.tier.write, threading.Event()

    def purged_before(jobs):
        assert is_saved.wait(20)
        jobs += tier.writes.take_writes(2**30)
        store.purge(is_mine)
        # What is written now is of a namespace that a fresh journal does not know.
        tier._journal.is_broken = True
        extents = write(jobs)
        shutil.copytree(kit.folder, tmp_path / "left")
        monkeypatch.setattr(tier, "write", write)
        return extents

    monkeypatch.setattr(tier, "write", purged_before)
    for chain in (MINE, OTHER):
        store.register(chain.space)
        store.put(chain.root, [(chain.block(i), page_bytes(key, SMALL)) for i, key in enumerate(chain.keys)])
    is_saved.set()
    assert store.flush(20)
    assert not is_named(kit.folder)
    assert page_bytes(MINE.keys[0], SMALL)[:64] in raw(tmp_path / "left")
    left_after_a_kill(kit, tmp_path / "left")


def test_a_number_that_the_journal_speaks_of_is_given_to_no_other_namespace(kit, monkeypatch):
    store = kit.open()
    OTHER.save(store)
    numbers = {store.pool.space(OTHER.root).number}
    # Dropped before anything was said of it; and named by a version that wrote it otherwise.
    store._below.tier._journal.append([DropEntry(7)])
    strange = namespace_entry(store.pool.space(OTHER.root))
    store._below.tier._journal.append([type(strange)(9, strange.root, b"{}")])
    store.close()
    # Also where the start cannot write the journal anew.
    monkeypatch.setattr(type(store._below.tier), "_try_rewrite", lambda tier: None)
    again = kit.open()
    again.register(MINE.space)
    numbers.add(again.pool.space(MINE.root).number)
    assert numbers == {1, 10}
