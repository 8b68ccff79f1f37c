"""What a client asks of the store as a whole: purges by selector, and a scrub that can be watched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workmem.core.errors import TransferError
from workmem.core.layout import Namespace
from workmem.core.outcomes import MissReason, TierName
from workmem.store.host.client import HostStore
from workmem.store.selector import Purged, PurgeSelector
from workmem.testing.pages import SMALL, Chain, page_bytes, read_all
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(60)


def chain_of(tenant: str, length: int = 6) -> Chain:
    space = Namespace(model_fingerprint="model", layout=SMALL, tenant_salt=tenant)
    return Chain(space, length, seed=len(tenant))


def on_disk(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in (folder / "ssd" / "segments").iterdir())


def test_a_purge_by_one_client_is_a_miss_for_all_and_leaves_nothing(host):
    host.serve()
    client, other = host.client(), host.client()
    mine, theirs = chain_of("mine"), chain_of("theirs", 4)
    for chain in (mine, theirs):
        chain.save(client)
        other.register(chain.space)
    chosen = PurgeSelector(tenant="mine")
    expected = Purged(namespaces=1, blocks=6, bytes=6 * SMALL.page_bytes)
    assert client.survey(chosen) == expected
    assert other.lookup(mine.root, mine.keys).blocks == 6
    assert client.purge(chosen) == expected
    found = other.lookup(mine.root, mine.keys)
    assert (found.blocks, found.reason) == (0, MissReason.COLD)
    assert read_all(other, theirs.root, theirs.keys) == 4
    assert client.purge(chosen) == Purged(namespaces=0, blocks=0, bytes=0)
    assert client.flush(20)
    assert page_bytes(mine.keys[2], SMALL)[:64] not in on_disk(host.folder)
    assert page_bytes(theirs.keys[2], SMALL)[:64] in on_disk(host.folder)
    # Clients have it open still; the journal does not name it.
    journal = (host.folder / "ssd" / "journal").read_bytes()
    assert (mine.root in journal, theirs.root in journal) == (False, True)
    # Nobody has to declare it anew.
    mine.save(other)
    assert read_all(client, mine.root, mine.keys) == 6
    client.audit()


def test_pages_held_or_being_filled_by_clients_do_not_outlive_a_purge(host):
    host.serve(ssd=0)
    client = host.client()
    held, late = chain_of("mine"), Chain(chain_of("mine").space, 1, seed=77)
    held.save(client)
    lease = client.lease(held.root, held.keys, owner="reader", ttl_s=60)
    states = []
    [page] = late.writes(states.append)

    def purged_meanwhile(view: memoryview) -> None:
        page.copy_into(view)
        with HostStore(host.socket) as other:
            assert other.purge(PurgeSelector(tenant="mine")).blocks == 6

    client.save(late.root, [type(page)(page.block, purged_meanwhile, page.done)])
    wait_until(lambda: states == ["dropped"])
    assert client.lookup(late.root, late.keys).blocks == 0
    # What is held stays what it is until it is given back; then nothing of it is left.
    assert bytes(lease.page(5)) == page_bytes(held.keys[5], SMALL)
    lease.release()
    wait_until(lambda: client.gauges()["store_dram_used_bytes"] == 0)
    client.audit()
    with host.store.arena.readable(0, host.store.arena.capacity_bytes) as arena:
        assert page_bytes(held.keys[5], SMALL)[:64] not in bytes(arena)


def test_purge_and_scrub_without_a_server_are_errors_not_silence(host):
    client = host.client(attaches=False)
    with pytest.raises(TransferError, match="no server"):
        client.purge(PurgeSelector(everything=True))
    with pytest.raises(TransferError, match="no server"):
        list(client.scrub(2**20))


def test_a_scrub_tells_how_far_it_is_and_takes_what_is_damaged_out_of_service(host):
    host.serve()
    chain = chain_of("mine", 8)
    client = host.client()
    chain.save(client)
    # Only the disk has them from here on.
    host.stop()
    damage(host.folder, page_bytes(chain.keys[5], SMALL))
    host.serve()
    wait_until(lambda: client.is_attached)
    done = list(client.scrub(2**30))[-1]
    assert done.has_ended
    assert (done.pages, done.damaged, done.unreadable) == (7, 1, 0)
    assert done.bytes >= 7 * SMALL.page_bytes
    assert chain.tiers(client) == (TierName.SSD,) * 5
    assert list(client.scrub(2**30))[-1].damaged == 0
    client.audit()


def test_a_scrub_keeps_to_its_rate_across_requests_and_ends_with_its_client(host):
    host.serve()
    chain = chain_of("mine", 8)
    client = host.client()
    chain.save(client)
    rate = 2 * (SMALL.page_bytes + 4096)
    scrub = client.scrub(rate)
    seen = [next(scrub).pages for _ in range(4)]
    # Two pages a second, in slices of a quarter.
    assert 0 < seen[-1] <= 4
    assert not host.store.gauges()["store_quarantines_total"]
    scrub.close()
    wait_until(lambda: client.gauges()["store_host_connections"] <= 2)


def test_a_store_without_a_disk_has_nothing_to_scrub(host):
    host.serve(ssd=0)
    with pytest.raises(TransferError, match="no ssd"):
        list(host.client().scrub(2**20))


def damage(folder: Path, page: bytes) -> None:
    for file in (folder / "ssd" / "segments").iterdir():
        at = file.read_bytes().find(page)
        if at >= 0:
            with file.open("r+b") as stream:
                os.pwrite(stream.fileno(), bytes([page[0] ^ 1]), at)
            return
    raise AssertionError("the page is on no segment")
