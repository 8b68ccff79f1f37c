"""Clients of one server share what any of them saved; without one they miss, and come back by themselves."""

from __future__ import annotations

import math
import os
import time

import msgspec
import pytest

from workmem.core.errors import CapacityError, ConfigError, InvariantError, LeaseError, TransferError
from workmem.core.events import BoundReached
from workmem.core.layout import DTYPE_BYTES
from workmem.core.outcomes import MissReason, TierName
from workmem.store.contract import PageWrite, SaveState
from workmem.store.host import messages
from workmem.store.host.client import HostStore
from workmem.store.host.session import HostLimits
from workmem.store.saver import fill
from workmem.store.selector import PurgeSelector
from workmem.testing.pages import SLICED, Chain, namespace, page_bytes, read_all, settle
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

CHAIN = Chain(namespace("small"), 8)


def test_two_clients_share_hits(host):
    host.serve()
    writer, reader = host.client(), host.client()
    for chain in (CHAIN, Chain(namespace("sliced", SLICED), 3)):
        assert set(chain.save(writer)) == {SaveState.STORED}
        reader.register(chain.space)
        assert chain.tiers(reader) == (TierName.DRAM,) * len(chain.keys)
        assert read_all(reader, chain.root, chain.keys) == len(chain.keys)
    assert set(CHAIN.save(reader)) == {SaveState.ALREADY_THERE}
    reader.audit()
    wait_until(lambda: reader.gauges()["store_host_connections"] == 4)


def test_a_lease_brings_pages_from_ssd_and_says_when_they_are_there(host):
    host.serve()
    CHAIN.save(host.client())
    host.stop()
    host.serve()
    client = host.client()
    client.register(CHAIN.space)
    assert CHAIN.tiers(client) == (TierName.SSD,) * 8
    lease = client.lease(CHAIN.root, CHAIN.keys, owner="reader", ttl_s=60)
    settle(lease)
    assert (lease.ready, lease.failed) == (8, None)
    assert [bytes(lease.page(index)) for index in range(8)] == [
        page_bytes(key, lease.layout) for key in CHAIN.keys
    ]
    lease.release()
    assert CHAIN.tiers(client) == (TierName.DRAM,) * 8


def test_a_notice_that_is_lost_is_made_up_for(host, monkeypatch):
    host.serve()
    CHAIN.save(host.client())
    host.stop()
    monkeypatch.setattr("workmem.store.host.session.Session._tell_settled", lambda *_: None)
    host.serve()
    client = host.client()
    assert read_all_of(client, CHAIN) == 8


def read_all_of(client: HostStore, chain: Chain) -> int:
    client.register(chain.space)
    return read_all(client, chain.root, chain.keys)


def test_what_is_missing_is_told_with_its_reason(host):
    host.serve()
    client = host.client()
    CHAIN.save(client)
    longer = Chain(namespace("small"), 3, behind=CHAIN, seed=9)
    found = client.lookup(longer.root, longer.keys)
    assert (found.blocks, found.reason) == (8, MissReason.COLD)
    lease = client.lease(longer.root, longer.keys, owner="reader", ttl_s=60)
    assert (lease.ready, lease.failed, len(lease.keys)) == (8, MissReason.COLD, 11)
    lease.release()
    assert client.lookup(longer.root, []).reason is None
    empty = client.lease(longer.root, [], owner="reader", ttl_s=60)
    assert (empty.ready, empty.failed, empty.is_settled) == (0, None, True)
    empty.release()


def test_quarantine_by_one_client_is_a_miss_for_all(host):
    host.serve()
    client, other = host.client(), host.client()
    CHAIN.save(client)
    other.register(CHAIN.space)
    lease = client.lease(CHAIN.root, CHAIN.keys, owner="reader", ttl_s=60)
    lease.quarantine(3)
    lease.release()
    # A lookup takes no lock: between two steps of the quarantine the page is merely out of reach.
    wait_until(lambda: other.lookup(CHAIN.root, CHAIN.keys).reason is MissReason.CORRUPT)
    assert other.lookup(CHAIN.root, CHAIN.keys).blocks == 3


def test_leases_are_given_back_once_and_out_of_reach_after(host):
    host.serve()
    client = host.client()
    CHAIN.save(client)
    lease = client.lease(CHAIN.root, CHAIN.keys, owner="reader", ttl_s=60)
    with pytest.raises(LeaseError, match="not ready"):
        lease.page(8)
    lease.release()
    for call in (
        lambda: lease.page(0),
        lambda: lease.checksums(0),
        lambda: lease.quarantine(0),
        lease.release,
    ):
        with pytest.raises(LeaseError):
            call()


def test_a_lease_is_renewed_for_as_long_as_it_is_held_and_no_longer(host):
    host.serve(lease_s=0.6)
    client = host.client()
    CHAIN.save(client)
    held = client.lease(CHAIN.root, CHAIN.keys, owner="held", ttl_s=math.inf)
    short = client.lease(CHAIN.root, CHAIN.keys[:2], owner="short", ttl_s=0.9)
    dropped = client.lease(CHAIN.root, CHAIN.keys[:3], owner="dropped", ttl_s=math.inf)
    del dropped
    time.sleep(1.5)
    assert bytes(held.page(7)) == page_bytes(CHAIN.keys[7], held.layout)
    with pytest.raises(LeaseError, match="expired"):
        short.page(0)
    wait_until(lambda: host.store.gauges()["store_leases_expired_total"] == 2)
    short.release()
    held.release()


def test_a_frame_that_got_another_page_is_told_from_the_one_leased(host):
    host.serve(dram="256KiB", ssd=0)
    client = host.client()
    CHAIN.save(client)
    lease = client.lease(CHAIN.root, CHAIN.keys, owner="reader", ttl_s=60)
    assert lease.page(7)
    # As if the client had slept past its deadline without noticing.
    host.store.pool.leases.end_leases()
    for seed in range(1, 30):
        other = Chain(namespace("small"), 4, seed=seed)
        other.save(client)
        read_all(client, other.root, other.keys)
    assert client.lookup(CHAIN.root, CHAIN.keys).blocks == 0
    for call in (lease.page, lease.checksums, lease.quarantine):
        with pytest.raises(LeaseError, match="stale"):
            call(0)
    lease.release()
    assert host.store.gauges()["store_quarantines_total"] == 0


def test_a_frame_that_is_being_filled_is_not_the_page_it_held(host):
    """Its header still has the old key: only the generation tells."""
    host.serve(ssd=0)
    client = host.client()
    CHAIN.save(client)
    lease = client.lease(CHAIN.root, CHAIN.keys, owner="reader", ttl_s=60)
    host.store.pool.leases.end_leases()
    state, space = host.store.pool.state, host.store.pool.space(CHAIN.root)
    with state.outbox:
        evicted = state._evict(space.rows[CHAIN.keys[7]])
        state._vacate(evicted)
        frame = state.reserve(space)
        assert frame is evicted
    assert not lease.is_current(7)
    with pytest.raises(LeaseError, match="stale"):
        lease.page(7)
    with state.outbox:
        state.wipe(frame)
    lease.release()


def test_a_header_that_is_not_that_of_the_reserved_block_is_not_committed(host, monkeypatch):
    host.serve(ssd=0)
    client = host.client()
    other = Chain(namespace("small"), 8, seed=5)

    def miswritten(space, page, whole):
        mine = page.block.depth
        if mine == 3:
            page = PageWrite(other.block(mine), page.copy_into, page.done)
        if mine != 5:
            fill(space, page, whole)

    monkeypatch.setattr("workmem.store.host.saver.fill", miswritten)
    states = CHAIN.save(client)
    assert (states[3], states[5]) == (SaveState.DROPPED, SaveState.DROPPED)
    assert client.lookup(CHAIN.root, CHAIN.keys).blocks == 3
    assert client.lookup(other.root, other.keys).blocks == 0
    assert "store.host.commit" in host.bounds()
    client.audit()
    found = client.gauges()
    assert found["store_dram_used_bytes"] == found["store_dram_resident_bytes"]


def test_a_lease_that_dram_cannot_hold_is_a_capacity_error(host):
    host.serve(dram="256KiB")
    client = host.client()
    long = Chain(namespace("small"), 200)
    client.register(long.space)
    for start in range(0, 200, 20):
        client.save(long.root, long.writes(indices=range(start, start + 20)))
        assert client.flush(20)
    assert client.lookup(long.root, long.keys).blocks == 200
    with pytest.raises(CapacityError):
        client.lease(long.root, long.keys, owner="greedy", ttl_s=60)
    client.audit()
    assert client.lookup(long.root, long.keys).blocks > 0


def test_a_copy_that_raises_drops_its_page_only(host):
    host.serve()
    client = host.client()
    client.register(CHAIN.space)
    states: list[SaveState] = []
    pages = CHAIN.writes(states.append)

    def broken(view: memoryview) -> None:
        raise RuntimeError("no such tensor")

    pages[7] = PageWrite(pages[7].block, broken, pages[7].done)
    client.save(CHAIN.root, pages)
    assert client.flush(20)
    assert states.count(SaveState.STORED) == 7
    assert states.count(SaveState.DROPPED) == 1
    assert client.lookup(CHAIN.root, CHAIN.keys).blocks == 7
    assert "store.save_copy" in host.bounds()
    found = client.gauges()
    assert found["store_dram_used_bytes"] == found["store_dram_resident_bytes"]
    client.audit()


def test_blocks_that_do_not_fit_the_namespace_are_refused(host):
    host.serve()
    client = host.client()
    with pytest.raises(InvariantError, match="not registered"):
        client.lookup(CHAIN.root, CHAIN.keys)
    client.register(CHAIN.space)
    client.register(Chain(namespace("sliced", SLICED), 1).space)
    with pytest.raises(InvariantError, match="tokens"):
        client.save(namespace("sliced", SLICED).root(), CHAIN.writes())


def test_full_queue_drops_and_tells_every_page_once(host):
    host.serve()
    client = host.client(save_queue_pages=4)
    client.register(CHAIN.space)
    states: list[SaveState] = []
    client.save(CHAIN.root, CHAIN.writes(states.append))
    wait_until(lambda: len(states) == 8)
    assert states.count(SaveState.DROPPED) >= 4
    assert "store.host.save" in host.bounds()


def test_without_a_server_everything_is_a_miss_and_nothing_raises(host):
    with pytest.raises(TransferError):
        HostStore(host.socket)
    client = host.client(attaches=False)
    client.register(CHAIN.space)
    assert client.lookup(CHAIN.root, CHAIN.keys).reason is MissReason.UNAVAILABLE
    lease = client.lease(CHAIN.root, CHAIN.keys, owner="reader", ttl_s=60)
    assert (lease.ready, lease.failed) == (0, MissReason.UNAVAILABLE)
    lease.release()
    states: list[SaveState] = []
    client.save(CHAIN.root, CHAIN.writes(states.append))
    wait_until(lambda: states == [SaveState.DROPPED] * 8)
    assert not client.flush(0.1)
    assert client.gauges()["store_client_saves_dropped_total"] == 8
    host.serve()
    wait_until(lambda: client.is_attached)
    assert set(CHAIN.save(client)) == {SaveState.STORED}


def test_a_server_that_stops_and_starts_is_found_again_with_what_ssd_kept(host):
    host.serve()
    client = host.client()
    CHAIN.save(client)
    lease = client.lease(CHAIN.root, CHAIN.keys, owner="reader", ttl_s=60)
    host.stop()
    wait_until(lambda: not client.is_attached)
    # Its process lives on here, so nobody vouches for what lies in the old arena.
    with pytest.raises(LeaseError, match="connection"):
        lease.page(0)
    lease.release()
    host.serve()
    wait_until(lambda: client.is_attached)
    assert CHAIN.tiers(client) == (TierName.SSD,) * 8
    assert read_all(client, CHAIN.root, CHAIN.keys) == 8
    assert client.gauges()["store_client_reconnects_total"] == 1


def test_an_arena_in_a_file_is_free_for_the_next_server_while_clients_of_the_last_live(host):
    """The lock on it goes along with their mappings. Who still reads there keeps it from being written to."""
    arena = str(host.folder / "arena")
    host.serve(dram_path=arena, ssd=0)
    client = host.client()
    CHAIN.save(client)
    host.stop()
    host.serve(dram_path=arena, ssd=0)
    wait_until(lambda: client.is_attached)
    assert set(CHAIN.save(client)) == {SaveState.STORED}
    lease = client.lease(CHAIN.root, CHAIN.keys, owner="reader", ttl_s=60)
    host.stop()
    with pytest.raises(ConfigError, match="a client of one that has ended"):
        host.serve(dram_path=arena, ssd=0)
    del lease
    host.serve(dram_path=arena, ssd=0)
    wait_until(lambda: client.is_attached)


def test_a_server_that_does_not_answer_is_waited_for_once(host, monkeypatch):
    host.serve()
    client = host.client(call_s=0.3)
    CHAIN.save(client)
    monkeypatch.setattr(host.store, "lookup", lambda *_: time.sleep(1.5))
    began = time.monotonic()
    assert client.lookup(CHAIN.root, CHAIN.keys).reason is MissReason.UNAVAILABLE
    assert time.monotonic() - began < 1.2
    monkeypatch.undo()
    wait_until(lambda: client.is_attached)
    assert client.lookup(CHAIN.root, CHAIN.keys).blocks == 8


def test_limits_are_events_and_never_raise_into_a_client(host):
    host.serve(connections=2)
    client = host.client()
    client.register(CHAIN.space)
    client.save(CHAIN.root, CHAIN.writes())
    wait_until(lambda: client.lookup(CHAIN.root, CHAIN.keys).blocks == 8)
    with pytest.raises(TransferError, match="connections"):
        HostStore(host.socket)
    assert "store.host.connections" in host.bounds()


def test_a_refusal_is_heard_when_the_server_hangs_up_before_the_hello(host, monkeypatch):
    host.serve(connections=1)
    host.client()
    greet = messages.pack_hello

    def late(pid):
        # A server that has refused has hung up: its end of the connection is gone when the hello is sent.
        wait_until(lambda: "store.host.connections" in host.bounds())
        time.sleep(0.2)
        return greet(pid)

    monkeypatch.setattr(messages, "pack_hello", late)
    with pytest.raises(TransferError, match="connections"):
        HostStore(host.socket)


def test_leases_and_reservations_of_one_client_are_bounded(host):
    host.serve(limits=HostLimits(leases=3, reservations=2, namespaces=1))
    client = host.client()
    assert sorted(CHAIN.save(client)) == sorted([SaveState.STORED] * 2 + [SaveState.DROPPED] * 6)
    leases = [client.lease(CHAIN.root, CHAIN.keys[:2], owner="hoarder", ttl_s=60) for _ in range(3)]
    with pytest.raises(CapacityError, match=r"store\.host\.leases"):
        client.lease(CHAIN.root, CHAIN.keys, owner="hoarder", ttl_s=60)
    leases.pop().release()
    leases.append(client.lease(CHAIN.root, CHAIN.keys[:2], owner="hoarder", ttl_s=60))
    other = Chain(namespace("other"), 1)
    client.register(other.space)
    assert client.lookup(other.root, other.keys).reason is MissReason.UNAVAILABLE
    assert {"store.host.leases", "store.host.reservations", "store.host.namespaces"} <= host.bounds()
    for lease in leases:
        lease.release()


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_pages_of_every_type_are_kept(host, dtype):
    host.serve()
    client = host.client()
    chain = Chain(namespace(dtype, msgspec.structs.replace(SLICED, dtype=dtype)), 2)
    assert set(chain.save(client)) == {SaveState.STORED}
    assert read_all(client, chain.root, chain.keys) == 2
    assert client.gauges()["store_client_reconnects_total"] == 0


def test_a_namespace_too_many_is_a_miss_and_no_harm_to_others(host):
    """Whoever chooses salts must not take the store from everybody."""
    host.serve(limits=HostLimits(namespaces=2))
    client = host.client()
    first, second, third = (Chain(namespace(name), 2) for name in "abc")
    first.save(client)
    second.save(client)
    assert set(third.save(client)) == {SaveState.DROPPED}
    assert third.tiers(client) == ()
    longer = Chain(namespace("a"), 2, behind=first, seed=5)
    states = []
    client.save(longer.root, longer.writes(states.append, range(2, 4)))
    assert client.flush(20)
    assert states == [SaveState.STORED] * 2
    # Nor after a restart, at which the server is told of all.
    host.stop()
    host.serve(limits=HostLimits(namespaces=2))
    wait_until(lambda: client.is_attached)
    assert len(longer.tiers(client)) == 4
    assert len(second.tiers(client)) == 2


def test_namespaces_that_hold_nothing_make_room_for_others(host):
    host.serve(limits=HostLimits(namespaces=4))
    client = host.client()
    kept = Chain(namespace("kept"), 2)
    kept.save(client)
    passing = [Chain(namespace(f"epoch {number}"), 2) for number in range(20)]
    for chain in passing:
        client.register(chain.space)
        assert chain.tiers(client) == ()
    assert kept.tiers(client) == (TierName.DRAM,) * 2
    # One that was forgotten is told anew when it is wanted after all: by who saves in it, and by who asks.
    states = []
    client.save(passing[0].root, passing[0].writes(states.append))
    assert client.flush(20)
    assert states == [SaveState.STORED] * 2
    assert passing[0].tiers(client) == (TierName.DRAM,) * 2
    assert client.lookup(passing[1].root, passing[1].keys).reason is MissReason.COLD
    assert client.gauges()["store_client_reconnects_total"] == 0
    client.audit()
    host.stop()
    host.serve(limits=HostLimits(namespaces=4))
    wait_until(lambda: client.is_attached)
    assert passing[0].tiers(client) == (TierName.SSD,) * 2
    assert kept.tiers(client) == (TierName.SSD,) * 2


def test_a_namespace_that_was_emptied_and_forgotten_comes_back_under_another_number(host):
    host.serve(limits=HostLimits(namespaces=2))
    client = host.client()
    first, other = Chain(namespace("first"), 2), Chain(namespace("other"), 2)
    first.save(client)
    assert client.purge(PurgeSelector(everything=True)).blocks == 2
    assert client.flush(20)
    other.save(client)
    for number in range(4):
        client.register(namespace(f"passing {number}"))
    first.save(client)
    host.stop()
    host.serve(limits=HostLimits(namespaces=8))
    wait_until(lambda: client.is_attached)
    assert first.tiers(client) == other.tiers(client) == (TierName.SSD,) * 2
    assert read_all_of(client, first) == 2
    client.audit()


def test_a_client_remembers_the_namespaces_that_were_used_last(host, monkeypatch):
    monkeypatch.setattr("workmem.store.host.client.SPACES_MAX", 3)
    monkeypatch.setattr("workmem.store.host.client.DECLARED_MAX", 1)
    host.serve()
    client = host.client()
    chains = [Chain(namespace(name), 2) for name in "abcde"]
    for chain in chains:
        chain.save(client)
    with pytest.raises(InvariantError, match="not registered"):
        client.lookup(chains[0].root, chains[0].keys)
    host.stop()
    host.serve()
    wait_until(lambda: client.is_attached)
    # Told of the last alone, the server hears of the others as they are asked for.
    assert [len(chain.tiers(client)) for chain in chains[2:]] == [2, 2, 2]
    client.register(chains[0].space)
    assert len(chains[0].tiers(client)) == 2


def test_a_forked_child_gets_misses_and_leaves_its_parents_connection_alone(host):
    host.serve()
    client = host.client()
    CHAIN.save(client)
    pid = os.fork()
    if pid == 0:
        found = client.lookup(CHAIN.root, CHAIN.keys)
        client.close()
        os._exit(found.reason is not MissReason.UNAVAILABLE)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.lookup(CHAIN.root, CHAIN.keys).blocks == 8


def test_bounds_say_how_many(host):
    host.serve()
    client = host.client(save_queue_pages=1)
    client.register(CHAIN.space)
    client.save(CHAIN.root, CHAIN.writes())
    assert client.flush(20)
    told = [
        event for event in host.events if isinstance(event, BoundReached) and event.name == "store.host.save"
    ]
    assert told
    assert told[0].limit == 1


def test_a_folder_that_is_not_there_yet_is_not_that_of_a_store_without_one(host, tmp_path):
    """Else what was to be kept on disk would be kept by nobody."""
    host.serve(ssd=0)
    with pytest.raises(TransferError, match="another folder"):
        host.client(of_folder=tmp_path / "not there")
