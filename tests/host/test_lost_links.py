"""A link is lost and its client lives: what it held comes back once the client says that it is done (R3, R5)."""

from __future__ import annotations

import random
import threading
import time

import pytest
import xxhash

from workmem.core.errors import LeaseError, TransferError
from workmem.core.outcomes import MissReason, TierName
from workmem.store.contract import PageWrite, SaveState
from workmem.store.host import messages
from workmem.store.host.client import HostStore
from workmem.store.host.link import Link
from workmem.store.host.peer import Peer
from workmem.store.host.wire import ErrorCode, Kind, Malformed, Refused
from workmem.testing.pages import SMALL, Chain, namespace, page_bytes, read_all, settle
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

CHAIN = Chain(namespace("small"), 8)
WATCHED_S = 0.6
"""Longer than the server's watch takes to notice what it can notice."""


class Writer:
    """Saves `chain` and stops in the middle of its first page until `let_go`."""

    def __init__(self, client: HostStore, chain: Chain = CHAIN) -> None:
        self.states: list[SaveState] = []
        self.stopped, self.let_go = threading.Event(), threading.Event()
        client.register(chain.space)
        pages = chain.writes(self.states.append)
        copy_first = pages[0].copy_into

        def copy_into(view: memoryview) -> None:
            view[: len(view) // 2] = b"\xff" * (len(view) // 2)
            self.stopped.set()
            assert self.let_go.wait(30)
            copy_first(view)

        pages[0] = PageWrite(pages[0].block, copy_into, pages[0].done)
        client.save(chain.root, pages)
        assert self.stopped.wait(30)


def cut_by_server(server, client: HostStore) -> None:
    del client
    for session in list(server._sessions):
        if session.reservations.count:
            session.hang_up()


def cut_by_client(server, client: HostStore) -> None:
    del server
    client._saver._link.lose()


def reading_sessions(server) -> list:
    return [session for session in list(server._sessions) if session.lease_count]


def stranded(server) -> int:
    return int(server._census()["store_host_stranded_frames"])


def held(server) -> int:
    return int(server._census()["store_host_reservations"])


def is_all_given_back(server) -> bool:
    return held(server) == 0 and not server._orphans


def reserve(link: Link, chain: Chain = CHAIN) -> messages.Reserved:
    blocks = [chain.block(index) for index in range(len(chain.keys))]
    return messages.unpack_reserved(
        link.ask(Kind.RESERVE, messages.pack_reserve(chain.root, blocks)), len(blocks)
    )


def open_link(host, *, writes: bool = True) -> Link:
    return Link(host.socket, [CHAIN.space], call_s=5.0, writes=writes)


def say_finished(link: Link, number: int) -> None:
    link.ask(Kind.FINISHED, messages.pack_ids([number]))


@pytest.mark.parametrize("cut", [cut_by_server, cut_by_client])
def test_frames_reserved_on_a_lost_link_come_back_when_the_writer_is_out_of_them(host, cut):
    server = host.serve(ssd=0)
    client, other = host.client(), host.client()
    writer = Writer(client)
    cut(server, client)
    wait_until(lambda: stranded(server) == 8)
    # The writer is in the middle of a page: nobody gets that memory, however long it takes.
    time.sleep(WATCHED_S)
    assert stranded(server) == 8
    assert client.gauges()["store_host_stranded_frames"] == 8
    assert set(CHAIN.save(other)) == {SaveState.STORED}
    writer.let_go.set()
    wait_until(lambda: is_all_given_back(server), 10)
    assert client.gauges()["store_dram_quarantined_bytes"] == 0
    wait_until(lambda: writer.states == [SaveState.DROPPED] * 8)
    assert read_all(client, CHAIN.root, CHAIN.keys) == 8
    client.audit()


def test_a_reader_stopped_inside_finds_out_and_holds_no_frame(host):
    """Leases end with their link: their frames go to others at once, and what is read there does not count."""
    server = host.serve(dram="256KiB", ssd=0)
    client, other = host.client(), host.client()
    CHAIN.save(client)
    lease = client.lease(CHAIN.root, CHAIN.keys, owner="reader", ttl_s=60)
    settle(lease)
    view, sums = lease.page(0), lease.checksums(0)
    half = bytes(view[: len(view) // 2])
    for session in reading_sessions(server):
        session.hang_up()
    wait_until(lambda: server._census()["store_host_leases"] == 0)
    for seed in range(1, 40):
        chain = Chain(namespace("small"), 4, seed=seed)
        chain.save(other)
        read_all(other, chain.root, chain.keys)
    assert other.lookup(CHAIN.root, CHAIN.keys).blocks == 0
    copy = half + bytes(view[len(view) // 2 :])
    assert copy != page_bytes(CHAIN.keys[0], SMALL)
    assert sums != (xxhash.xxh3_64_intdigest(copy),)
    for call in (lease.page, lease.checksums):
        with pytest.raises(LeaseError):
            call(0)
    lease.release()
    assert (held(server), stranded(server)) == (0, 0)
    wait_until(lambda: client.is_attached)
    client.audit()


def test_a_reader_in_place_sees_a_cut_link_before_its_keeper_does(host, monkeypatch):
    """Whichever of its pages have become another's by then, and whichever it looks at."""
    server = host.serve(ssd=0)
    client = host.client()
    CHAIN.save(client)
    lease = client.lease(CHAIN.root, CHAIN.keys, owner="reader", ttl_s=60)
    assert lease.is_current(7)
    link = client._keeper.link
    with monkeypatch.context() as held_up:
        held_up.setattr(link, "lose", lambda: None)
        for session in reading_sessions(server):
            session.hang_up()
        wait_until(lambda: server._census()["store_host_leases"] == 0)
        state, space = host.store.pool.state, host.store.pool.space(CHAIN.root)
        with state.outbox:
            state.quarantine(space.rows[CHAIN.keys[3]], TierName.DRAM, MissReason.CORRUPT)
        assert lease.page(7)
        assert not lease.is_current(7)
    link.lose()
    lease.release()


def test_links_cut_again_and_again_leave_nothing_behind(host):
    """Also not in the count of connections, which would lock everybody out in the end."""
    server = host.serve(ssd=0, connections=8)
    client, rng = host.client(), random.Random(4)
    for seed in range(9):
        writer = Writer(client, Chain(namespace("small"), 3, seed=seed))
        rng.choice([cut_by_server, cut_by_client])(server, client)
        if rng.random() < 0.5:
            # The other link as well: then there is nobody to tell until it is back.
            client._keeper.link.lose()
            client._keeper.nudge()
        wait_until(lambda: stranded(server) > 0)
        writer.let_go.set()
        wait_until(lambda: client.is_attached)
    wait_until(lambda: is_all_given_back(server), 10)
    assert set(CHAIN.save(client)) == {SaveState.STORED}
    assert client.gauges()["store_dram_quarantined_bytes"] == 0
    # The connection that `flush` made has its goodbye on the way.
    wait_until(lambda: client.gauges()["store_host_connections"] == 2)
    client.audit()


def test_a_client_that_never_says_that_it_is_done_keeps_its_frames_out_of_service(host):
    server = host.serve(ssd=0)
    link = open_link(host)
    reserve(link)
    link.close()
    wait_until(lambda: stranded(server) == 8)
    time.sleep(WATCHED_S)
    client = host.client()
    assert client.gauges()["store_host_stranded_frames"] == 8
    assert client.gauges()["store_dram_quarantined_bytes"] > 0
    assert set(CHAIN.save(client)) == {SaveState.STORED}
    assert stranded(server) == 8
    client.audit()


def test_the_session_of_another_process_is_not_ones_own_to_end(nursery, host):
    server = host.serve(ssd=0)
    pid = nursery.start("reserve_and_lose", socket=host.socket)
    number = nursery.heard(pid)["session"]
    wait_until(lambda: stranded(server) == 1)
    link = open_link(host, writes=False)
    with pytest.raises(Refused, match="another process") as caught:
        say_finished(link, number)
    assert caught.value.code is ErrorCode.CLIENT
    assert stranded(server) == 1
    nursery.kill(pid)
    wait_until(lambda: is_all_given_back(server))
    # What is over is over, whoever says so.
    say_finished(link, number)
    link.close()
    host.store.audit()


def test_numbers_that_nobody_has_mean_nothing(host):
    server = host.serve(ssd=0)
    link, lost = open_link(host, writes=False), open_link(host)
    reserve(lost)
    lost.close()
    wait_until(lambda: stranded(server) == 8)
    near = lost.welcome.session
    for number in (0, 1, near ^ 1, near ^ (1 << 63), 2**64 - 1):
        say_finished(link, number)
    assert stranded(server) == 8
    say_finished(link, near)
    assert is_all_given_back(server)
    link.close()


def test_who_lies_about_being_done_is_cut_off_and_what_it_writes_is_never_served(host):
    server = host.serve(dram="64KiB", ssd=0)
    liar, told = open_link(host), open_link(host, writes=False)
    reserved = reserve(liar, Chain(CHAIN.space, 2, seed=9))
    frames = [liar.arena.at(offset, SMALL.page_bytes * 2) for offset in reserved.offsets]
    say_finished(told, liar.welcome.session)
    wait_until(lambda: is_all_given_back(server))
    with pytest.raises(TransferError):
        liar.ask(Kind.COMMIT, messages.pack_ids([reserved.first]))
    client = host.client()
    short = Chain(CHAIN.space, 6, seed=5)
    assert SaveState.STORED in short.save(client)
    lease = client.lease(short.root, short.keys, owner="reader", ttl_s=60)
    settle(lease)
    for frame in frames:
        frame[SMALL.page_bytes :] = b"\xee" * SMALL.page_bytes
    wrong = 0
    for index in range(lease.ready):
        copy = bytes(lease.page(index))
        if copy != page_bytes(short.keys[index], SMALL):
            wrong += 1
            assert lease.checksums(index) != (xxhash.xxh3_64_intdigest(copy),)
    assert wrong > 0
    lease.release()
    liar.close()
    told.close()


def test_a_reservation_that_is_still_being_made_when_its_client_is_done_comes_back(host, monkeypatch):
    """The client had enough of waiting: the server reserves frames for a session that is over."""
    server = host.serve(ssd=0)
    begin, let_go = host.store.pool.begin_save, threading.Event()

    def slow(*how):
        let_go.wait(30)
        return begin(*how)

    monkeypatch.setattr(host.store.pool, "begin_save", slow)
    client = host.client(call_s=0.2)
    states: list[SaveState] = []
    client.register(CHAIN.space)
    client.save(CHAIN.root, CHAIN.writes(states.append))
    wait_until(lambda: states == [SaveState.DROPPED] * 8)
    wait_until(lambda: not client._keeper.finished)
    let_go.set()
    monkeypatch.undo()
    wait_until(lambda: is_all_given_back(server), 10)
    wait_until(lambda: client.gauges().get("store_host_connections") == 1)
    wait_until(lambda: set(CHAIN.save(client)) <= {SaveState.STORED, SaveState.ALREADY_THERE})
    assert client.gauges()["store_dram_quarantined_bytes"] == 0
    client.audit()


def test_a_goodbye_says_done_whatever_is_reserved(host):
    server = host.serve(ssd=0)
    link = open_link(host)
    reserve(link)
    assert held(server) == 8
    link.tell(Kind.GOODBYE, b"")
    wait_until(lambda: not server._sessions)
    assert is_all_given_back(server)
    assert "store.host.stranded" not in host.bounds()
    link.close()


@pytest.mark.parametrize("error", [Malformed("not a reply"), RuntimeError("a bug")])
def test_a_batch_that_fails_in_the_client_keeps_no_frame(host, monkeypatch, error):
    server = host.serve(ssd=0)
    client = host.client()

    def failing(*how):
        raise error

    monkeypatch.setattr(messages, "unpack_reserved", failing)
    assert CHAIN.save(client) == [SaveState.DROPPED] * 8
    monkeypatch.undo()
    wait_until(lambda: is_all_given_back(server), 10)
    assert set(CHAIN.save(client)) == {SaveState.STORED}
    client.audit()


def test_who_closes_without_a_link_says_first_what_is_done(host):
    server = host.serve(ssd=0)
    client = host.client()
    writer = Writer(client)
    cut_by_client(server, client)
    client._keeper.link.lose()
    wait_until(lambda: stranded(server) == 8)
    threading.Timer(0.1, writer.let_go.set).start()
    client.close()
    wait_until(lambda: is_all_given_back(server), 5)
    host.store.audit()


def test_a_successor_is_not_told_of_sessions_of_the_server_before_it(host):
    host.serve(ssd=0)
    client = host.client()
    writer = Writer(client)
    before = client._saver._link
    host.stop()
    server = host.serve(ssd=0)
    other = host.client()
    wait_until(lambda: client.is_attached)
    theirs = Writer(other, Chain(CHAIN.space, 3, seed=3))
    # It writes on in an arena that nobody reads any more.
    writer.let_go.set()
    wait_until(lambda: writer.states == [SaveState.DROPPED] * 8)
    wait_until(lambda: not client._keeper.finished)
    assert server.instance != before.welcome.instance
    assert held(server) == 3
    theirs.let_go.set()
    wait_until(lambda: theirs.states == [SaveState.STORED] * 3)
    assert set(CHAIN.save(client)) == {SaveState.STORED}
    assert read_all(other, CHAIN.root, CHAIN.keys) == 8
    client.audit()


def test_a_link_lost_with_the_last_word_of_a_batch_is_noticed_by_an_idle_client(host):
    server = host.serve(ssd=0)
    client = host.client()
    client.register(CHAIN.space)
    states: list[SaveState] = []
    [page] = CHAIN.writes(states.append, [0])

    def copy_into(view: memoryview) -> None:
        cut_by_server(server, client)
        wait_until(lambda: stranded(server) == 1)
        raise RuntimeError("no such tensor")

    client.save(CHAIN.root, [PageWrite(page.block, copy_into, page.done)])
    wait_until(lambda: states == [SaveState.DROPPED])
    wait_until(lambda: is_all_given_back(server), 10)
    client.audit()


def test_a_copy_that_outlives_its_store_says_when_it_is_done(host, monkeypatch):
    monkeypatch.setattr("workmem.store.host.client.CLOSE_S", 0.5)
    server = host.serve(ssd=0)
    client = host.client()
    writer = Writer(client)
    client.close()
    cut_by_client(server, client)
    wait_until(lambda: stranded(server) == 8)
    time.sleep(WATCHED_S)
    assert stranded(server) == 8
    writer.let_go.set()
    wait_until(lambda: is_all_given_back(server), 10)
    client._saver.close(10)


def test_a_server_that_is_closed_waits_for_threads_whose_session_is_over(host, monkeypatch):
    """They may still be giving frames back, and the arena goes when the server has."""
    server = host.serve(ssd=0)
    link, slow = open_link(host), threading.Event()
    monkeypatch.setattr(Peer, "close", lambda peer: slow.wait(0.5))
    reserve(link)
    link.tell(Kind.GOODBYE, b"")
    wait_until(lambda: not server._sessions)
    host.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "workmem-host-session"]
    link.close()
