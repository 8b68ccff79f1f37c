"""The guide, followed to the letter over the real Mooncake: on one host, and on two of which one leaves."""

from __future__ import annotations

import json
import signal

import pytest

from workmem.cluster.config import ClusterConfig
from workmem.cluster.hosting import Hosting
from workmem.config import load
from workmem.core.errors import TransferError
from workmem.core.outcomes import TierName
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.testing.pages import SLICED, Chain, namespace, read_all
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(120)
MIB = 2**20


def opened(toml: str, folder) -> Store:
    """A store with the configuration that `up` printed."""
    file = folder / "printed.toml"
    file.write_text(toml)
    below = load(file, environ={}).config.store.below
    return Store(StoreConfig(dram=DramConfig(bytes="16MiB"), below=below, ssd=SsdConfig(enabled=False)))


def test_the_guide_on_one_host(hosts):
    up, table, as_json, doctor = hosts.commands("On one host, to try it")
    host = hosts.up(up)
    shown = hosts.run(table)
    assert shown.code == 0, shown.err
    assert "serving" in shown.out
    assert "of 64.0 MiB, 0%; 0 keys, 1 clients" in shown.out
    found = json.loads(hosts.run(as_json).out)
    assert [one["role"] for one in found["masters"]] == ["leader"]
    assert [(one["size_bytes"], one["status"]) for one in found["segments"]] == [(64 * MIB, "OK")]
    assert found["pool"]["capacity_bytes"] == 64 * MIB
    told = hosts.run(doctor)
    assert told.code == 0, told.out + told.err
    assert "0 wrong" in told.out

    # What dies is started again, and joins by itself.
    first = host.part("segment")
    first.kill()
    host.hear("the segment ended; it is started again")
    host.hear("  segment ", times=2)
    assert host.part("segment").pid != first.pid
    host.part("master").kill()
    host.hear("the master ended; it is started again")
    host.hear("  master ", times=2)
    wait_until(lambda: len(hosts.look().segments) == 1)
    parts = host.part("master"), host.part("segment")
    assert not any(part.has_ended for part in parts)

    second = hosts.run(up)
    assert second.code == 2
    assert "$.cluster.port: " in second.err
    assert f"cluster.master=127.0.0.1:{hosts.port}" in second.err

    assert host.end(signal.SIGINT) == 0
    assert "the pool ends with its master" in host.said
    assert all(part.has_ended for part in parts)
    told = hosts.run(doctor)
    assert told.code == 1
    assert "`workmem cluster up` starts one" in told.out
    assert hosts.run(table).code == 1


def test_a_host_that_leaves_hands_its_pages_to_another(hosts, tmp_path, monkeypatch):
    # A page is not moved before its lease has run out, ten seconds after somebody looked at it.
    monkeypatch.setenv("WORKMEM__CLUSTER__LEASE_S", "1")
    first, second, *_ = hosts.commands("On several")
    one = hosts.up(first, **{"64GiB": "64MiB"})
    two = hosts.up(second, **{"64GiB": "64MiB", "=10.0.0.1:": "=localhost:"})
    assert [found.host for found in hosts.look().segments] == ["127.0.0.1", "127.0.0.2"]
    assert 'capacity = "128.0MiB"' in two.printed
    assert f"# Masters answer at http://localhost:{hosts.admin_port}" in two.printed
    chain = Chain(namespace(layout=SLICED), 40)
    with opened(two.printed, tmp_path) as mine:
        chain.save(mine)
        wait_until(lambda: mine.gauges()["store_below_pages"] == 40)
    # Closed: what a running store looks at again and again never loses its lease.
    held = sum(found.allocator_used_bytes for found in hosts.look().segments)
    assert two.end() == 0
    moved = int(two.said.split(" objects moved to other hosts")[0].split()[-1])
    assert moved > 0
    assert "stayed" not in two.said
    (left,) = hosts.look().segments
    assert left.allocator_used_bytes == held
    with opened(one.printed, tmp_path) as other:
        other.register(chain.space)
        wait_until(lambda: other.lookup(chain.root, chain.keys).blocks == 40)
        assert set(chain.tiers(other)) == {TierName.REMOTE}
        assert read_all(other, chain.root, chain.keys) == 40
    assert one.end() == 0


def test_an_address_that_anybody_may_reach_starts_nothing(hosts):
    refused = hosts.run("workmem cluster up --set cluster.admin_host=0.0.0.0")
    assert refused.code == 2
    assert "$.cluster.admin_host: '0.0.0.0' is every address of this host" in refused.err
    assert "cluster.allow_public=true" in refused.err
    assert "Traceback" not in refused.err


def test_a_host_that_cannot_join_says_why(hosts):
    hosting = Hosting(ClusterConfig(master=f"127.0.0.1:{hosts.port}", start_s=0.1), lambda text: None)
    with pytest.raises(
        TransferError, match=rf"nobody answers at 127.0.0.1:{hosts.port} within 0.1 s: .*cluster.master"
    ):
        hosting.start()
    assert hosting.pids == {"segment": 0}
