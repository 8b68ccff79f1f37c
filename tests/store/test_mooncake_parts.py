"""The parts of the remote tier that need no Mooncake: options, names, groups, answers, lanes, and the ledger."""

from __future__ import annotations

import array
import ctypes
import threading
import time

import msgspec
import pytest

from workmem.core.errors import ConfigError
from workmem.core.layout import Namespace
from workmem.store.tiers.contract import ArenaMemory, HeldPage, Outcome, PageName
from workmem.store.tiers.mooncake import link, links, session
from workmem.store.tiers.mooncake.answers import Answers
from workmem.store.tiers.mooncake.closing_up import ClosingUp
from workmem.store.tiers.mooncake.lanes import Job, Lanes
from workmem.store.tiers.mooncake.ledger import (
    SEATS,
    Entry,
    Follower,
    Log,
    entry_name,
    entry_of,
    objects_in,
    seat_name,
)
from workmem.store.tiers.mooncake.link import MasterAwayError
from workmem.store.tiers.mooncake.memory import joined, span_of
from workmem.store.tiers.mooncake.objects import PoolObject, group, object_name
from workmem.store.tiers.mooncake.options import parse_options
from workmem.store.tiers.mooncake.outcomes import GetResult, PutResult, get_result, put_result
from workmem.store.tiers.mooncake.peers import Peers
from workmem.store.tiers.mooncake.shelf import Shelf
from workmem.store.tiers.mooncake.tier import mooncake_tier
from workmem.testing.pages import Chain, namespace
from workmem.testing.waiting import wait_until
from workmem.transfer import mooncake_library


def held(chain: Chain, indices, length: int = 8192, header_sum: int = 7) -> list[HeldPage]:
    return [
        HeldPage(
            PageName(chain.root, bytes(chain.keys[index])),
            chain.space,
            bytes(chain.block(index).parent),
            index,
            length,
            header_sum + index,
        )
        for index in indices
    ]


# Options, and what is not there


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "master"),
        ({"master": "a:1"}, "capacity: is 0"),
        ({"master": "a:1", "capacity": 1}, r"capacity: 1 bytes are less than 1\.0 MiB"),
        ({"master": "a:1", "capacity": "1GiB", "segment": "2GiB"}, "capacity: '1GiB' is less than segment"),
        ({"master": "10.0.0.1", "capacity": "1GiB"}, r"master: '10\.0\.0\.1' is no host:port"),
        ({"master": "host:http", "capacity": "1GiB"}, "master: 'host:http' is no host:port"),
        ({"master": "host:65536", "capacity": "1GiB"}, "master: 'host:65536' is no host:port"),
        ({"master": "a:1", "capacity": "1GiB", "host": ""}, "host: '' is no address"),
        ({"master": "a:1", "capacity": "1GiB", "poll_s": float("nan")}, "poll_s"),
        ({"master": "a:1", "capacity": "1GiB", "colour": 1}, "colour"),
        ({"master": "a:1", "capacity": "much"}, r"capacity: 'much'"),
        ({"master": "a:1", "capacity": "1GiB", "pool": "a/b"}, "pool"),
        ({"master": "a:1", "capacity": "1GiB", "object_bytes": "1GiB"}, "object_bytes"),
    ],
)
def test_options_that_cannot_be_name_the_setting(options, said):
    with pytest.raises(ConfigError, match=rf"\$\.store\.below\.options.*{said}"):
        parse_options(options)


def test_where_nobody_answers_dram_serves_alone():
    with pytest.raises(OSError, match=r"no master at 127\.0\.0\.1:9"):
        link._reach("127.0.0.1:9")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("mooncake"), r"pip install 'workmem\[mooncake\]'"),
        (ImportError("libibverbs.so.1: cannot open"), "libibverbs1 librdmacm1 libnuma1"),
    ],
)
def test_what_is_not_installed_is_said(monkeypatch, error, said):
    def refuse(name):
        raise error

    monkeypatch.setattr(mooncake_library.importlib, "import_module", refuse)
    with pytest.raises(ConfigError, match=said):
        mooncake_tier({"master": "127.0.0.1:9", "capacity": "1MiB"}).open(ArenaMemory(0, 0))


class NoMemory:
    """A link that registers one piece of memory, and no second."""

    def __init__(self):
        self.registered: list[int] = []

    def register(self, address, size):
        if self.registered:
            raise OSError("no more may be locked")
        self.registered.append(address)

    def unregister(self, address):
        self.registered.remove(address)


def test_a_tier_that_cannot_be_opened_lets_go_of_the_arena_and_of_its_client(monkeypatch):
    lent, given_back, threads = NoMemory(), [], threading.active_count()
    monkeypatch.setattr(session, "borrow", lambda options: lent)
    monkeypatch.setattr(session, "give_back", given_back.append)
    with pytest.raises(OSError, match="no more may be locked"):
        mooncake_tier({"master": "127.0.0.1:9", "capacity": "1MiB"}).open(ArenaMemory(4096, 4096))
    assert not lent.registered
    assert len(given_back) == 1
    assert threading.active_count() == threads


# Memory


def test_only_plain_bytes_of_the_arena_are_handed_over():
    memory = bytearray(8192)
    arena = ArenaMemory(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 4096)
    view = memoryview(memory)
    assert span_of(view[:64].toreadonly(), arena) == (arena.address, 64)
    assert span_of(view[4032:4096], arena) == (arena.address + 4032, 64)
    for other in (view[4033:4097], memoryview(bytearray(64))):
        with pytest.raises(ValueError, match="does not lie in the arena"):
            span_of(other, arena)
    with pytest.raises(ValueError, match="items of 4 bytes"):
        span_of(memoryview(array.array("f", [1.0] * 4)), arena)
    with pytest.raises(ValueError, match="items of 1 bytes"):
        span_of(view[:64:2], arena)


def test_neighbours_travel_as_one():
    assert joined([(0, 4), (4, 4), (12, 4), (16, 2)]) == [(0, 8), (12, 6)]


# Objects


def test_runs_of_a_chain_are_one_object_up_to_a_size():
    chain, other = Chain(namespace(), 8), Chain(namespace(), 3, seed=1)
    pages = [*held(chain, [0, 1, 2, 3, 4, 6]), *held(other, [0, 1, 2])]
    assert group(pages, 3 * 8192) == [[0, 1, 2], [3, 4], [5], [6, 7, 8]]
    assert group(pages[:2], 4096) == [[0], [1]]
    assert group([], 4096) == []


def test_a_name_says_tenant_model_and_bytes():
    space = namespace()
    names = {
        object_name(pool, held(Chain(one, 2), range(count), header_sum=header_sum))
        for pool in ("a", "b")
        for one in (space, Namespace(model_fingerprint="model", layout=space.layout, tenant_salt="t"))
        for count in (1, 2)
        for header_sum in (7, 8)
    }
    assert len(names) == 16
    assert all(name.startswith(("workmem/1/a/page/", "workmem/1/b/page/")) for name in names)


def test_an_object_goes_with_the_last_of_its_pages():
    chain, shelf = Chain(namespace(), 4), Shelf()
    pages = held(chain, range(4))
    names = [page.name for page in pages]
    first = PoolObject("first", tuple(pages[:3]))
    assert shelf.add(first) == pages[:3]
    assert shelf.add(PoolObject("second", tuple(pages[2:]))) == pages[3:]
    assert (len(shelf), shelf.used_bytes) == (4, 4 * 8192)
    assert shelf.emptied_by(names[:2]) == []
    assert shelf.emptied_by(names[:3]) == [first]
    assert [place.page for place in shelf.take_off([names[0], names[0]])] == pages[:1]
    assert shelf.emptied_by(names[1:3]) == [first]
    shelf.forget("second", names)
    assert [place is not None for place in shelf.find(names)] == [False, True, True, False]
    assert shelf.used_bytes == 2 * 8192


def test_what_this_store_put_itself_lies_where_it_put_it():
    """Two hosts compute one block with other rounding: each is checked against the header that it knows."""
    chain, shelf = Chain(namespace(), 3), Shelf()
    theirs, mine = held(chain, range(3)), held(chain, range(2), header_sum=100)
    shelf.add(PoolObject("theirs", tuple(theirs)))
    shelf.keep(PoolObject("mine", tuple(mine)))
    shelf.keep(PoolObject("mine", tuple(mine)))
    assert [place.page for place in shelf.find([page.name for page in theirs])] == [*mine, theirs[2]]
    assert (len(shelf), shelf.used_bytes, shelf.object_bytes) == (3, 3 * 8192, 5 * 8192)


class Unanswered:
    """A link that brings nothing."""

    def __init__(self, result):
        self.result, self.asked = result, 0

    def register(self, address, size):
        pass

    def get_some(self, wanted, base):
        self.asked += 1
        return [self.result] * len(wanted)


def test_without_a_master_what_is_known_of_objects_is_not_forgotten():
    chain, shelf = Chain(namespace(), 3), Shelf()
    pages = held(chain, range(3))
    shelf.add(PoolObject("one", tuple(pages)))
    shelf.take_off([pages[2].name])
    with pytest.raises(MasterAwayError):
        ClosingUp(Unanswered(GetResult.MASTER_AWAY), shelf, Peers(), "p", 2**16, 0).run(
            1, lambda kept, gone: None
        )
    assert len(shelf) == 2


def test_an_owner_that_is_silent_is_asked_once_for_what_is_to_be_moved():
    """Each time costs the deadline, and the batch of puts that waits has one of its own."""
    shelf, silent = Shelf(), Unanswered(GetResult.TIMEOUT)
    for seed in range(4):
        pages = held(Chain(namespace(), 2, seed=seed), range(2))
        shelf.add(PoolObject(f"object {seed}", tuple(pages), "peer"))
        shelf.take_off([pages[1].name])
    ClosingUp(silent, shelf, Peers(), "p", 2**16, 0).run(1, lambda kept, gone: None)
    assert silent.asked == 1
    assert not len(shelf)


# Outcomes


def test_codes_are_told_apart_with_the_clock():
    assert put_result(0, 0.1) is PutResult.STORED
    assert put_result(-200, 0.1) is PutResult.NO_ROOM
    assert put_result(-800, 0.1) is PutResult.OWNER_DEAD
    assert put_result(-800, 3.0) is PutResult.TIMEOUT
    assert put_result(-900, 0.1) is PutResult.MASTER_AWAY
    assert put_result(-901, 3.0) is PutResult.MASTER_AWAY
    assert get_result(-901, 4096, 3.0) is GetResult.MASTER_AWAY
    assert put_result(-600, 0.1) is PutResult.BROKEN
    assert get_result(4096, 4096, 0.1) is GetResult.ARRIVED
    assert get_result(4095, 4096, 0.1) is GetResult.BROKEN
    assert get_result(-704, 4096, 0.1) is GetResult.MISS
    assert get_result(-707, 4096, 0.1) is GetResult.LEASE_LOST
    assert get_result(-800, 4096, 3.0) is GetResult.TIMEOUT


def test_a_peer_that_fell_silent_is_left_alone_for_a_while():
    peers = Peers(pause_s=0.05)
    assert peers.may_ask("a")
    assert peers.failed("a")
    assert not peers.failed("a")
    assert not peers.may_ask("a")
    assert peers.may_ask("b")
    peers.failed("b")
    peers.worked("b")
    assert peers.may_ask("b")
    assert peers.is_fresh("b")
    wait_until(lambda: peers.may_ask("a"), 5)


def test_each_page_is_answered_for_once():
    found: list[tuple[int, Outcome]] = []
    answers = Answers(3, lambda index, outcome: found.append((index, outcome)))
    answers(1, Outcome.DONE)
    answers(1, Outcome.FAILED)
    answers.rest(Outcome.ABSENT)
    answers.rest(Outcome.FAILED)
    assert found == [(1, Outcome.DONE), (0, Outcome.ABSENT), (2, Outcome.ABSENT)]


# Lanes


def test_a_peer_that_does_not_answer_holds_its_lane_only():
    gate, ran = threading.Event(), []
    lanes = Lanes("test", threads=3, lane_max=2, queue_max=10, patience_s=20)
    for number in range(4):
        lanes.submit(Job("silent", lambda: gate.wait(20) and ran.append("silent"), lambda: None))
        lanes.submit(Job(f"well{number}", lambda: ran.append("well"), lambda: None))
    wait_until(lambda: ran == ["well"] * 4, 5)
    gate.set()
    wait_until(lambda: len(ran) == 8, 5)
    assert lanes.close(5)


def test_what_waits_behind_calls_that_never_end_is_given_up_and_what_is_under_way_is_not():
    gate, told = threading.Event(), []
    lanes = Lanes("test", threads=1, lane_max=1, queue_max=2, patience_s=0.1)
    lanes.submit(Job("a", lambda: gate.wait(20) and told.append("ran"), lambda: told.append("never")))
    wait_until(lambda: not lanes._waiting, 5)
    for name in ("b", "c", "d"):
        lanes.submit(Job(name, lambda: told.append("never"), lambda n=name: told.append(n)))
    wait_until(lambda: len(told) == 3, 5)
    assert told == ["d", "b", "c"]  # For d there was no room.
    assert not lanes.close(0.05)
    gate.set()
    assert lanes.close(5)
    assert told[3:] == ["ran"]
    lanes.submit(Job("e", lambda: told.append("never"), lambda: told.append("closed")))
    assert told[-1] == "closed"


# The ledger


class Words:
    """A link with small values only."""

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self.fails = 0

    def is_there(self, names):
        return [name in self.values for name in names]

    def read(self, names):
        return [self.values.get(name, b"") for name in names]

    def remove(self, names):
        for name in names:
            self.values.pop(name, None)

    def write(self, name, value):
        if self.fails:
            self.fails -= 1
            return False
        self.values.setdefault(name, value)
        return True


def told(chain: Chain, indices) -> Entry:
    return entry_of([PoolObject(f"o{indices}", tuple(held(chain, indices)), "peer")])


def test_what_one_tells_others_hear_once_and_in_order():
    words, chain = Words(), Chain(namespace(), 6)
    log, follower = Log(words, "p"), Follower(words, "p")
    assert follower.look(()) == []
    for first in (0, 2, 4):
        log.tell(told(chain, range(first, first + 2)))
    heard = follower.look(())
    assert [page for entry in heard for one in objects_in(entry) for page in one.pages] == held(
        chain, range(6)
    )
    assert follower.look(()) == []
    assert Follower(words, "p").look(log.mine) == []
    log.close()
    assert [entry.is_last for entry in follower.look(())] == [True]


def test_what_could_not_be_told_is_told_with_the_next():
    words, chain = Words(), Chain(namespace(), 3)
    log, follower = Log(words, "p"), Follower(words, "p")
    log.tell(told(chain, [0]))
    words.fails = 1
    log.tell(told(chain, [1]))
    log.tell(told(chain, [2]))
    assert follower.look(()) == [told(chain, [index]) for index in range(3)]


@pytest.mark.parametrize("lost", [range(10), range(5, 30), [0, 1, 2, 39]])
def test_a_log_that_lost_entries_is_read_on(lost):
    words, chain = Words(), Chain(namespace(), 40)
    log = Log(words, "p")
    for index in range(40):
        log.tell(told(chain, [index]))
    (writer,) = log.mine
    for number in lost:
        del words.values[entry_name("p", writer, number)]
    heard = Follower(words, "p").look(())
    assert heard
    assert all(entry in [told(chain, [index]) for index in range(40) if index not in lost] for entry in heard)
    assert len(heard) >= 40 - 2 * len(lost)


def test_entries_that_are_not_what_was_written_are_left_out():
    words, chain = Words(), Chain(namespace(), 3)
    log, follower = Log(words, "p"), Follower(words, "p")
    for index in range(3):
        log.tell(told(chain, [index]))
    (writer,) = log.mine
    name = entry_name("p", writer, 1)
    words.values[name] = words.values[name][:-1] + b"x"
    assert follower.look(()) == [told(chain, [0]), told(chain, [2])]
    assert follower.unreadable == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": (b"short",)},
        {"parent": b""},
        {"lengths": (0,)},
        {"space": -1},
        {"depth": -1},
        {"header_sums": (-1,)},
    ],
)
def test_an_entry_that_cannot_be_is_left_out_and_the_next_is_read(wrong):
    words, chain = Words(), Chain(namespace(), 2)
    log, follower = Log(words, "p"), Follower(words, "p")
    entry = told(chain, [0])
    log.tell(msgspec.structs.replace(entry, kept=(msgspec.structs.replace(entry.kept[0], **wrong),)))
    log.tell(told(chain, [1]))
    assert follower.look(()) == [told(chain, [1])]
    assert follower.unreadable == 1


def test_a_store_whose_seat_is_gone_takes_another_and_is_heard_again():
    words, chain = Words(), Chain(namespace(), 3)
    log, follower = Log(words, "p"), Follower(words, "p")
    log.tell(told(chain, [0]))
    follower.look(())
    words.values.clear()  # The master was started anew.
    log._look_again_at = 0.0
    log.tell(told(chain, [1]))
    # It may have the seat that it had before, under another name.
    assert [entry for _ in range(8) for entry in follower.look(())] == [told(chain, [1])]


def test_where_all_seats_are_taken_a_store_is_heard_and_so_is_who_sat_there():
    """Most are of stores that ended: each start takes another."""
    words, chain = Words(), Chain(namespace(), 3)
    mine, follower = Log(words, "p"), Follower(words, "p")
    mine.tell(told(chain, [0]))
    (writer,) = mine.mine
    for seat in range(SEATS):
        words.values[seat_name("p", seat)] = b"ended%d" % seat
    assert follower.look(()) == []
    mine._look_again_at = 0.0
    mine.tell(told(chain, [1]))
    # It keeps its log, which is all there.
    assert mine.mine == {writer}
    assert [entry for _ in range(8) for entry in follower.look(())] == [told(chain, [0]), told(chain, [1])]
    Log(words, "p").tell(told(chain, [2]))
    assert [entry for _ in range(8) for entry in follower.look(())] == [told(chain, [2])]
    assert len([name for name in words.values if "/seat/" in name]) == SEATS


def seats_of(words: Words) -> list[str]:
    return [name for name in words.values if "/seat/" in name]


def test_a_store_takes_the_seat_of_one_that_has_closed_and_tells_what_that_one_told():
    """However often stores start there are as many seats and logs as stores, and who joins late hears of all."""
    words, chain = Words(), Chain(namespace(), 72)
    for index in range(70):
        shelf, follower = Shelf(), Follower(words, "p")
        for entry in follower.look(()):
            for one in objects_in(entry):
                shelf.add(one)
        assert len(shelf) == index
        log = Log(words, "p", follower.finished, shelf.objects)
        log.tell(told(chain, [index]))
        log.close()
        assert len(seats_of(words)) == 1
        assert len({name.split("/")[4] for name in words.values if "/log/" in name}) == 1


def test_the_seat_of_a_store_that_did_not_say_that_it_closed_is_left_alone():
    words, chain = Words(), Chain(namespace(), 2)
    Log(words, "p").tell(told(chain, [0]))
    follower = Follower(words, "p")
    follower.look(())
    Log(words, "p", follower.finished, tuple).tell(told(chain, [1]))
    assert len(seats_of(words)) == 2
    assert len(Follower(words, "p").look(())) == 2


def test_one_of_two_stores_that_want_the_same_seat_takes_another():
    words, chain = Words(), Chain(namespace(), 3)
    first = Log(words, "p")
    first.tell(told(chain, [0]))
    first.close()
    follower = Follower(words, "p")
    heard = [one for entry in follower.look(()) for one in objects_in(entry)]
    stale = follower.finished()
    for index in (1, 2):
        Log(words, "p", lambda: stale, lambda: heard).tell(told(chain, [index]))
    assert len(seats_of(words)) == 2
    names = {
        page.name
        for entry in Follower(words, "p").look(())
        for one in objects_in(entry)
        for page in one.pages
    }
    assert names == {PageName(chain.root, bytes(key)) for key in chain.keys}


def test_a_seat_that_was_taken_over_is_heard_at_the_next_look():
    words, chain = Words(), Chain(namespace(), 2)
    first, mine, other = Log(words, "p"), Follower(words, "p"), Follower(words, "p")
    first.tell(told(chain, [0]))
    first.close()
    for follower in (mine, other):
        follower.look(())
        follower.look(())
    Log(words, "p", mine.finished, tuple).tell(told(chain, [1]))
    assert other.look(()) == [told(chain, [1])]


# Clients


def test_who_goes_another_way_does_not_wait_for_a_client_that_joins(monkeypatch):
    gate, begun = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, options):
            if options.master == "slow:1":
                begun.set()
                assert gate.wait(20)
                raise OSError("nobody there")

        def close(self):
            pass

    monkeypatch.setattr(links, "Link", Slow)
    slow, fast = (parse_options({"master": f"{name}:1", "capacity": "1GiB"}) for name in ("slow", "fast"))
    told: list[str] = []

    def join() -> None:
        try:
            links.borrow(slow)
        except OSError as error:
            told.append(str(error))

    thread = threading.Thread(target=join)
    thread.start()
    assert begun.wait(20)
    assert links.borrow(fast) is links.borrow(fast)
    assert not told
    gate.set()
    thread.join(20)
    assert told == ["nobody there"]
    for _ in range(2):
        links.give_back(fast)
    assert not links._links


def test_a_seat_that_cannot_be_read_for_a_moment_is_kept():
    words, chain = Words(), Chain(namespace(), 3)
    log = Log(words, "p")
    log.tell(told(chain, [0]))
    words.values[seat_name("p", 0)] = b""
    log._look_again_at = 0.0
    log.tell(told(chain, [1]))
    assert [name for name in words.values if "/seat/" in name] == [seat_name("p", 0)]


def test_an_entry_that_contradicts_itself_is_refused():
    chain = Chain(namespace(), 2)
    entry = told(chain, range(2))
    with pytest.raises(ValueError, match="namespace 0, and 0 are told"):
        objects_in(Entry((), entry.kept))
    started = time.monotonic()
    assert objects_in(entry)[0].pages == tuple(held(chain, range(2)))
    assert time.monotonic() - started < 5


def test_what_is_heard_of_an_object_says_which_group_it_is_of():
    """A lease is of the whole group: one that nobody knew to be one could keep more than its share."""
    words, shelf = Words(), Shelf()
    log, follower = Log(words, "p"), Follower(words, "p")
    pages = held(Chain(namespace(), 4), range(4))
    log.tell(
        entry_of(
            [
                PoolObject("one", tuple(pages[:1]), "peer", group="g"),
                PoolObject("rest", tuple(pages[1:]), "peer", group="g"),
            ]
        )
    )
    heard = [one for entry in follower.look(()) for one in objects_in(entry)]
    for one in heard:
        shelf.add(one)
    assert [one.group for one in heard] == ["g", "g"]
    assert shelf.bytes_with(heard[0]) == 4 * 8192
