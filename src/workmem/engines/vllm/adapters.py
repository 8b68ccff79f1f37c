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


class Adapters:
    """The adapter that a request's contexts are of: of the files that vLLM has read, and not of those that lie there now."""

    def __init__(self, digests: AdapterDigests) -> None:
        self._digests = digests
        self._read: OrderedDict[int, str] = OrderedDict()
        """By vLLM's number of an adapter, which it reads once."""
        self._cached: dict[tuple[str, str], str] = {}
        """By what vLLM's own block hashes have of it."""

    def of(self, name: str, number: int, folder: str, *, is_read_again: bool) -> str | None:
        """None where it cannot be told: nothing of it is to be loaded or kept. Raises OSError.

        `is_read_again`: vLLM reads the files anew for each request.
        """
        digest = self._digests.of(folder)
        if is_read_again or number not in self._read:
            self._read[number] = digest
            if len(self._read) > _KNOWN_MAX:
                self._read.popitem(last=False)
        if self._read[number] != digest:
            # Which weights it computes with nobody knows: it may have read the new files, or may yet.
            return None
        if self._cached.setdefault((name, folder), digest) != digest:
            # Its own cache takes the blocks of before for those of this one, and so they would be saved.
            return None
        return f"{name}:{digest}"

    def emptied(self) -> None:
        """VLLM has dropped all of its own blocks."""
        self._cached.clear()


def _files(folder: str) -> _Files:
    with os.scandir(folder) as entries:
        # Of what a link leads to, as hubs keep their files.
        stats = sorted((entry.name, entry.stat()) for entry in entries)
    return tuple((name, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in stats)
