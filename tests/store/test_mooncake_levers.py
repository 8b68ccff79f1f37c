"""What the store knows of pages is done something with in the pool: on the real Mooncake, and the decisions alone."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections import Counter

import msgspec
import numpy as np
import pytest

from workmem.core.outcomes import TierName
from workmem.policy.order import Prospect
from workmem.store.config import BelowConfig, DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.store.tiers import opening
from workmem.store.tiers.contract import HeldPage, Outcome, PageFacts, PageName, TierUsage
from workmem.store.tiers.mooncake import caring
from workmem.store.tiers.mooncake.caring import Caring
from workmem.store.tiers.mooncake.link import _pin_ms
from workmem.store.tiers.mooncake.links import borrow, give_back
from workmem.store.tiers.mooncake.objects import PoolObject, group
from workmem.store.tiers.mooncake.options import parse_options
from workmem.store.tiers.mooncake.outcomes import PutResult
from workmem.store.tiers.mooncake.shelf import Shelf
from workmem.testing.mooncake import Master, Owner, pool
from workmem.testing.pages import SLICED, Chain, namespace, read_all
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(120)
POOLS = itertools.count()
MIB = 2**20


def options_of(master: Master, **more) -> dict:
    return {
        "master": master.address,
        "capacity": "64MiB",
        "pool": f"l{next(POOLS)}",
        "poll_s": 0.02,
        **more,
    }


def opened(options: dict, dram: str = "4MiB", tier: str = "mooncake") -> Store:
    return Store(
        StoreConfig(
            dram=DramConfig(bytes=dram),
            below=BelowConfig(tier=tier, options=options),
            ssd=SsdConfig(enabled=False),
        ),
        lambda event: None,
    )


def save(store: Store, chain: Chain, workflow: str = "") -> None:
    store.register(chain.space)
    store.save(chain.root, [msgspec.structs.replace(page, workflow=workflow) for page in chain.writes()])
    assert store.flush(20)


class Stranger:
    """Somebody who fills the pool, knows nothing of our pages, and has Mooncake evict what it likes."""

    def __init__(self, master: Master, **more) -> None:
        self._options = parse_options(options_of(master, **more))
        self.link = borrow(self._options)
        self._memory = memoryview(mmap.mmap(-1, MIB))
        self._memory[:] = os.urandom(MIB)
        self._at = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        self.link.register(self._at, MIB)
        space = namespace("stranger")
        self._page = HeldPage(PageName(space.root(), bytes(32)), space, bytes(32), 0, MIB, 0)
        self._numbers = itertools.count()

    def put(self, **more) -> PoolObject:
        """One MiB; waits for room."""
        one = PoolObject(f"stranger/{next(self._numbers)}/{os.urandom(4).hex()}", (self._page,), **more)
        until = time.monotonic() + 20
        while self.link.put([one], [[(self._at, MIB)]]) != [PutResult.STORED]:
            assert time.monotonic() < until
            time.sleep(0.01)
        return one

    def there(self, objects) -> list[bool]:
        """Which are whole, without having them kept."""
        return [peer is not None for peer in self.link.where(objects)]

    def close(self) -> None:
        self.link.unregister(self._at)
        give_back(self._options)


@pytest.fixture
def small():
    """A pool of 32 MiB that holds what is read for half a second."""
    with pool(32 * MIB, lease_ms=500) as master:
        stranger = Stranger(master)
        try:
            yield master, stranger
        finally:
            stranger.close()


def objects_of(store: Store, chain: Chain) -> list[PoolObject]:
    shelf = store._below.tier.tier._shelf
    places = shelf.find([PageName(chain.root, bytes(key)) for key in chain.keys])
    assert None not in places
    return list({place.inside.name: place.inside for place in places}.values())


# Groups


def test_the_pages_of_a_workflow_stay_together_and_go_together(small):
    """Four times the pool is put by somebody else: of each workflow all is left, or nothing."""
    master, stranger = small
    with opened(options_of(master), "16MiB") as store:
        flows = [Chain(namespace(layout=SLICED), 24, seed=seed) for seed in range(4)]
        for seed, chain in enumerate(flows):
            save(store, chain, f"flow {seed}")
        objects = [objects_of(store, chain) for chain in flows]
        assert all(len(some) > 1 and len({one.group for one in some}) == 1 for some in objects)
        assert len({some[0].group for some in objects}) == 4
        for _ in range(128):
            stranger.put()
            # One of them is asked for.
            assert stranger.link.is_there([objects[0][-1].name]) == [True]
        there = [stranger.there(some) for some in objects]
        assert all(there[0])
        assert all(len(set(some)) == 1 for some in there)
        assert not all(some[0] for some in there)


def test_objects_have_pages_of_one_group():
    chain = Chain(namespace(), 5)
    pages = [
        HeldPage(PageName(chain.root, bytes(key)), chain.space, bytes(chain.block(at).parent), at, 4096, at)
        for at, key in enumerate(chain.keys)
    ]
    assert group(pages, 1 << 20, ["a", "a", "b", "", ""]) == [[0, 1], [2], [3, 4]]


# What is wanted


def test_what_is_wanted_stays_though_somebody_else_fills_the_pool(small, monkeypatch):
    monkeypatch.setattr(caring, "RENEW_S", 0.1)
    master, stranger = small
    with opened(options_of(master, capacity="64MiB"), "16MiB") as store:
        wanted, other = (Chain(namespace(layout=SLICED), 12, seed=seed) for seed in range(2))
        for chain in (wanted, other):
            save(store, chain)
        assert store.announce(wanted.root, wanted.keys, Prospect.EXPECTED) == 12
        counts = store._below.tier.tier.counts
        wait_until(lambda: counts["leases_renewed"] > 2, 10)
        for _ in range(128):
            stranger.put()
            time.sleep(0.01)
        assert all(stranger.there(objects_of(store, wanted)))
        assert not any(stranger.there(objects_of(store, other)))
        store.announce(wanted.root, wanted.keys, Prospect.DONE)
        renewed = counts["leases_renewed"]
        time.sleep(0.3)
        assert counts["leases_renewed"] <= renewed + 2


def test_a_finished_workflow_leaves_first_and_a_wanted_one_stays(small):
    master, stranger = small
    with opened(options_of(master, capacity="32MiB"), "16MiB") as store:
        finished, wanted, middle = (Chain(namespace(layout=SLICED), 12, seed=seed) for seed in range(3))
        save(store, wanted)
        for chain in (middle, finished):
            save(store, chain)
        leaving = objects_of(store, finished)
        store.announce(finished.root, finished.keys, Prospect.DONE)
        store.announce(wanted.root, wanted.keys, Prospect.EXPECTED)
        # 0.65 of 32 MiB are kept: with these there is no room for all.
        for seed in range(3, 11):
            save(store, Chain(namespace(layout=SLICED), 12, seed=seed))
        assert not any(stranger.there(leaving))
        assert all(stranger.there(objects_of(store, wanted)))
        assert store._below.tier.tier._shelf.used_bytes <= 0.65 * 32 * MIB


def test_what_is_pinned_when_it_is_put_is_evicted_last(small):
    _, stranger = small
    pinned = [stranger.put(pin_s=120.0) for _ in range(4)]
    other = [stranger.put() for _ in range(4)]
    for _ in range(64):
        stranger.put()
    assert all(stranger.there(pinned))
    assert not any(stranger.there(other))


def test_a_pin_that_is_too_long_for_the_master_is_put_without_it():
    with pool(16 * MIB, default_kv_soft_pin_ttl=500, max_kv_soft_pin_ttl=1000) as master:
        stranger = Stranger(master)
        try:
            assert stranger.there([stranger.put(pin_s=3600.0)]) == [True]
        finally:
            stranger.close()


def test_pins_are_asked_for_in_steps_and_within_what_masters_allow():
    assert [_pin_ms(seconds) for seconds in (0.0, -1.0, 0.5, 29.0, 30.5, 1e9)] == [
        0,
        0,
        30_000,
        30_000,
        60_000,
        86_400_000,
    ]


class Asked:
    """A link that notes what it is asked."""

    def __init__(self):
        self.renewed: list[list[str]] = []
        self.copied: list[str] = []

    def is_there(self, names):
        self.renewed.append(sorted(names))
        return [True] * len(names)

    def endpoint(self):
        return "here"

    def copy_here(self, name):
        self.copied.append(name)
        return True


def shelf_of(*objects: tuple[str, str, str]) -> tuple[Shelf, dict[str, PageName]]:
    """Objects of a MiB by name, peer and group."""
    shelf, names = Shelf(), {}
    space = namespace()
    for number, (name, peer, group_name) in enumerate(objects):
        names[name] = PageName(space.root(), bytes([number]) * 32)
        page = HeldPage(names[name], space, bytes(32), 0, MIB, 0)
        shelf.add(PoolObject(name, (page,), peer, group_name))
    return shelf, names


def test_leases_of_what_is_wanted_are_renewed_once_a_group_and_within_a_share_of_the_pool(monkeypatch):
    monkeypatch.setattr(caring, "RENEW_S", 0.0)
    shelf, names = shelf_of(*((f"o{n}", "far", "g" if n < 3 else "") for n in range(8)))
    link = Asked()
    care = Caring(link, shelf, Counter(), 20 * MIB, 0, print)
    care.step()
    assert link.renewed == []
    care.note([names["o0"], names["o1"], names["o3"]], PageFacts(wanted_s=60))
    care.note([PageName(bytes(32), bytes(32))], PageFacts(wanted_s=60))  # On its way there.
    care.step()
    assert [len(asked) for asked in link.renewed] == [2]
    assert link.renewed[0][1] == "o3"
    # Five of the twenty MiB, and who was said last comes first.
    care.note([names[f"o{n}"] for n in (4, 5, 6, 7)], PageFacts(wanted_s=60))
    care.step()
    assert link.renewed[1] == ["o3", "o4", "o5", "o6", "o7"]
    # A group is kept whole, or not at all: with o0 come two more.
    care.note([names["o0"], names["o3"]], PageFacts(wanted_s=60))
    care.step()
    assert link.renewed[2][0] in {"o0", "o1"}
    assert link.renewed[2][1:] == ["o3", "o7"]
    care.note(list(names.values()), PageFacts())
    care.note([names["o0"]], PageFacts(wanted_s=0.01))
    time.sleep(0.02)
    care.step()
    assert len(link.renewed) == 3
    assert not link.copied


def test_what_is_found_gone_when_its_lease_is_to_be_renewed_is_told(monkeypatch):
    shelf, names = shelf_of(("o0", "far", ""), ("o1", "far", ""))
    link, lost = Asked(), []
    monkeypatch.setattr(link, "is_there", lambda asked: [name == "o1" for name in asked])
    care = Caring(link, shelf, Counter(), 20 * MIB, 0, lost.extend)
    care.note(list(names.values()), PageFacts(wanted_s=60))
    care.step()
    assert lost == [names["o0"]]
    assert [place is not None for place in shelf.find(list(names.values()))] == [False, True]


def test_copies_are_made_of_what_lies_elsewhere_once_and_within_a_share_of_the_segment(monkeypatch):
    monkeypatch.setattr(caring, "RENEW_S", 0.0)
    shelf, names = shelf_of(("o0", "here", ""), *((f"o{n}", "far", "") for n in range(1, 5)))
    link, counts = Asked(), Counter()
    care = Caring(link, shelf, counts, 1024 * MIB, 8 * MIB, print)
    for _ in range(3):
        care.note(list(names.values()), PageFacts(wanted_s=60))
        care.step()
    assert sorted(link.copied) == ["o3", "o4"]
    shelf.forget("o3", [names["o3"]])
    care.step()
    assert len(link.copied) == 3
    assert counts["copies_begun"] == 3


# Where pages lie


@pytest.fixture
def two():
    """A pool with two owners: of 16 MiB, and of 32 MiB, which may die."""
    with pool(16 * MIB) as master:
        far = Owner(master.address, 32 * MIB)
        try:
            yield master, far
        finally:
            far.kill()


def test_a_preferred_segment_takes_what_is_put():
    with pool(32 * MIB) as master:
        other = Owner(master.address, 32 * MIB)
        stranger = Stranger(master, preferred_segment=other.segment_name)
        try:
            placed = [stranger.put() for _ in range(12)]
            assert len(set(stranger.link.where(placed))) == 1
            other.kill()
            # The other one's memory is gone, and that is what there was.
            wait_until(lambda: stranger.link.read([placed[0].name]) == [b""], 10)
        finally:
            stranger.close()
            other.kill()


def test_what_is_expected_is_copied_to_this_host_and_outlives_the_host_it_came_from(two, monkeypatch):
    monkeypatch.setattr(caring, "RENEW_S", 0.1)
    master, far = two
    options = options_of(master, capacity="48MiB")
    chain = Chain(namespace(layout=SLICED), 10)
    near = {**options, "segment": "16MiB"}
    with opened({**options, "preferred_segment": far.segment_name}) as mine, opened(near) as other:
        other.register(chain.space)
        chain.save(mine)
        wait_until(lambda: other.lookup(chain.root, chain.keys).blocks == 10, 20)
        tier = other._below.tier.tier
        client = tier._session._link._client
        names = [one.name for one in objects_of(other, chain)]
        assert all(len(client.get_replica_desc(name)) == 1 for name in names)
        assert other.announce(chain.root, chain.keys, Prospect.EXPECTED) == 10

        def is_copied() -> bool:
            found = [client.get_replica_desc(name) for name in names]
            return all([str(one.status) for one in some] == ["ReplicaStatus.COMPLETE"] * 2 for some in found)

        wait_until(is_copied, 30)
        assert tier.counts["copies_begun"] == len(names)
        far.kill()
        assert read_all(other, chain.root, chain.keys) == 10


# Tenants


def test_a_quota_bounds_a_class_of_agents_and_takes_nothing_of_another(tmp_path):
    policy = tmp_path / "quotas.yaml"
    policy.write_text(
        "version: 1\ntenants:\n  - name: batch\n    quota: 8MB\n  - name: chat\n    quota: 16MB\n"
    )
    strict = {
        "enable_multi_tenants": "true",
        "tenant_quota_connector_type": "file",
        "tenant_quota_connector_uri": str(policy),
    }
    with pool(32 * MIB, lease_ms=500, **strict) as master:
        chat = options_of(master, tenant="chat", capacity="16MiB")
        with opened(chat) as mine, opened({**chat, "tenant": "batch", "capacity": "8MiB"}) as other:
            kept = Chain(namespace(layout=SLICED), 12)
            save(mine, kept)
            other.register(kept.space)
            for seed in range(1, 17):
                save(other, Chain(namespace(layout=SLICED), 12, seed=seed))
            shelf = other._below.tier.tier._shelf
            assert 0 < shelf.used_bytes <= 0.65 * 8 * MIB
            assert other.gauges()["store_writes_given_up_total"] == 0
            assert read_all(mine, kept.root, kept.keys) == 12
            with opened({**chat, "tenant": "nobody"}) as third:
                third.register(kept.space)
                third.save(kept.root, kept.writes())
                wait_until(lambda: third.gauges()["store_below_error"] == 1, 20)
            # Nor do they see each other's pages.
            assert other.lookup(kept.root, kept.keys).blocks == 0


# What the store says


class Advised:
    """A tier that notes what it is told."""

    kind = TierName.REMOTE

    def __init__(self):
        self.put_facts: dict[bytes, PageFacts] = {}
        self.told: list[tuple[list[bytes], PageFacts]] = []

    def open(self, arena):
        return []

    def put(self, pages, done):
        for index, page in enumerate(pages):
            self.put_facts[page.about.name.key] = page.facts
            done(index, Outcome.DONE)

    def get(self, pages, done):
        for index in range(len(pages)):
            done(index, Outcome.ABSENT)

    def drop(self, names, done):
        for index in range(len(names)):
            done(index, Outcome.DONE)

    def advise(self, names, facts):
        self.told.append(([name.key for name in names], facts))

    def usage(self):
        return TierUsage(0, 0, 0)

    def close(self, timeout_s):
        return True


@pytest.fixture
def advised(monkeypatch):
    tier = Advised()
    monkeypatch.setattr(opening, "find_tier", lambda name, options: tier)
    with opened({}, tier="advised") as store:
        yield store, tier


def test_a_tier_that_is_advised_hears_of_workflows_and_pins_with_the_page(advised):
    store, tier = advised
    chain, other = Chain(namespace(), 2), Chain(namespace(), 2, seed=1)
    foreign = Chain(msgspec.structs.replace(namespace(), tenant_salt="t"), 2, seed=2)
    store.register(chain.space)
    store.pin(chain.root, chain.keys[:1], owner="o", name="n", ttl_s=100)
    save(store, chain, "flow")
    save(store, other)
    save(store, foreign, "flow")
    facts = [tier.put_facts[bytes(key)] for key in (*chain.keys, *other.keys, *foreign.keys)]
    assert facts[0].group == facts[1].group != ""
    assert facts[2].group == facts[3].group == ""
    assert facts[4].group not in {"", facts[0].group}
    assert "flow" not in facts[0].group
    assert 90 < facts[0].wanted_s <= 100
    assert [one.wanted_s for one in facts[1:]] == [0.0] * 5


def test_a_tier_that_is_advised_hears_what_becomes_wanted_and_what_no_longer_is(advised):
    store, tier = advised
    chain = Chain(namespace(), 3)
    save(store, chain)
    keys = [bytes(key) for key in chain.keys]
    store.announce(chain.root, chain.keys, Prospect.EXPECTED)
    assert tier.told[-1] == (keys, PageFacts(wanted_s=600.0))
    store.announce(chain.root, chain.keys, Prospect.DONE)
    assert tier.told[-1] == (keys, PageFacts())
    store.pin(chain.root, chain.keys[:2], owner="o", name="n", ttl_s=50)
    told, facts = tier.told[-1]
    assert told == keys[:2]
    assert 45 < facts.wanted_s <= 50
    store.unpin("o", "n")
    assert tier.told[-1] == (keys[:2], PageFacts())
    tier.advise = None  # A bug of somebody else's ends nothing.
    assert store.announce(chain.root, chain.keys, Prospect.EXPECTED) == 3
