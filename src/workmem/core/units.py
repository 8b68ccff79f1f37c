"""Sizes as people write them: `512MiB`, `2GiB`, `1.5 GB` or a plain count of bytes."""

from __future__ import annotations

import re

from workmem.core.errors import ConfigError

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: str | int, path: str = "$") -> int:
    """Bytes named by `value`. Raises ConfigError, starting with `path`, on anything unclear."""
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{path}: a size cannot be negative, got {value}")
        return value
    match = _SIZE.fullmatch(value)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{path}: {value!r} is no size; write a number with KiB, MiB, GiB or TiB, as in '512MiB'"
        )
    return int(float(match[1]) * factor)


def format_bytes(count: int) -> str:
    """`count` bytes for people: the largest binary unit that keeps a whole digit, one decimal."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
