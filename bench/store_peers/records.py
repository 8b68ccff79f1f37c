"""A store folder of a million blocks whose pages take no disk, and what opening it costs.

    python bench/store_peers/records.py make FOLDER --count 1000000
    python bench/store_peers/records.py open FOLDER

The journal is written by the store's own journal code; the segment files have their true length and are holes
behind their header. Opening and looking up touches no page. `open` prints JSON: the moment of the first correct
lookup on the system's monotonic clock, and the memory taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHAIN = 512
BATCH = 16384
"""Records appended at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("make", "open"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=1_000_000)
    words = parser.parse_args()
    if words.action == "make":
        print(json.dumps(make(words.folder, words.count)))
    else:
        print(json.dumps(open_and_look(words.folder)))


def layout() -> Any:
    from workmem.core.layout import KVLayout  # noqa: PLC0415 - importing is part of what is timed

    return KVLayout(dtype="bf16", layers=1, kv_heads=1, head_dim=64)


def chain_keys(root: bytes, chain: int) -> list[bytes]:
    """Keys of one context of 512 blocks. Digests, as in life: the index must not gain from an order."""
    import hashlib  # noqa: PLC0415

    seed = root + chain.to_bytes(8, "little")
    return [hashlib.sha256(seed + i.to_bytes(8, "little")).digest() for i in range(CHAIN)]


def open_and_look(folder: Path) -> dict[str, Any]:
    from workmem.core.keys import BlockKey  # noqa: PLC0415
    from workmem.core.layout import Namespace  # noqa: PLC0415
    from workmem.core.outcomes import TierName  # noqa: PLC0415
    from workmem.store.config import DramConfig, SsdConfig, StoreConfig  # noqa: PLC0415
    from workmem.store.store import Store  # noqa: PLC0415

    config = StoreConfig(dram=DramConfig(bytes="64MiB"), ssd=SsdConfig(path=str(folder), bytes="1TiB"))
    store = Store(config)
    root = store.register(Namespace(model_fingerprint="bench", layout=layout()))
    found = store.lookup(root, [BlockKey(key) for key in chain_keys(root, 0)])
    answered = time.clock_gettime(time.CLOCK_MONOTONIC)
    memory = _memory()
    is_correct = list(found.tiers) == [TierName.SSD] * CHAIN
    pages = store.gauges()["store_ssd_pages"]
    store.close()
    return {"answered": answered, "is_correct": is_correct, "pages": pages, **memory}


def _memory() -> dict[str, int]:
    """Bytes: private memory now, and the most the process ever had resident. The arena is shared memory, apart."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return {
        name: int(fields[field].split()[0]) << 10
        for name, field in (
            ("private_bytes", "RssAnon"),
            ("resident_bytes", "VmRSS"),
            ("peak_bytes", "VmHWM"),
        )
    }


def make(folder: Path, count: int) -> dict[str, Any]:
    import msgspec  # noqa: PLC0415

    from workmem.core.layout import Namespace  # noqa: PLC0415
    from workmem.store.arena import align  # noqa: PLC0415
    from workmem.store.device import HostDevice  # noqa: PLC0415
    from workmem.store.tiers.folder import StoreFolder  # noqa: PLC0415
    from workmem.store.tiers.journal import Journal  # noqa: PLC0415
    from workmem.store.tiers.journal_records import Entry, NamespaceEntry, PutEntry  # noqa: PLC0415
    from workmem.store.tiers.page_header import header_bytes  # noqa: PLC0415
    from workmem.store.tiers.segments import (  # noqa: PLC0415
        SEGMENT_BYTES_MAX,
        SEGMENT_HEADER_BYTES,
        segment_header,
        segment_path,
    )

    namespace = Namespace(model_fingerprint="bench", layout=layout())
    root = namespace.root()
    length = header_bytes(namespace.layout) + align(namespace.layout.page_bytes)
    each = (SEGMENT_BYTES_MAX - SEGMENT_HEADER_BYTES) // length
    place = StoreFolder(str(folder))

    def entries() -> Iterator[Entry]:
        for chain in range(-(-count // CHAIN)):
            parent = root
            for depth, key in enumerate(chain_keys(root, chain)[: count - chain * CHAIN]):
                number = chain * CHAIN + depth
                offset = SEGMENT_HEADER_BYTES + number % each * length
                yield PutEntry(0, key, parent, depth, 1 + number // each, offset, length, key[0])
                parent = key

    for segment in range(1, 2 + (count - 1) // each):
        with segment_path(place.segments, segment).open("wb") as file:
            file.write(segment_header(segment, place.store_id))
            file.truncate(SEGMENT_HEADER_BYTES + each * length)
    journal = Journal(HostDevice(), place.journal, place.store_id)
    journal.rewrite([NamespaceEntry(0, root, msgspec.json.encode(namespace))])
    puts = entries()
    while batch := list(itertools.islice(puts, BATCH)):
        journal.append(batch)
    journal.close()
    place.close()
    return {"records": count, "journal_bytes": place.journal.stat().st_size}


if __name__ == "__main__":
    main()
