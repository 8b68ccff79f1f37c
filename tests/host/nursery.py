"""Forks the processes of these tests, so that each starts in milliseconds and has no thread of pytest's.

Reads one JSON object per line, forks a child for it, and answers `{"child": pid, "birth": number}`. A
child reports JSON lines of its own with its number. Children: `serve` (a store and its server), `churn` (saves, leases, reads
and releases at random, dying at a chosen point) and those named after what they do.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from workmem.core.errors import CapacityError, LeaseError
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.contract import PageWrite
from workmem.store.host import messages
from workmem.store.host.client import HostStore
from workmem.store.host.link import Link
from workmem.store.host.server import HostServer
from workmem.store.host.session import HostLimits
from workmem.store.host.wire import Kind
from workmem.store.store import Store
from workmem.testing.pages import SLICED, SMALL, Chain, namespace, page_bytes, settle

CHAINS = [Chain(namespace("small"), 8, seed=seed) for seed in range(10)]
CHAINS += [Chain(namespace("sliced", SLICED), 2, seed=seed) for seed in range(4)]


class Self:
    birth = 0
    """Number of this process among all that were born: a pid comes again when 32,768 have been used."""


def say(**fields) -> None:
    os.write(1, (json.dumps({"birth": Self.birth} | fields) + "\n").encode())


def serve(*, socket, folder, dram="2MiB", ssd="16MiB", lease_s=30.0, reservation_s=30.0, connections=64):
    tier = SsdConfig(enabled=bool(ssd), path=folder, bytes=ssd)
    store = Store(StoreConfig(dram=DramConfig(bytes=dram), ssd=tier))
    server = HostServer(store, Path(socket), HostLimits(lease_s, reservation_s, connections))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGUSR1, lambda *_: cut(list(server._sessions)))
    say(ready=True)
    while not stop.wait(0.1):
        # A signal may reach another thread; its handler runs when this one wakes up next.
        pass
    server.close()
    store.close()


def cut(sessions):
    """End a connection from the server's side, at random; the one who saves first, where there is something to lose."""
    writing = [session for session in sessions if session.reservations.count]
    if sessions:
        random.choice(writing or sessions).hang_up()


class Fate:
    """Kills this process the `countdown`th time it comes by `point`."""

    def __init__(self, point: str, countdown: int) -> None:
        self.point = point
        self.countdown = countdown

    def at(self, point: str) -> None:
        if point == self.point:
            self.countdown -= 1
            if self.countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def follow(self) -> None:
        exchange, tell, greet = Link._exchange, Link.tell, Link._greet

        def watched_greet(link, **settings):
            welcome = greet(link, **settings)
            self.at("after HELLO")
            return welcome

        def watched_exchange(link, kind, body):
            self.at(f"before {kind.name}")
            reply = exchange(link, kind, body)
            self.at(f"after {kind.name}")
            return reply

        def watched_tell(link, kind, body):
            self.at(f"before {kind.name}")
            tell(link, kind, body)
            self.at(f"after {kind.name}")

        Link._exchange, Link.tell, Link._greet = watched_exchange, watched_tell, watched_greet


def churn(*, socket, seed, point="", countdown=1, seconds=60.0):
    """Until `seconds` are over or `point` is reached. Reports what was wrong, or how much was read."""
    fate = Fate(point, countdown)
    fate.follow()
    rng = random.Random(seed)
    # The server may be down at this moment; that is no reason not to start.
    with HostStore(Path(socket), attaches=False) as store:
        signal.signal(signal.SIGUSR1, lambda *_: lose_a_link(store))
        for chain in CHAINS:
            store.register(chain.space)
        until = time.monotonic() + seconds
        read = 0
        while time.monotonic() < until:
            chain = rng.choice(CHAINS)
            if not store.is_attached:
                time.sleep(0.01)
            if rng.random() < 0.5:
                store.save(chain.root, [dying(page, chain, fate) for page in chain.writes()])
                if rng.random() < 0.5:
                    store.flush(0.2)
            else:
                read += look(store, chain, fate)
        say(read=read)


def lose_a_link(store: HostStore) -> None:
    """As when a socket fails. By a signal handler: nothing is waited for, and either end of either link may be in use."""
    link = random.choice([store._keeper.link, store._saver._link])
    if link is not None:
        link._channel.shut()


def dying(page: PageWrite, chain: Chain, fate: Fate) -> PageWrite:
    """Fills its frame in two halves, with the chance to die in between."""
    key, layout = page.block.key, chain.space.layout

    def copy_into(view):
        whole, half = page_bytes(key, layout), layout.page_bytes // 2
        view[:half] = whole[:half]
        fate.at("fill")
        view[half:] = whole[half:]

    return PageWrite(page.block, copy_into, page.done)


def look(store: HostStore, chain: Chain, fate: Fate) -> int:
    try:
        lease = store.lease(chain.root, chain.keys, owner="churn", ttl_s=60)
    except CapacityError:
        return 0
    settle(lease, 10)
    ready = lease.ready
    for index in range(ready):
        try:
            copy = bytes(lease.page(index))
            lease.page(index)
        except LeaseError:
            ready = index
            break
        fate.at("read")
        if copy != page_bytes(chain.keys[index], lease.layout):
            raise AssertionError(f"page {index} of a chain is not what was written")
    lease.release()
    return ready


def stop_here() -> None:
    """Stop the process in this thread; sent to the process, it may reach another thread first."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def save_stopping(*, socket, seed=0):
    """Saves one block, stopped in the middle of filling its frame; lives on when it is done."""
    chain = Chain(namespace("small"), 1, seed=seed)
    states = []
    with HostStore(Path(socket)) as store:
        store.register(chain.space)
        [page] = chain.writes(states.append)

        def copy_into(view):
            view[: len(view) // 2] = b"\xff" * (len(view) // 2)
            say(stopping=True)
            stop_here()
            view[:] = b"\xff" * len(view)

        store.save(chain.root, [PageWrite(page.block, copy_into, page.done)])
        store.flush(10)
        say(states=states)
        time.sleep(3600)


def reserve_and_lose(*, socket):
    """Reserves a frame, loses the connection, and lives on."""
    chain = Chain(namespace("small"), 1)
    link = Link(Path(socket), [chain.space], call_s=5.0, writes=True)
    link.ask(Kind.RESERVE, messages.pack_reserve(chain.root, [chain.block(0)]))
    link.close()
    say(session=link.welcome.session)
    time.sleep(3600)


def read_stopping(*, socket, seed=0, length=4):
    """Leases, is stopped with a page in hand, and tells what a reader can find out afterwards."""
    chain = Chain(namespace("small"), length, seed=seed)
    with HostStore(Path(socket)) as store:
        store.register(chain.space)
        lease = store.lease(chain.root, chain.keys, owner="sleeper", ttl_s=3600)
        settle(lease)
        view, sums = lease.page(0), lease.checksums(0)
        say(ready=lease.ready)
        stop_here()
        stale = bytes(view)
        found = {"same": stale == page_bytes(chain.keys[0], SMALL)}
        found["sums_hold"] = sums == (xxhash_of(stale),)
        for name, call in (("page", lease.page), ("checksums", lease.checksums)):
            try:
                call(0)
                found[name] = "readable"
            except LeaseError:
                found[name] = "out of reach"
        lease.release()
        say(**found)


def xxhash_of(copy: bytes) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(copy)


def hold(*, socket, seed=0, length=4, forks=False):
    """Saves and leases a chain, says so, and holds it until killed; with a child that outlives it a while."""
    chain = Chain(namespace("small"), length, seed=seed)
    store = HostStore(Path(socket))
    chain.save(store)
    lease = store.lease(chain.root, chain.keys, owner="holder", ttl_s=3600)
    settle(lease)
    if forks and os.fork() == 0:
        os.close(1)
        time.sleep(8)
        os._exit(0)
    say(ready=lease.ready)
    time.sleep(3600)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # For those who have no link to cut, yet or ever.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        birth = request.pop("birth")
        pid = os.fork()
        if pid:
            say(child=pid, birth=birth)
            continue
        Self.birth = birth
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = 0
        try:
            globals()[request.pop("do")](**request)
            say(done=True)
        except BaseException:  # noqa: BLE001  # reported, and then this process ends
            say(error=traceback.format_exc())
            code = 1
        os._exit(code)


if __name__ == "__main__":
    main()
