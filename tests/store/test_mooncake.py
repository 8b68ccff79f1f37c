"""The remote tier over the real Mooncake: the suites of tiers, and owners and masters that die, freeze and fill up."""

from __future__ import annotations

import itertools
import signal
import time

import msgspec
import pytest

from workmem.core.events import BlockQuarantined
from workmem.core.outcomes import MissReason, TierName
from workmem.policy.order import Prospect
from workmem.store.config import BelowConfig, DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.store.tiers.contract import Outcome, PageName, PageOut, Tier
from workmem.store.tiers.mooncake.ledger import SEATS, Log, entry_of, seat_name
from workmem.store.tiers.mooncake.links import borrow, give_back
from workmem.store.tiers.mooncake.objects import PoolObject, object_name
from workmem.store.tiers.mooncake.options import parse_options
from workmem.store.tiers.mooncake.tier import MooncakeTier, mooncake_tier
from workmem.testing.below_suite import BelowSuite
from workmem.testing.mooncake import Master, Owner, pool
from workmem.testing.pages import SLICED, Chain, namespace, read_all, settle
from workmem.testing.tier_bench import outcomes_of, page_of
from workmem.testing.tier_suite import TierSuite
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(120)
POOLS, SEEDS = itertools.count(), itertools.count(1000)


@pytest.fixture(scope="module")
def shared():
    """A pool for all tests that harm nobody, with a client that outlives them: each takes a second to end."""
    with pool(64 * 2**20) as master:
        options = parse_options({"master": master.address, "capacity": "64MiB"})
        borrow(options)
        try:
            yield master
        finally:
            give_back(options)


def options_of(master: Master, name: str = "", **more) -> dict:
    return {
        "master": master.address,
        "capacity": "64MiB",
        "pool": name or f"p{next(POOLS)}",
        "poll_s": 0.02,
        **more,
    }


def opened(options: dict, dram: str = "4MiB", sink=lambda event: None, retry_s: float = 30.0) -> Store:
    return Store(
        StoreConfig(
            dram=DramConfig(bytes=dram),
            below=BelowConfig(tier="mooncake", options=options),
            ssd=SsdConfig(enabled=False, retry_s=retry_s),
        ),
        sink,
    )


class TestMooncakeTier(TierSuite):
    @pytest.fixture(autouse=True)
    def _pool(self, shared):
        self.options = options_of(shared)

    def make(self) -> Tier:
        return mooncake_tier({**self.options, "pool": f"p{next(POOLS)}"})

    def again(self, tier: MooncakeTier) -> Tier | None:
        return MooncakeTier(tier._options)


class TestStoreOverMooncake(BelowSuite):
    kind = TierName.REMOTE

    @pytest.fixture(autouse=True)
    def _pool(self, shared):
        self.options = options_of(shared)

    def open(self, dram: str) -> Store:
        return opened(self.options, dram)


# Several stores


def test_what_one_store_puts_another_has(shared):
    options = options_of(shared)
    chain = Chain(namespace(layout=SLICED), 24)
    with opened(options) as mine, opened(options, "8MiB") as other:
        other.register(chain.space)
        assert other.lookup(chain.root, chain.keys).blocks == 0
        chain.save(mine)
        wait_until(lambda: other.lookup(chain.root, chain.keys).blocks == 24, 20)
        assert set(chain.tiers(other)) == {TierName.REMOTE}
        assert read_all(other, chain.root, chain.keys[:7]) == 7  # Ends inside of an object.
        assert read_all(other, chain.root, chain.keys) == 24
        other.audit()


def test_what_one_store_drops_is_no_hit_of_another_though_nobody_asked_for_it(shared):
    options = options_of(shared)
    chain, kept = Chain(namespace(layout=SLICED), 8), Chain(namespace(layout=SLICED), 4, seed=1)
    with opened(options) as mine, opened(options) as other:
        other.register(chain.space)
        for one in (chain, kept):
            one.save(mine)
            wait_until(lambda c=one: other.lookup(c.root, c.keys).blocks == len(c.keys), 20)
        assert read_all(other, chain.root, chain.keys[:2]) == 2
        below = mine._below.tier
        below._drop([PageName(chain.root, bytes(key)) for key in chain.keys])
        # What its own dram has is a hit as before.
        wait_until(lambda: other.lookup(chain.root, chain.keys).blocks == 2, 20)
        assert set(chain.tiers(other)[:2]) == {TierName.DRAM}
        assert read_all(other, kept.root, kept.keys) == 4
        other.audit()


def test_a_store_is_heard_in_a_pool_whose_seats_were_all_taken_by_others_that_ended(shared):
    options = options_of(shared)
    chain = Chain(namespace(layout=SLICED), 4)
    link = borrow(parse_options(options))
    try:
        for seat in range(SEATS):
            assert link.write(seat_name(options["pool"], seat), b"ended%d" % seat)
        with opened(options) as mine, opened(options) as other:
            other.register(chain.space)
            chain.save(mine)
            wait_until(lambda: other.lookup(chain.root, chain.keys).blocks == 4, 20)
    finally:
        give_back(parse_options(options))


def test_two_versions_of_a_model_and_two_tenants_share_a_pool_and_no_page(shared):
    options = options_of(shared)
    chains = [Chain(namespace(name), 8) for name in ("model@1", "model@2")]
    with opened(options) as mine, opened(options) as other:
        for chain, store in itertools.product(chains, (mine, other)):
            store.register(chain.space)
        chains[0].save(mine)
        wait_until(lambda: other.gauges()["store_below_pages"] == 8, 20)
        assert other.lookup(chains[1].root, chains[1].keys).blocks == 0
        chains[1].save(other)
        for chain in chains:
            wait_until(lambda c=chain: mine.lookup(c.root, c.keys).blocks == 8, 20)
            assert read_all(mine, chain.root, chain.keys) == 8


def test_a_page_that_was_changed_in_the_pool_is_a_miss_and_nobody_asks_for_it_again(shared):
    options, events = options_of(shared), []
    chain = Chain(namespace(layout=SLICED), 12)
    link = borrow(parse_options(options))
    try:
        with opened(options) as mine, opened(options, sink=events.append) as other:
            other.register(chain.space)
            chain.save(mine)
            wait_until(lambda: other.lookup(chain.root, chain.keys).blocks == 12, 20)
            first = PageName(chain.root, bytes(chain.keys[0]))
            shelves = [store._below.tier.tier._shelf for store in (mine, other)]
            (place,) = shelves[1].find([first])
            name, size = place.inside.name, place.inside.size
            value = bytearray(link._client.get(name))
            assert len(value) == size
            value[70_000] ^= 1
            assert link._client.upsert(name, bytes(value)) == 0
            lease = other.lease(chain.root, chain.keys, owner="t", ttl_s=20)
            settle(lease)
            assert (lease.ready, lease.failed) == (0, MissReason.CORRUPT)
            lease.release()
            told = [event.reason for event in events if isinstance(event, BlockQuarantined)]
            assert told == [MissReason.CORRUPT]
            assert other.lookup(chain.root, chain.keys).blocks == 0
            wait_until(lambda: [shelf.find([first]) for shelf in shelves] == [[None], [None]], 10)
    finally:
        give_back(parse_options(options))


def test_four_times_what_the_pool_holds_is_put_and_nothing_refused():
    with pool(32 * 2**20) as master, opened(options_of(master, capacity="32MiB"), "16MiB") as store:
        for seed in range(48):
            chain = Chain(namespace(layout=SLICED), 14, seed=seed)
            chain.save(store)
            # Where beginnings are used again, ends leave first: objects lose pages one by one.
            assert seed % 2 or read_all(store, chain.root, chain.keys[:3]) == 3
        tier, gauges = store._below.tier.tier, store.gauges()
        counts = tier.counts
        assert tier._shelf.object_bytes <= 0.75 * 32 * 2**20
        assert gauges["store_writes_given_up_total"] == 0
        assert counts["put_stored"] > 0
        assert not [
            name for name in counts if name.startswith("put_") and name not in {"put_stored", "put_retries"}
        ]
        newest = Chain(namespace(layout=SLICED), 14, seed=47)
        assert read_all(store, newest.root, newest.keys) == 14


def test_a_page_that_another_writer_has_begun_is_not_there_and_not_lost(shared):
    """Mooncake answers 0 and stores nothing."""
    chain = Chain(namespace(layout=SLICED), 4)
    tier, link = mooncake_tier(options_of(shared)), borrow(parse_options(options_of(shared)))
    suite = TestMooncakeTier()
    try:
        with suite.bench(tier, sliced=True) as bench:
            about = tuple(page_of(chain, index, bench.room(index)).about for index in range(4))
            name, size = object_name(tier._options.pool, about), sum(page.length for page in about)
            assert link._client.batch_put_session_start([name], [size]) == [0]
            assert bench.put(chain, range(4)) == [Outcome.REFUSED] * 4
            assert bench.get(chain, range(4)) == [Outcome.ABSENT] * 4
            assert tier.counts["put_in_progress"] == 1
            link._client.batch_put_session_revoke([name])
            assert bench.put(chain, range(4)) == [Outcome.DONE] * 4
            assert bench.get(chain, range(4)) == [Outcome.DONE] * 4
    finally:
        give_back(parse_options(options_of(shared)))


def test_a_page_that_is_kept_comes_back_as_it_was_put_though_another_store_has_it_with_other_bytes(shared):
    """Two hosts that compute one block need not round alike."""
    chain, options = Chain(namespace(), 2), options_of(shared)
    suite = TestMooncakeTier()
    with suite.bench(mooncake_tier(options)) as other, suite.bench(mooncake_tier(options)) as mine:
        page = page_of(chain, 0, other.room(0))
        other.room(0)[-1] ^= 1
        about = msgspec.structs.replace(page.about, header_sum=page.about.header_sum ^ 1)
        outcomes_of(1, lambda done: other.tier.put([PageOut(about, page.page)], done))
        told = []
        mine.tier.watch(told.extend)
        wait_until(lambda: len(told) == 1, 10)
        assert mine.put(chain, [0]) == [Outcome.DONE]
        assert mine.get(chain, [0]) == [Outcome.DONE]


def test_whoever_waits_for_a_page_hears_of_it_long_before_the_next_look(shared):
    chain, options = Chain(namespace(), 4), options_of(shared, poll_s=60.0)
    with opened(options) as puts, opened(options) as waits:
        root = puts.register(chain.space)
        waits.register(chain.space)
        puts.save(root, chain.writes(indices=range(2)))
        assert puts.flush(20)
        time.sleep(0.3)
        assert waits.lookup(root, chain.keys).blocks == 0, "nobody waits, so nobody looks"
        wait_until(
            lambda: (
                waits.announce(root, chain.keys[:1], Prospect.EXPECTED)
                or waits.lookup(root, chain.keys).blocks == 2
            ),
            10,
        )
        puts.save(root, chain.writes(indices=range(2, 4)))
        # It was said a moment ago, and goes on for as long.
        wait_until(lambda: waits.lookup(root, chain.keys).blocks == 4, 10)
        assert read_all(waits, root, chain.keys) == 4


def test_an_object_that_is_not_what_was_told_is_a_miss_and_harms_no_other(shared):
    chain, options = Chain(namespace(), 8), options_of(shared)
    suite = TestMooncakeTier()
    with suite.bench(mooncake_tier(options)) as bench:
        pages = tuple(page_of(chain, index, bench.room(index)).about for index in range(4))
        link = bench.tier._session._link
        name = object_name(options["pool"], pages)
        assert link.write(name, bytes(pages[0].length))  # One page of the four.
        Log(link, options["pool"]).tell(entry_of([PoolObject(name, pages, "peer")]))
        told = []
        bench.tier.watch(told.extend)
        wait_until(lambda: len(told) == 4, 10)
        bench.put(chain, [7])
        assert bench.get(chain, [3, 7]) == [Outcome.ABSENT, Outcome.DONE]
        assert bench.get(chain, [2, 7]) == [Outcome.ABSENT, Outcome.DONE]
        assert bench.tier.counts["get_broken"] == 1


def test_an_object_that_ends_early_is_broken_and_its_owner_is_not_left_alone_for_it(shared):
    """Mooncake says of it what it says of an owner that is dead."""
    chain, options = Chain(namespace(layout=SLICED), 8), options_of(shared)
    suite = TestMooncakeTier()
    with suite.bench(mooncake_tier(options), sliced=True) as bench:
        assert bench.put(chain, range(6)) == [Outcome.DONE] * 6
        link, shelf = bench.tier._session._link, bench.tier._shelf
        (place,) = shelf.find([PageName(chain.root, bytes(chain.keys[0]))])
        (value,) = link.read([place.inside.name])
        link.remove([place.inside.name])
        assert link.write(place.inside.name, value[:-4096])
        lost: list[PageName] = []
        bench.tier.watch_losses(lost.extend)
        assert bench.put(chain, [7]) == [Outcome.DONE]
        pages = len(place.inside.pages)
        assert bench.get(chain, [pages - 1, 7]) == [Outcome.ABSENT, Outcome.DONE]
        assert bench.tier.counts["get_broken"] == 1
        # What lay beside it is gone with it.
        assert lost == [page.name for page in place.inside.pages[:-1]]


def test_what_is_read_slower_than_the_master_lends_is_a_miss():
    chain = Chain(namespace(layout=SLICED), 12)
    with pool(16 * 2**20, lease_ms=1) as master:
        tier = mooncake_tier(options_of(master))
        with TestMooncakeTier().bench(tier, sliced=True) as bench:
            bench.put(chain, range(12))
            for _ in range(10):
                assert set(bench.get(chain, range(12))) <= {Outcome.DONE, Outcome.ABSENT}
        assert tier.counts["get_lease_lost"] > 0


# Owners and masters that die


def timed(store: Store, chains: list[Chain]) -> tuple[int, float]:
    """Blocks that arrived, and the seconds that took."""
    started = time.monotonic()
    arrived = sum(read_all(store, chain.root, chain.keys) for chain in chains)
    return arrived, time.monotonic() - started


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_owner_that_dies_or_freezes_costs_its_pages_and_one_deadline(how):
    with pool(24 * 2**20) as master, opened(options_of(master), "8MiB") as store:
        other = Owner(master.address, 24 * 2**20)
        try:
            chains = [Chain(namespace(layout=SLICED), 8, seed=seed) for seed in range(16)]
            for chain in chains:
                chain.save(store)
            assert timed(store, chains)[0] == 128
            time.sleep(0.2)
            other.send(how)
            first, again = timed(store, chains), timed(store, chains)
            # Some of 16 objects lie with either: the odds of the contrary are one to 32,768.
            assert 0 < again[0] <= first[0] < 128
            assert first[1] < 3 + 2
            assert again[1] < 2
            assert not store.gauges()["store_below_error"]
            chain = Chain(namespace(layout=SLICED), 8, seed=16)
            chain.save(store)
            assert read_all(store, chain.root, chain.keys) == 8
        finally:
            other.send(signal.SIGCONT)
            other.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_master_that_dies_or_freezes_leaves_dram_to_serve_and_is_found_again(how):
    with pool(24 * 2**20) as master, opened(options_of(master), "4MiB", retry_s=0.3) as store:
        chains = [Chain(namespace(layout=SLICED), 8, seed=seed) for seed in range(4)]
        for chain in chains:
            chain.save(store)
        master.send(how)
        blocks, seconds = timed(store, chains)
        assert blocks < 32
        assert seconds < 3 + 5
        if how is signal.SIGSTOP:
            master.send(signal.SIGCONT)
            wait_until(lambda: not store.gauges()["store_below_error"], 20)
        else:
            master.kill()
        next_one = Master(master.port) if how is signal.SIGKILL else master
        try:
            # Owners come back by themselves within seconds.
            wait_until(lambda: is_kept_below(store, Chain(namespace(), 4, seed=next(SEEDS))), 30, step_s=0.2)
            store.audit()
        finally:
            next_one.kill()


def is_kept_below(store: Store, chain: Chain) -> bool:
    before = store.gauges()["store_below_pages"]
    chain.save(store)
    return store.gauges()["store_below_pages"] == before + 4 and not store.gauges()["store_below_error"]
