"""What the machine can do by itself: copy and checksum memory, read a file past the page cache."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from harness import spread

from workmem.core.layout import KVLayout

MEMORY_BYTES = 256 << 20
FILE_BYTES = 512 << 20
ALIGNMENT = 4096


class RawRates:
    """Measured a few times during a run, always while the server is down, in requests of one page."""

    def __init__(self, layout: KVLayout, folder: Path, readers: int) -> None:
        self._layout = layout
        self._request_bytes = -(-layout.page_bytes // ALIGNMENT) * ALIGNMENT
        self._path = folder / "raw-rate"
        self._readers = readers
        self._copied: list[float] = []
        self._read: dict[int, list[float]] = {1: [], readers: []}
        self._refused = ""
        with self._path.open("wb") as file:
            for _ in range(FILE_BYTES >> 20):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())

    @property
    def copy_bytes_per_s(self) -> float:
        """Copy plus xxh3-64, on one core, between memories that no cache holds."""
        return spread(self._copied)["median"]

    @property
    def read_bytes_per_s(self) -> float | None:
        """The faster of one reader and as many as the store has; None where O_DIRECT is refused."""
        rates = [spread(values)["median"] for values in self._read.values() if values]
        return max(rates, default=None)

    def measure(self) -> None:
        """Take every rate once."""
        self._copied.append(self._copy())
        try:
            for readers, values in self._read.items():
                values.append(self._direct(readers))
        except OSError as error:
            self._refused = f"O_DIRECT on {self._path.parent}: {error.strerror}"

    def report(self) -> dict[str, Any]:
        """All rates with their spread, in bytes per second."""
        return {
            "request_bytes": self._request_bytes,
            "copy_and_checksum": spread(self._copied),
            "direct_read_by_readers": {str(n): spread(values) for n, values in self._read.items() if values},
            "refused": self._refused,
        }

    def _copy(self) -> float:
        """The faster of two ways to take the sums: of each slice, as pages carry them, and of the page in one go."""
        page = self._layout.page_bytes
        slices = [slice(*self._layout.slice_span(i)) for i in range(self._layout.slice_count)]
        source = np.ones(MEMORY_BYTES // page * page, dtype=np.uint8).reshape(-1, page)
        target = np.empty_like(source)
        # Memory that is touched for the first time costs more than a copy does.
        target[:] = 0
        return max(_copied(source, target, parts) for parts in (slices, [slice(0, page)]))

    def _direct(self, readers: int) -> float:
        handle = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        try:
            with ThreadPoolExecutor(readers) as pool:
                start = time.perf_counter()
                done = list(pool.map(lambda first: self._read_every(handle, first, readers), range(readers)))
                return sum(done) / (time.perf_counter() - start)
        finally:
            os.close(handle)

    def _read_every(self, handle: int, first: int, step: int) -> int:
        """Read requests first, first + step, ... of the file; return the bytes."""
        size = self._request_bytes
        total = 0
        with mmap.mmap(-1, size) as buffer:
            for offset in range(first * size, FILE_BYTES - size, step * size):
                total += os.preadv(handle, [buffer], offset)
        return total


def _copied(source: np.ndarray, target: np.ndarray, parts: list[slice]) -> float:
    """Bytes per second of copying rows and summing `parts` of each."""
    start = time.perf_counter()
    for i in range(len(source)):
        target[i] = source[i]
        for part in parts:
            xxhash.xxh3_64_intdigest(target[i, part])
    return source.nbytes / (time.perf_counter() - start)
