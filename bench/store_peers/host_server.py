"""A host's store in a process of its own, for the benchmarks that attach to it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.host.server import HostServer
from workmem.store.host.session import HostLimits
from workmem.store.store import Store


@contextlib.contextmanager
def hosted(place: Path, dram_bytes: int) -> Iterator[int]:
    """Serve a store of that much memory at `place`; the process id of the server."""
    command = [sys.executable, __file__, str(place), str(dram_bytes)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        if server.stdout.readline() != b"ready\n":
            raise RuntimeError("the server of the host's store ended")
        yield server.pid
    finally:
        # It serves until its stdin ends.
        server.stdin.close()
        server.stdout.close()
        server.wait(20)


def main() -> None:
    place, dram_bytes = Path(sys.argv[1]), int(sys.argv[2])
    place.parent.chmod(0o700)
    config = StoreConfig(dram=DramConfig(bytes=dram_bytes), ssd=SsdConfig(enabled=False))
    with Store(config) as store, HostServer(store, place, HostLimits()):
        os.write(1, b"ready\n")
        sys.stdin.read()


if __name__ == "__main__":
    main()
