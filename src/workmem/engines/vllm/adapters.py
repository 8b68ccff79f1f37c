"""What tells LoRA adapters apart: a digest of their files, as a name or a path may come to mean another one."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from workmem.engines.fingerprint import identify_adapter

_KNOWN_MAX = 1024

_Files = tuple[tuple[str, int, int, int, int], ...]


class AdapterDigests:
    """Digests by folder. One is taken anew when a file of it is another one, or was written to."""

    def __init__(self, cache_folder: Path | None = None) -> None:
        self._cache_folder = cache_folder
        self._known: OrderedDict[str, tuple[_Files, str]] = OrderedDict()

    def of(self, folder: str) -> str:
        """The digest of the adapter in `folder`. Raises OSError where it cannot be read."""
        files = _files(folder)
        known = self._known.get(folder)
        if known is not None and known[0] == files:
            return known[1]
        digest = identify_adapter(Path(folder), cache_folder=self._cache_folder)
        self._known[folder] = (files, digest)
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        return digest


def _files(folder: str) -> _Files:
    with os.scandir(folder) as entries:
        # Of what a link leads to, as hubs keep their files.
        stats = sorted((entry.name, entry.stat()) for entry in entries)
    return tuple((name, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in stats)
