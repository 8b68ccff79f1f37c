"""Latency of lookup+lease from another process, beside a bare echo over the same kind of socket.

Both servers run in one other process and both pairs take turns call by call, so that whatever else the
machine does hits both. The echo answers with as many bytes as the lease's reply has, to a request as long
as the lease's. Prints one JSON object; `--out` writes it as well.

    python bench/host_latency.py --blocks 32 512
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import struct
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from harness import environment

from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.host import messages
from workmem.store.host.client import HostStore
from workmem.store.host.server import HostServer
from workmem.store.host.session import HostLimits
from workmem.store.host.wire import PREFIX
from workmem.store.store import Store
from workmem.testing.pages import Chain, namespace

SIZES = struct.Struct("<II")
"""Bytes of the rest of the request, and of the reply."""
OWNER = "bench"
TTL_S = 60.0


def receive(connection: socket.socket, buffer: memoryview, count: int) -> None:
    have = 0
    while have < count:
        got = connection.recv_into(buffer[have:count])
        if not got:
            raise EOFError
        have += got


def echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    buffer = memoryview(bytearray(1 << 20))
    reply = bytes(1 << 20)
    try:
        while True:
            got = connection.recv_into(buffer)
            if not got:
                return
            asked, answered = SIZES.unpack_from(buffer)
            while got < asked:
                got += connection.recv_into(buffer[got:])
            connection.sendall(memoryview(reply)[:answered])
    finally:
        connection.close()


def serve(folder: str, ready: Connection) -> None:
    store = Store(StoreConfig(dram=DramConfig(bytes="64MiB"), ssd=SsdConfig(enabled=False)))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/echo.sock")
    listener.listen()
    threading.Thread(target=echo, args=(listener,), daemon=True).start()
    with store, HostServer(store, Path(folder) / "store.sock", HostLimits()):
        ready.send(None)
        ready.recv()


def measure(
    store: HostStore, bare: socket.socket, chain: Chain, blocks: int, rounds: int
) -> dict[str, object]:
    keys = chain.keys[:blocks]
    asked = PREFIX.size + len(messages.pack_lease(chain.root, TTL_S, OWNER, keys))
    lease = store.lease(chain.root, keys, owner=OWNER, ttl_s=TTL_S)
    assert lease.ready == blocks
    lease.release()
    answered = PREFIX.size + 25 + 16 * blocks
    request = SIZES.pack(asked, answered) + bytes(asked - SIZES.size)
    buffer = memoryview(bytearray(answered))
    echoes: list[float] = []
    leases: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        bare.sendall(request)
        receive(bare, buffer, answered)
        echoed = time.perf_counter()
        lease = store.lease(chain.root, keys, owner=OWNER, ttl_s=TTL_S)
        leases.append(time.perf_counter() - echoed)
        echoes.append(echoed - began)
        lease.release()
        # A release has no reply. The server is done with it once it answers this; else the echo would wait for it.
        store.lookup(chain.root, keys[:1])
    return {
        "blocks": blocks,
        "rounds": rounds,
        "echo_us": spread(echoes),
        "lease_us": spread(leases),
        "ratio_p50": round(statistics.median(leases) / statistics.median(echoes), 2),
    }


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: round(ordered[int(share * (len(ordered) - 1))] * 1e6, 1) for name, share in at.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    machine = environment()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe()
        server = context.Process(target=serve, args=(folder, theirs))
        server.start()
        ours.recv()
        bare = socket.socket(socket.AF_UNIX)
        bare.connect(f"{folder}/echo.sock")
        chain = Chain(namespace(), max(arguments.blocks))
        with HostStore(Path(folder) / "store.sock") as store, bare:
            chain.save(store)
            measure(store, bare, chain, min(arguments.blocks), 500)
            found = [measure(store, bare, chain, blocks, arguments.rounds) for blocks in arguments.blocks]
        ours.send(None)
        server.join()
    result = {
        "bench": "host_latency",
        "machine": machine,
        "rows": found,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
