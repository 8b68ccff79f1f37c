"""A close ends in time, and gives back what it holds as soon as nothing uses it any more."""

from __future__ import annotations

import threading
import time

import pytest

from workmem.core.errors import ConfigError
from workmem.store import store as store_module
from workmem.testing.faulty_device import FaultPlan, FaultyDevice
from workmem.testing.pages import Chain, namespace, read_all
from workmem.testing.waiting import wait_until


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("workmem-s")}


def test_a_folder_is_given_back_once_the_disk_lets_go_of_a_closed_store(kit, monkeypatch):
    monkeypatch.setattr(store_module, "END_S", 0.2)
    chain = Chain(namespace(), 3)
    first = kit.open()
    chain.save(first)
    first.close()
    plan, reads, may_end = FaultPlan(), threading.Event(), threading.Event()

    def hang(path, offset):
        if path.parent.name == "segments" and offset:
            reads.set()
            assert may_end.wait(60)

    plan.before_read = hang
    store = kit.open(device=FaultyDevice(plan))
    store.register(chain.space)
    store.lease(chain.root, chain.keys, owner="t", ttl_s=60)
    assert reads.wait(20)
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 10
    try:
        with pytest.raises(ConfigError, match="is in use by process"):
            kit.open()
    finally:
        may_end.set()
    wait_until(lambda: not threads(), 20)
    again = kit.open()
    again.register(chain.space)
    assert read_all(again, chain.root, chain.keys) == 3


def test_a_copy_that_never_ends_keeps_no_other_thread_of_a_closed_store_going(kit, monkeypatch):
    monkeypatch.setattr(store_module, "CLOSE_S", 0.2)
    monkeypatch.setattr(store_module, "END_S", 0.2)
    copies, may_end = threading.Event(), threading.Event()
    chain = Chain(namespace(), 1)
    store = kit.open()
    store.register(chain.space)
    (page,) = chain.writes()

    def copy_into(view):
        copies.set()
        assert may_end.wait(60)
        page.copy_into(view)

    store.save(chain.root, [type(page)(page.block, copy_into, page.done)])
    assert copies.wait(20)
    store.close()
    try:
        wait_until(lambda: threads() == {"workmem-save", "workmem-store-close"}, 20)
    finally:
        may_end.set()
    wait_until(lambda: not threads(), 20)


@pytest.mark.parametrize("who", ["a tripped tier", "a request in need"])
def test_a_flush_hears_of_it_when_only_pages_that_left_were_waiting(kit, monkeypatch, who):
    store = kit.open()
    Chain(namespace(), 1).save(store)
    pool, writes = store.pool.state, store._below.tier.writes
    takes_out = {
        "a tripped tier": writes.give_up_writes,
        "a request in need": lambda: pool.reserve_unwritten(8192),
    }[who]
    with pool.outbox:
        # Its block left before the disk had it; nothing else takes such entries out meanwhile.
        monkeypatch.setattr(store._below.breaker, "writes_open", True)
        monkeypatch.setattr(store._below.breaker, "may_write", lambda: False)
        monkeypatch.setattr(writes, "give_up_writes", lambda: None)
        pool.unwritten.add((0, 7))

    def later():
        with pool.outbox:
            takes_out()

    threading.Timer(0.2, later).start()
    started = time.monotonic()
    assert store.flush(12)
    assert time.monotonic() - started < 6
