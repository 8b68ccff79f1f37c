"""How much of a filesystem the ssd tier may fill: others live there too.

The tier's own bytes count as free: it may keep what it has for as long as enough stays free beside it, and
gives up some of it when others fill the disk.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from workmem.core.errors import ConfigError
from workmem.core.units import parse_bytes

_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


class KeepFree(msgspec.Struct, frozen=True):
    """What must stay free: a share of the filesystem, or a count of bytes."""

    share: float = 0.0
    """From 0 to 1."""
    bytes: int = 0

    def of(self, total_bytes: int) -> int:
        """Bytes to keep free on a filesystem of `total_bytes`."""
        return max(self.bytes, int(self.share * total_bytes))


class FreeSpace(msgspec.Struct, frozen=True):
    """Reading of a filesystem, in bytes."""

    total_bytes: int
    free_bytes: int
    """What an ordinary user may still take."""


def parse_keep_free(value: str | int, path: str = "$") -> KeepFree:
    """`"5%"`, `"20GiB"` or a count of bytes. Raises ConfigError, starting with `path`, on anything else."""
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return KeepFree(bytes=parse_bytes(value, path))
    percent = float(match[1])
    if percent > 100:
        raise ConfigError(f"{path}: {value!r} is more than all of it; write a share of up to 100%")
    return KeepFree(share=percent / 100)


def read_free_space(folder: Path) -> FreeSpace:
    """What the filesystem under `folder` has. Raises OSError."""
    found = os.statvfs(folder)
    return FreeSpace(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def usable_bytes(configured_bytes: int, used_bytes: int, space: FreeSpace, keep_free: KeepFree) -> int:
    """Bytes that the tier may have in files, those it has included.

    `used_bytes` is what its files take now. The result is `configured_bytes` where the disk allows it, less
    than `used_bytes` where the tier has to give some up, and never negative.
    """
    room = space.free_bytes - keep_free.of(space.total_bytes)
    return max(0, min(configured_bytes, used_bytes + room))
