"""What clients say about blocks reaches the store, is bounded, and pins outlive who set them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workmem.core.errors import ClientError, InvariantError, TransferError
from workmem.core.layout import Namespace
from workmem.core.outcomes import TierName
from workmem.policy.order import Prospect
from workmem.store.contract import PageWrite, PinResult
from workmem.store.host import steering
from workmem.store.host.steering import AnnounceHead, BindHead, PinHead, QuotaHead, UnpinHead
from workmem.store.host.wire import Malformed
from workmem.store.steering import label_of
from workmem.testing.pages import SMALL, Chain, namespace
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

CHAIN = Chain(namespace("small"), 6, seed=1)


def press(client, first: int, count: int = 12) -> None:
    for seed in range(first, first + count):
        Chain(namespace("others"), 8, seed=seed).save(client)


def test_a_pin_outlives_the_client_that_set_it_and_ends_by_any(host):
    host.serve(dram="256KiB", ssd=0)
    client, other = host.client(), host.client()
    CHAIN.save(client)
    other.register(CHAIN.space)
    pinned = client.pin(CHAIN.root, CHAIN.keys, owner="agent", name="tools", ttl_s=600)
    assert pinned == PinResult(blocks=6)
    client.close()
    wait_until(lambda: other.gauges()["store_host_connections"] <= 2)
    press(other, 100)
    assert len(CHAIN.tiers(other)) == 6
    assert other.gauges()["store_pins"] == 1
    assert other.unpin("agent", "tools")
    assert not other.unpin("agent", "tools")
    press(other, 200, 40)
    assert CHAIN.tiers(other) == ()
    other.audit()


def test_groups_uses_and_quotas_reach_the_store(host):
    host.serve(ssd=0)
    client = host.client()
    mine = Namespace(model_fingerprint="m", layout=SMALL, tenant_salt="acme")
    chain = Chain(mine, 4)
    chain.save(client)
    assert client.bind(chain.root, chain.keys, "conversation") == 4
    assert client.announce(chain.root, chain.keys, Prospect.EXPECTED) == 4
    assert client.announce(chain.root, CHAIN.keys, Prospect.DONE) == 0
    assert client.gauges()["store_life_groups"] == 1
    client.set_quota("acme", TierName.DRAM, ceiling_bytes=512 * 2**10)
    client.set_quota("acme/research", TierName.DRAM, floor_bytes=64 * 2**10)
    found = client.gauges()
    assert found[f"store_dram_quota_{label_of('acme')}_ceiling_bytes"] == 512 * 2**10
    study = Chain(mine, 3, seed=9)
    pages = [PageWrite(page.block, page.copy_into, page.done, "research") for page in study.writes()]
    client.save(study.root, pages)
    assert client.flush(20)
    used = client.gauges()[f"store_dram_quota_{label_of('acme/research')}_used_bytes"]
    assert used == 3 * (SMALL.page_bytes + 4096)


def test_what_cannot_be_done_is_told_and_the_connection_goes_on(host):
    host.serve(ssd=0)
    client = host.client()
    CHAIN.save(client)
    with pytest.raises(InvariantError, match="not registered"):
        client.pin(bytes(32), CHAIN.keys, owner="a", name="p", ttl_s=1)
    for wrong in (
        lambda: client.pin(CHAIN.root, CHAIN.keys, owner="a", name="p", ttl_s=0),
        lambda: client.announce(CHAIN.root, CHAIN.keys, Prospect.PINNED),
        lambda: client.bind(CHAIN.root, CHAIN.keys * 1000, "g"),
        lambda: client.pin(CHAIN.root, CHAIN.keys * 30000, owner="a", name="p", ttl_s=1),
        lambda: client.set_quota("acme", TierName.REMOTE, floor_bytes=1),
        lambda: client.set_quota("acme", TierName.DRAM, floor_bytes=2**60),
        lambda: client.set_quota("acme", TierName.SSD, floor_bytes=1),
    ):
        with pytest.raises(ClientError):
            wrong()
    assert client.lookup(CHAIN.root, CHAIN.keys).blocks == 6
    assert client.gauges()["store_client_reconnects_total"] == 0


def test_advice_is_lost_without_a_server_and_a_quota_says_so(host):
    client = host.client(attaches=False)
    client.register(CHAIN.space)
    assert client.pin(CHAIN.root, CHAIN.keys, owner="a", name="p", ttl_s=1) == PinResult(blocks=0)
    assert not client.unpin("a", "p")
    assert client.announce(CHAIN.root, CHAIN.keys, Prospect.DONE) == 0
    assert client.bind(CHAIN.root, CHAIN.keys, "g") == 0
    with pytest.raises(TransferError, match="no server"):
        client.set_quota("acme", TierName.DRAM, floor_bytes=1)


NAMES = st.text(max_size=40)
ROOTS = st.just(CHAIN.root)
HEADS = st.one_of(
    st.builds(PinHead, ROOTS, NAMES, NAMES, st.floats(-1, 1e9)),
    st.builds(UnpinHead, NAMES, NAMES),
    st.builds(AnnounceHead, ROOTS, st.integers(0, 255)),
    st.builds(BindHead, ROOTS, NAMES),
    st.builds(
        QuotaHead, NAMES, st.sampled_from(TierName), st.integers(0, 2**62), st.none() | st.integers(0, 9)
    ),
)


@given(head=HEADS, count=st.integers(0, 6))
def test_what_is_said_survives_the_wire(head, count):
    body = memoryview(steering.pack_said(head, CHAIN.keys[:count]))
    assert steering.unpack_said(body, type(head)) == (head, tuple(CHAIN.keys[:count]))


@given(
    body=st.binary(max_size=80), form=st.sampled_from([PinHead, UnpinHead, AnnounceHead, BindHead, QuotaHead])
)
def test_nonsense_is_refused(body, form):
    for raw in (body, struct.pack("<H", len(body)) + body, struct.pack("<H", 2**16 - 1) + body):
        with pytest.raises(Malformed):
            steering.unpack_said(memoryview(raw), form)


def test_what_cannot_be_sent_is_the_callers_error_and_costs_no_lease(host):
    host.serve(ssd=0)
    client = host.client()
    CHAIN.save(client)
    lease = client.lease(CHAIN.root, CHAIN.keys, owner="t", ttl_s=20)
    for name, ttl_s in (("n" * 2**20, 60.0), ("n" * 600, 60.0), ("n", float("inf")), ("n", float("nan"))):
        with pytest.raises(ClientError):
            client.pin(CHAIN.root, CHAIN.keys, owner="agent", name=name, ttl_s=ttl_s)
    with pytest.raises(ClientError, match="group"):
        client.bind(CHAIN.root, CHAIN.keys, "g" * 600)
    assert client.unpin("agent", "n") is False
    assert lease.page(5)
    assert client.gauges()["store_client_reconnects_total"] == 0
    lease.release()
