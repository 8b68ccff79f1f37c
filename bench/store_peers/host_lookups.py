"""Lookup and lease from another process than the one that holds the arena, in microseconds.

    python bench/store_peers/host_lookups.py --seconds 0.5

Prints JSON; to be read beside the echo of `lookups.py`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from host_server import hosted
from lookups import BLOCKS, saved_prefix, timed

from workmem.core.keys import BlockKey
from workmem.store.contract import Lease
from workmem.store.host.client import HostStore


def measure_host(seconds: float) -> dict[str, dict[str, Any]]:
    """From another process: one lease looks up, holds, and learns the addresses; the release is timed apart."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "socket"
        with hosted(place, 256 << 20), HostStore(place) as store:
            root, _, keys = saved_prefix(store, max(BLOCKS))
            for n in BLOCKS:
                prefix = keys[:n]
                held: list[Lease] = []

                def lease(prefix: list[BlockKey] = prefix, held: list[Lease] = held) -> None:
                    held.append(store.lease(root, prefix, owner="bench", ttl_s=30.0))

                def release(held: list[Lease] = held) -> None:
                    assert held[-1].ready == len(held[-1].keys)
                    held.pop().release()

                found[f"host_lookup_{n}"] = timed(lambda prefix=prefix: store.lookup(root, prefix), seconds)
                found[f"host_lease_{n}"] = timed(lease, seconds, after=release)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0)
    print(json.dumps(measure_host(parser.parse_args().seconds)))


if __name__ == "__main__":
    main()
