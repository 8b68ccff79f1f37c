"""Quotas in the wired store: ceilings are kept, floors are not taken, and nobody else pays for either."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from workmem.core.errors import CapacityError, ClientError, ConfigError
from workmem.core.layout import Namespace
from workmem.core.outcomes import TierName
from workmem.policy.order import Prospect
from workmem.store import catalog
from workmem.store.config import DramConfig, PinsConfig, QuotaConfig, SsdConfig, StoreConfig
from workmem.store.contract import PageWrite, SaveState
from workmem.store.steering import label_of
from workmem.store.store import Store
from workmem.testing.pages import SMALL, Chain, read_all

FRAME = 8192
IN_DRAM, ON_SSD = TierName.DRAM, TierName.SSD


def chain_of(tenant: str, length: int = 4, seed: int = 0) -> Chain:
    return Chain(Namespace(model_fingerprint="m", layout=SMALL, tenant_salt=tenant), length, seed)


def save_for(store: Store, chain: Chain, workflow: str) -> None:
    store.register(chain.space)
    writes = [PageWrite(page.block, page.copy_into, page.done, workflow) for page in chain.writes()]
    store.save(chain.root, writes)
    assert store.flush(20)


def used(store: Store, group: str, tier: str = "dram") -> float:
    return store.gauges()[f"store_{tier}_quota_{label_of(group)}_used_bytes"]


def test_group_past_its_ceiling_makes_room_from_its_own(kit):
    quota = QuotaConfig(dram_ceiling=8 * FRAME)
    store = kit.open(ssd=0, dram="256KiB", quotas={"greedy": quota})
    other = chain_of("other", 4)
    other.save(store)
    for seed in range(10):
        assert chain_of("greedy", 4, seed).save(store) == [SaveState.STORED] * 4
        assert used(store, "greedy") <= 8 * FRAME
    assert other.tiers(store) == (IN_DRAM,) * 4
    assert used(store, "greedy") == 8 * FRAME


def test_floor_is_not_taken_by_others(kit):
    store = kit.open(ssd=0, dram="256KiB", quotas={"small": QuotaConfig(dram_floor=8 * FRAME)})
    mine = [chain_of("small", 4, seed) for seed in range(2)]
    for chain in mine:
        chain.save(store)
    for seed in range(30):
        chain_of("other", 4, seed).save(store)
    assert [len(chain.tiers(store)) for chain in mine] == [4, 4]


def test_workflow_has_a_quota_of_its_own(kit):
    quotas = {"t/batch": QuotaConfig(dram_ceiling=4 * FRAME)}
    store = kit.open(ssd=0, dram="256KiB", quotas=quotas)
    chat = chain_of("t", 4, seed=100)
    save_for(store, chat, "chat")
    for seed in range(8):
        save_for(store, chain_of("t", 4, seed), "batch")
        assert used(store, "t/batch") <= 4 * FRAME
    assert len(chat.tiers(store)) == 4


def test_readings_do_not_name_tenants_and_tell_groups_apart(kit):
    groups = ("acme", "acme/nightly", "acme_nightly", "/nightly")
    store = kit.open(
        ssd="1MiB", dram="256KiB", quotas=dict.fromkeys(groups, QuotaConfig(dram_ceiling=4 * FRAME))
    )
    chain_of("acme", 2).save(store)
    names = [name for name in store.gauges() if "_quota_" in name and name.endswith("_used_bytes")]
    assert len({re.sub(r"\W", "_", name) for name in names}) == len(groups)
    assert not [name for name in store.gauges() if "acme" in name or "nightly" in name]


def test_a_new_workflow_with_every_request_takes_no_quota_from_others(kit, monkeypatch):
    monkeypatch.setattr(catalog, "WORKFLOWS_MAX", 8)
    monkeypatch.setattr(catalog, "QUOTA_WORKFLOWS", 4, raising=False)
    quotas = {"t/early": QuotaConfig(dram_ceiling=4 * FRAME)}
    store = kit.open(ssd=0, dram="256KiB", quotas=quotas)
    for seed in range(12):
        save_for(store, chain_of("t", 1, 100 + seed), f"request-{seed}")
    store.set_quota("t/late", IN_DRAM, ceiling_bytes=4 * FRAME)
    for group in ("early", "late"):
        save_for(store, chain_of("t", 2, len(group)), group)
        assert used(store, f"t/{group}") == 2 * FRAME


def test_save_that_a_quota_forbids_is_dropped_with_an_event(kit):
    store = kit.open(ssd=0, dram="256KiB", quotas={"t": QuotaConfig(dram_ceiling=2 * FRAME)})
    chain = chain_of("t", 2)
    chain.save(store)
    lease = store.lease(chain.root, chain.keys, owner="reader", ttl_s=60)
    assert chain_of("t", 1, seed=9).save(store) == [SaveState.DROPPED]
    assert "store.quota.dram" in kit.names()
    lease.release()
    assert chain_of("t", 1, seed=9).save(store) == [SaveState.STORED]


def test_quota_set_while_the_store_runs_holds_at_once(kit):
    store = kit.open(ssd="1MiB", dram="256KiB")
    mine, other = [chain_of("t", 4, seed) for seed in range(3)], chain_of("other", 4)
    for chain in [*mine, other]:
        chain.save(store)
    store.set_quota("t", IN_DRAM, ceiling_bytes=6 * FRAME)
    store.set_quota("t", ON_SSD, ceiling_bytes=8 * FRAME)
    assert used(store, "t") == 6 * FRAME
    assert used(store, "t", "ssd") == 8 * FRAME
    store.set_quota("other", IN_DRAM, floor_bytes=4 * FRAME)
    store.audit()
    assert other.tiers(store) == (IN_DRAM,) * 4
    store.set_quota("t", IN_DRAM)
    store.set_quota("t", ON_SSD)
    chain_of("t", 8, seed=7).save(store)
    assert f"store_dram_quota_{label_of('t')}_used_bytes" not in store.gauges()


def test_ssd_keeps_ceilings_and_floors_over_a_restart(kit):
    quotas = {"a": QuotaConfig(ssd_floor=16 * FRAME), "b": QuotaConfig(ssd_ceiling=8 * FRAME)}
    store = kit.open(ssd="1MiB", dram="256KiB", quotas=quotas)
    mine = [chain_of("a", 4, seed) for seed in range(4)]
    for chain in mine:
        chain.save(store)
    for seed in range(40):
        chain_of("b", 2, seed).save(store)
        chain_of("c", 4, seed).save(store)
        assert used(store, "b", "ssd") <= 8 * FRAME
    assert store.gauges()["store_ssd_used_bytes"] <= 1 << 20
    assert [read_all(store, chain.root, chain.keys) for chain in mine] == [4] * 4
    store.audit()
    store.close()
    again = kit.open(ssd="1MiB", dram="256KiB", quotas=quotas)
    for chain in mine:
        again.register(chain.space)
    assert used(again, "a", "ssd") == 16 * FRAME
    assert [read_all(again, chain.root, chain.keys) for chain in mine] == [4] * 4


@pytest.mark.parametrize(
    ("quotas", "text"),
    [
        ({"t": QuotaConfig(dram_floor="much")}, r'\$.store.quotas."t".dram_floor'),
        ({"t": QuotaConfig(dram_floor="1MiB")}, r'\$.store.quotas."t".dram_floor.*not promised'),
        ({"t": QuotaConfig(ssd_floor=9, ssd_ceiling=8)}, r'\$.store.quotas."t".ssd_floor.*below its floor'),
    ],
)
def test_quota_that_cannot_be_kept_stops_the_start(kit, quotas, text):
    with pytest.raises(ConfigError, match=text):
        kit.open(dram="256KiB", quotas=quotas)


def test_quota_of_a_tier_that_is_off_is_refused(kit):
    store = kit.open(ssd=0)
    with pytest.raises(ClientError, match="where it is on"):
        store.set_quota("t", ON_SSD, floor_bytes=1)
    with pytest.raises(ClientError, match="not promised"):
        store.set_quota("t", IN_DRAM, floor_bytes=1 << 40)


TENANTS = ("a", "b", "c")
CHAINS = tuple(chain_of(tenant, 4, seed) for tenant in TENANTS for seed in range(4))
FLOOR = 6 * FRAME
CEILING = 8 * FRAME


class SharesMachine(RuleBasedStateMachine):
    """Tenant a has a floor, b a ceiling, c nothing; pins and leases come and go."""

    @initialize(eviction=st.sampled_from(["value", "segmented_lru", "s3fifo", "lru"]), at_start=st.booleans())
    def start(self, eviction: str, *, at_start: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="workmem-shares-"))
        quotas = {
            "a": QuotaConfig(dram_floor=FLOOR, ssd_floor=FLOOR),
            "b": QuotaConfig(dram_ceiling=CEILING, ssd_ceiling=CEILING),
        }
        self.store = Store(
            StoreConfig(
                dram=DramConfig(bytes=20 * FRAME, eviction=eviction),
                ssd=SsdConfig(path=str(self.folder / "s"), bytes=80 * FRAME, eviction=eviction),
                pins=PinsConfig(budget="25%"),
                quotas=quotas if at_start else {},
            )
        )
        if not at_start:
            for tier in (IN_DRAM, ON_SSD):
                self.store.set_quota("a", tier, floor_bytes=FLOOR)
                self.store.set_quota("b", tier, ceiling_bytes=CEILING)
        for chain in CHAINS:
            self.store.register(chain.space)
        self.leases: list = []
        self.held_before: dict[str, float] = {}

    @rule(chain=st.sampled_from(CHAINS), upto=st.integers(1, 4))
    def save(self, chain: Chain, upto: int) -> None:
        tenant = chain.space.tenant_salt
        before = min(used(self.store, "a"), FLOOR)
        states: list[SaveState] = []
        self.store.save(chain.root, chain.writes(states.append, range(upto)))
        assert self.store.flush(20)
        if tenant != "a":
            assert used(self.store, "a") >= before, "a floor was taken"
        if not self.leases:
            assert SaveState.DROPPED not in states, "pins and quotas make no save fail"

    @rule(chain=st.sampled_from(CHAINS))
    def read(self, chain: Chain) -> None:
        with_none_held = not self.leases
        try:
            read_all(self.store, chain.root, chain.keys)
        except CapacityError:
            assert not with_none_held

    @rule(chain=st.sampled_from(CHAINS))
    def hold(self, chain: Chain) -> None:
        if len(self.leases) < 2:
            try:
                self.leases.append(self.store.lease(chain.root, chain.keys, owner="m", ttl_s=600))
            except CapacityError:
                assert self.leases

    @rule()
    def release(self) -> None:
        if self.leases:
            self.leases.pop().release()

    @rule(chain=st.sampled_from(CHAINS), name=st.sampled_from("xy"), owner=st.sampled_from(TENANTS))
    def pin(self, chain: Chain, name: str, owner: str) -> None:
        self.store.pin(chain.root, chain.keys, owner=owner, name=name, ttl_s=600)
        assert all(named <= 5 * FRAME for _, _, named in self.store.pool.state.care.pins.owners())

    @rule(name=st.sampled_from("xy"), owner=st.sampled_from(TENANTS))
    def unpin(self, name: str, owner: str) -> None:
        self.store.unpin(owner, name)

    @rule(chain=st.sampled_from(CHAINS), prospect=st.sampled_from([Prospect.DONE, Prospect.EXPECTED]))
    def announce(self, chain: Chain, prospect: Prospect) -> None:
        self.store.announce(chain.root, chain.keys, prospect)

    @rule(chain=st.sampled_from(CHAINS), group=st.sampled_from("gh"))
    def bind(self, chain: Chain, group: str) -> None:
        self.store.bind(chain.root, chain.keys, group)

    @rule()
    def requote(self) -> None:
        """A new group appears: all blocks are sorted anew."""
        self.store.set_quota("c", IN_DRAM, floor_bytes=FRAME)
        self.store.set_quota("c", IN_DRAM)

    @rule(tenant=st.sampled_from(TENANTS))
    def purge(self, tenant: str) -> None:
        if not self.leases:
            self.store.purge(lambda space: space.tenant_salt == tenant)
            assert self.store.gauges()["store_pins"] <= 6

    @invariant()
    def ceilings_hold_and_the_ledger_is_exact(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.audit()
        assert used(self.store, "b") <= CEILING
        assert used(self.store, "b", "ssd") <= CEILING

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for lease in self.leases:
            lease.release()
        assert self.store.flush(20)
        self.store.audit()
        self.store.close()
        shutil.rmtree(self.folder)


SharesMachine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSharesMachine = SharesMachine.TestCase
