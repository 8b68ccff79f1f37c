"""Taking namespaces out of a store that is stopped, with the store's own purge."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from workmem.core.errors import ConfigError, TransferError
from workmem.store.codecs.settings import page_keyring
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.store import Store
from workmem.store.tiers.segments import SEGMENT_BYTES_MAX
from workmem.store.tools.folder_view import read_folder

_ARENA_BYTES = 2**20
"""No page passes through it."""


@contextmanager
def opened_to_purge(path: Path, keys: SsdConfig | None = None) -> Generator[Store]:
    """The store in the folder `path`, this process's alone until the end; nothing is evicted or scrubbed meanwhile.

    `keys` names the key files of one that is sealed.
    Raises ConfigError where `path` is no store or a process has it open, TransferError where the disk fails.
    """
    keys = keys or SsdConfig()
    view = read_folder(path, keyring=page_keyring(keys))
    if view.holder:
        raise ConfigError(
            f"{path} is in use by process {view.holder}. Stop it; or leave the folder out where that is the host's "
            "store, or ask its server with POST /debug/store/purge"
        )
    # Room for everything once more: what lies beside purged pages is written again.
    room = 2 * sum(segment.size for segment in view.segments.values()) + 16 * SEGMENT_BYTES_MAX
    ssd = SsdConfig(path=os.fspath(path), bytes=room, keep_free=0, scrub_bytes_per_s=0)
    if view.keyring is not None:
        ssd = msgspec.structs.replace(ssd, key_file=keys.key_file, older_key_files=keys.older_key_files)
    with Store(StoreConfig(dram=DramConfig(bytes=_ARENA_BYTES), ssd=ssd)) as store:
        if store.ssd_problem:
            raise TransferError(f"{path}: {store.ssd_problem}")
        yield store
