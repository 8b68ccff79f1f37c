"""What a store over any tier has to pass, the built-in one included. Subclass it as `tier_suite.TierSuite`."""

# ruff: noqa: D102 - the names of tests say what they are about

from __future__ import annotations

from abc import ABC, abstractmethod

from workmem.core.outcomes import MissReason, TierName
from workmem.store.config import BelowConfig, DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.testing.pages import Chain, namespace, read_all, settle
from workmem.testing.tier_bench import WAIT_S, require


class BelowSuite(ABC):
    """A store over the tier: what was saved is served, or it is a miss; never anything else."""

    kind = TierName.SSD
    outlives = True
    """Whether a store that is opened again finds the pages of the one before."""

    @abstractmethod
    def open(self, dram: str) -> Store:
        """A store with so much dram over the tier under test; over the same one if called again."""

    def test_pages_that_left_dram_are_served_from_below(self) -> None:
        with self.open("256KiB") as store:
            chains = [Chain(namespace(), 4, seed=seed) for seed in range(24)]
            for chain in chains:
                chain.save(store)
            below = sum(chain.tiers(store).count(self.kind) for chain in chains)
            require(below > 30, f"only {below} blocks are reported from {self.kind}")
            for chain in chains:
                require(read_all(store, chain.root, chain.keys) == 4, "blocks were lost")
            store.audit()

    def test_a_purged_tenant_is_gone_and_others_stay(self) -> None:
        with self.open("256KiB") as store:
            mine = [Chain(namespace("mine"), 4, seed=seed) for seed in range(12)]
            other = [Chain(namespace("other"), 4, seed=seed) for seed in range(12)]
            for chain in (*mine, *other):
                chain.save(store)
            store.purge(lambda space: space.model_fingerprint == "mine")
            require(store.flush(WAIT_S), "the purge does not settle")
            found = [store.lookup(chain.root, chain.keys).blocks for chain in mine]
            require(found == [0] * 12, "purged blocks are hits")
            for chain in other:
                require(read_all(store, chain.root, chain.keys) == 4, "others' blocks were lost")
            mine[0].save(store)
            require(read_all(store, mine[0].root, mine[0].keys) == 4, "the namespace cannot be used again")
            store.audit()

    def test_a_restart_finds_them_again(self) -> None:
        chains = [Chain(namespace(), 4, seed=seed) for seed in range(6)]
        with self.open("256KiB") as store:
            for chain in chains:
                chain.save(store)
        with self.open("256KiB") as store:
            for chain in chains:
                store.register(chain.space)
                found = chain.tiers(store)
                require(found == ((self.kind,) * 4 if self.outlives else ()), f"found {found}")
                require(read_all(store, chain.root, chain.keys) == len(found), "found blocks did not come")

    def test_a_lease_of_what_never_was_ends_at_once(self) -> None:
        with self.open("256KiB") as store:
            chain = Chain(namespace(), 3)
            store.register(chain.space)
            lease = store.lease(chain.root, chain.keys, owner="suite", ttl_s=WAIT_S)
            settle(lease)
            require((lease.ready, lease.failed) == (0, MissReason.COLD), f"{lease.ready}, {lease.failed}")
            lease.release()


def below_config(tier: str, dram: str) -> StoreConfig:
    """A store with an installed tier below dram."""
    return StoreConfig(
        dram=DramConfig(bytes=dram), below=BelowConfig(tier=tier), ssd=SsdConfig(enabled=False)
    )
