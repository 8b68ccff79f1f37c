"""Processes that are killed or stopped anywhere, on real shared memory (R2, R3, R5)."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from workmem.core.errors import TransferError
from workmem.core.outcomes import MissReason, TierName
from workmem.store.contract import SaveState
from workmem.store.host.client import HostStore
from workmem.testing.pages import SLICED, Chain, namespace, page_bytes, read_all, settle
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

SOAK_S = float(os.environ.get("WORKMEM_SOAK_S", "5"))
CHAINS = [Chain(namespace("small"), 8, seed=seed) for seed in range(10)]
CHAINS += [Chain(namespace("sliced", SLICED), 2, seed=seed) for seed in range(4)]
POINTS = [
    *(f"{when} {kind}" for when in ("before", "after") for kind in ("RESERVE", "COMMIT", "LEASE", "RELEASE")),
    "fill",
    "read",
    "after HELLO",
    "any instruction",
]


def clients_are_gone(client: HostStore) -> bool:
    """Only `client` and what it holds is left."""
    found = client.gauges()
    return found.get("store_host_connections", 99) <= 2 and not any(
        found[f"store_host_{name}"] for name in ("leases", "reservations", "stranded_frames")
    )


def check_all(client: HostStore) -> int:
    """The ledger is exact, no frame is held or lost, and every block that is there is what was written."""
    client.audit()
    found = client.gauges()
    assert found["store_dram_quarantined_bytes"] == 0
    assert found["store_dram_used_bytes"] == found["store_dram_resident_bytes"]
    for chain in CHAINS:
        client.register(chain.space)
    return sum(read_all(client, chain.root, chain.keys) for chain in CHAINS)


def kill_clients(nursery, socket, client: HostStore, *, rounds: int, rng: random.Random) -> int:
    """Five clients at work; each round kills some at points of their own. Returns how many were killed."""
    killed = 0
    living: list[int] = []
    for _ in range(rounds):
        while len(living) < 5:
            point = rng.choice(POINTS)
            pid = nursery.start(
                "churn", socket=socket, seed=rng.random(), point=point, countdown=rng.choice([1, 1, 2, 5])
            )
            living.append(pid)
            if point == "any instruction":
                time.sleep(rng.random() * 0.3)
                nursery.signal(pid, signal.SIGKILL)
        nursery.wait_for_a_death_among(living)
        killed += sum(not nursery.lives(pid) for pid in living)
        living = [pid for pid in living if nursery.lives(pid)]
    for pid in living:
        nursery.kill(pid)
    wait_until(lambda: clients_are_gone(client))
    return killed


def test_clients_killed_anywhere_leak_no_frame_and_no_half_written_block(nursery, tmp_path):
    socket = tmp_path / "store.sock"
    nursery.serve(socket, tmp_path / "ssd")
    with HostStore(socket) as client:
        rng = random.Random(7)
        assert kill_clients(nursery, socket, client, rounds=12, rng=rng) >= 12
        assert check_all(client) > 0
        assert client.gauges()["store_quarantines_total"] == 0


@pytest.mark.parametrize("point", POINTS[:-1])
def test_killed_at(nursery, tmp_path, point):
    socket = tmp_path / "store.sock"
    server = nursery.serve(socket, tmp_path / "ssd", ssd=0, reservation_s=3600)
    with HostStore(socket) as client:
        pid = nursery.start("churn", socket=socket, seed=point, point=point)
        nursery.wait_gone(pid)
        wait_until(lambda: clients_are_gone(client))
        check_all(client)
    nursery.kill(server)


def test_a_client_killed_with_a_child_that_keeps_its_socket_is_noticed(nursery, tmp_path):
    socket = tmp_path / "store.sock"
    nursery.serve(socket, tmp_path / "ssd", lease_s=3600)
    with HostStore(socket) as client:
        pid = nursery.start("hold", socket=socket, forks=True)
        assert nursery.heard(pid)["ready"] == 4
        assert client.gauges()["store_host_leases"] == 1
        nursery.kill(pid)
        wait_until(lambda: clients_are_gone(client))
        client.audit()


def test_a_writer_stopped_past_its_deadline_cannot_commit_and_harms_nobody(nursery, tmp_path):
    socket = tmp_path / "store.sock"
    nursery.serve(socket, tmp_path / "ssd", reservation_s=0.5)
    chain = Chain(namespace("small"), 1)
    with HostStore(socket) as client:
        client.register(chain.space)
        pid = nursery.start("save_stopping", socket=socket)
        assert nursery.heard(pid)["stopping"]
        wait_until(lambda: client.gauges()["store_host_stranded_frames"] == 1)
        assert client.gauges()["store_dram_quarantined_bytes"] > 0
        assert client.lookup(chain.root, chain.keys).blocks == 0
        assert chain.save(client) == [SaveState.STORED]
        os.kill(pid, signal.SIGCONT)
        assert nursery.heard(pid)["states"] == [SaveState.DROPPED]
        # It has said that it is done, so its frame need not wait for its death.
        wait_until(lambda: client.gauges()["store_dram_quarantined_bytes"] == 0)
        assert read_all(client, chain.root, chain.keys) == 1
        client.audit()


def test_a_stopped_writer_that_is_killed_gives_its_frame_back(nursery, tmp_path):
    socket = tmp_path / "store.sock"
    nursery.serve(socket, tmp_path / "ssd", reservation_s=0.5)
    with HostStore(socket) as client:
        pid = nursery.start("save_stopping", socket=socket)
        assert nursery.heard(pid)["stopping"]
        wait_until(lambda: client.gauges()["store_host_stranded_frames"] == 1)
        nursery.kill(pid)
        wait_until(lambda: clients_are_gone(client))
        check_all(client)


def test_a_reader_stopped_past_its_lease_finds_out(nursery, tmp_path):
    socket = tmp_path / "store.sock"
    nursery.serve(socket, tmp_path / "ssd", dram="256KiB", ssd=0, lease_s=0.5)
    chain = Chain(namespace("small"), 4)
    with HostStore(socket) as client:
        chain.save(client)
        pid = nursery.start("read_stopping", socket=socket)
        assert nursery.heard(pid)["ready"] == 4
        wait_until(lambda: client.gauges()["store_leases_expired_total"] == 1)
        for seed in range(1, 40):
            other = Chain(namespace("small"), 4, seed=seed)
            other.save(client)
            # Used again like the leased one, which would else outlive all that are used once.
            read_all(client, other.root, other.keys)
        assert client.lookup(chain.root, chain.keys).blocks == 0
        os.kill(pid, signal.SIGCONT)
        found = nursery.heard(pid)
        assert found["same"] is False
        assert found["sums_hold"] is False
        assert found["page"] == found["checksums"] == "out of reach"
        client.audit()


def test_a_killed_server_costs_misses_and_its_successor_serves_what_ssd_kept(nursery, tmp_path):
    socket = tmp_path / "store.sock"
    server = nursery.serve(socket, tmp_path / "ssd")
    chain = CHAINS[0]
    with HostStore(socket) as client:
        chain.save(client)
        lease = client.lease(chain.root, chain.keys, owner="reader", ttl_s=3600)
        settle(lease)
        nursery.kill(server)
        wait_until(lambda: not client.is_attached)
        assert client.lookup(chain.root, chain.keys).reason is MissReason.UNAVAILABLE
        states: list[SaveState] = []
        client.save(chain.root, chain.writes(states.append))
        wait_until(lambda: states == [SaveState.DROPPED] * 8)
        # Nobody is left to give the frames to others, so what was held stays what it is.
        assert bytes(lease.page(7)) == page_bytes(chain.keys[7], lease.layout)
        with pytest.raises(TransferError):
            client.audit()
        nursery.serve(socket, tmp_path / "ssd")
        wait_until(lambda: client.is_attached)
        assert bytes(lease.page(7)) == page_bytes(chain.keys[7], lease.layout)
        lease.release()
        assert chain.tiers(client) == (TierName.SSD,) * 8
        assert read_all(client, chain.root, chain.keys) == 8
        client.audit()


class Storm:
    """Five clients at work on a server; kills, stops and continues any of them and cuts their links, at random."""

    def __init__(self, nursery, folder, rng: random.Random) -> None:
        self.nursery = nursery
        self.folder = folder
        self.rng = rng
        self.server = 0
        self.clients: list[int] = []
        self.kills = 0
        self.cuts = 0

    def serve(self) -> None:
        self.server = self.nursery.serve(
            self.folder / "store.sock", self.folder / "ssd", lease_s=0.6, reservation_s=0.6
        )

    def blow(self) -> None:
        rng = self.rng
        while len(self.clients) < 5:
            settings = {"socket": self.folder / "store.sock", "seed": rng.random()}
            if rng.random() < 0.3:
                settings |= {"point": rng.choice(POINTS), "countdown": rng.choice([1, 3, 9])}
            self.clients.append(self.nursery.start("churn", **settings))
        time.sleep(rng.random() * 0.2)
        victim = rng.choice(self.clients)
        what = rng.random()
        if what < 0.35:
            self.kill(victim)
        elif what < 0.6:
            # From the server's side and from the client's; both live on.
            self.cut(rng.choice([victim, self.server]))
        elif what < 0.8 and self.nursery.lives(victim):
            self.nursery.signal(victim, signal.SIGSTOP)
            time.sleep(rng.random() * 1.2)
            self.nursery.signal(victim, signal.SIGCONT)
        elif what < 0.9:
            self.nursery.kill(self.server, rng.choice([signal.SIGKILL, signal.SIGTERM]))
            self.kills += 1
            self.serve()
        self.clients = [pid for pid in self.clients if self.nursery.lives(pid)]

    def kill(self, pid: int) -> None:
        if self.nursery.lives(pid):
            self.nursery.kill(pid)
            self.kills += 1

    def cut(self, pid: int) -> None:
        if self.nursery.lives(pid):
            self.nursery.signal(pid, signal.SIGUSR1)
            self.cuts += 1

    def calm(self, client: HostStore) -> None:
        """Links have been cut, nobody has died of it: what was reserved on them comes back all the same."""
        for pid in [*self.clients, self.server, *self.clients, self.server]:
            self.cut(pid)
            time.sleep(0.05)
        wait_until(lambda: client.gauges().get("store_host_lost_sessions") == 0)
        wait_until(lambda: client.gauges().get("store_host_stranded_frames") == 0)

    def end(self) -> None:
        for pid in self.clients:
            self.kill(pid)


@pytest.mark.timeout(SOAK_S + 240)
def test_a_storm_of_kills_and_stops_ends_with_every_block_as_written(nursery, tmp_path):
    """`WORKMEM_SOAK_S` sets how long; `WORKMEM_SOAK_SEED` what happens."""
    storm = Storm(nursery, tmp_path, random.Random(os.environ.get("WORKMEM_SOAK_SEED", "11")))
    storm.serve()
    until = time.monotonic() + SOAK_S
    while time.monotonic() < until or storm.kills < 5 or storm.cuts < 5:
        storm.blow()
    with HostStore(tmp_path / "store.sock") as client:
        storm.calm(client)
        storm.end()
        wait_until(lambda: clients_are_gone(client))
        assert client.flush(30)
        check_all(client)
        assert client.gauges()["store_quarantines_total"] == 0
    # What a stop cut off, a start finds or does without; what it finds is what was written.
    nursery.kill(storm.server)
    storm.serve()
    with HostStore(tmp_path / "store.sock") as client:
        assert check_all(client) > 0
