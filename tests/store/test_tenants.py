"""Tenants share nothing, not even the time that a lookup takes, unless they are declared one."""

from __future__ import annotations

from workmem.core.layout import Namespace
from workmem.core.outcomes import MissReason
from workmem.policy.order import Prospect
from workmem.store.tools.folder_view import read_folder
from workmem.store.tools.listing import blocks_of, find_space
from workmem.testing.pages import SMALL, Chain, read_all


def tenant(name: str) -> Namespace:
    return Namespace(model_fingerprint="model", layout=SMALL, tenant_salt=name)


class Watched(dict):
    """A dict that says when it is asked."""

    asked = 0

    def get(self, *arguments):
        Watched.asked += 1
        return super().get(*arguments)

    def __getitem__(self, key):
        Watched.asked += 1
        return super().__getitem__(key)

    def __contains__(self, key) -> bool:
        Watched.asked += 1
        return super().__contains__(key)


def test_same_text_of_another_tenant_is_cold_and_its_blocks_are_not_looked_at(kit):
    store = kit.open()
    theirs, mine = Chain(tenant("theirs"), 6, seed=1), Chain(tenant("mine"), 6, seed=1)
    theirs.save(store)
    store.register(mine.space)
    space = store.pool.space(theirs.root)
    space.rows, space.ghosts = Watched(space.rows), Watched(space.ghosts)
    Watched.asked = 0
    for keys in (mine.keys, theirs.keys):
        found = store.lookup(mine.root, keys)
        assert (found.blocks, found.reason) == (0, MissReason.COLD)
        lease = store.lease(mine.root, keys, owner="mine", ttl_s=60)
        assert (lease.ready, lease.failed) == (0, MissReason.COLD)
        lease.release()
    assert store.announce(mine.root, theirs.keys, Prospect.DONE) == 0
    assert store.pin(mine.root, theirs.keys, owner="mine", name="p", ttl_s=60).blocks == 0
    assert store.bind(mine.root, theirs.keys, "g") == 0
    assert Watched.asked == 0, "what a tenant has must not show in the time of another's lookup"
    assert read_all(store, theirs.root, theirs.keys) == 6
    assert Watched.asked > 0


def test_what_left_is_evicted_for_its_tenant_and_cold_for_others(kit):
    store = kit.open(ssd=0, dram="64KiB")
    theirs, mine = Chain(tenant("theirs"), 2, seed=1), Chain(tenant("mine"), 2, seed=1)
    theirs.save(store)
    store.register(mine.space)
    for seed in range(10, 20):
        Chain(tenant("others"), 2, seed=seed).save(store)
    assert store.lookup(theirs.root, theirs.keys).reason is MissReason.EVICTED
    assert store.lookup(mine.root, mine.keys).reason is MissReason.COLD


def test_tenants_that_are_declared_one_share(kit):
    store = kit.open()
    first, second = Chain(tenant("team"), 4, seed=1), Chain(tenant("team"), 4, seed=1)
    first.save(store)
    assert read_all(store, second.root, second.keys) == 4


def test_listing_is_by_tenant(kit):
    store = kit.open()
    chains = {name: Chain(tenant(name), 3, seed=1) for name in ("a", "b")}
    for chain in chains.values():
        chain.save(store)
    store.close()
    view = read_folder(kit.folder)
    for name, chain in chains.items():
        listed = blocks_of(find_space(view, chain.root.hex()))
        assert {page.key for page in listed} == set(chain.keys), name
