"""Pages between the arena and a caller's memory: each byte is copied once, and checked while a cache still has it.

A copy of a whole page followed by its checksums reads a page larger than the cache from memory twice; a copy
of one slice at a time is too short for the processor to fetch ahead. So pages move in runs of slices between the two.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash
from numpy.typing import NDArray

from workmem.core.errors import IntegrityError, InvariantError
from workmem.core.layout import KVLayout
from workmem.store.contract import Lease

RUN_BYTES = 384 * 2**10
"""Most bytes copied before they are checked, a single longer slice apart: a good part of a core's own cache."""

Bytes = bytes | bytearray | memoryview | NDArray[np.uint8]
"""Contiguous memory."""


class PageCopy:
    """Copies pages of one layout. Holds no state: any number of threads may use one.

    The interpreter's lock is free during copies, so other threads go on.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._page_bytes = layout.page_bytes
        self._runs = _runs([layout.slice_span(index) for index in range(layout.slice_count)])

    def read(self, lease: Lease, index: int, into: Bytes) -> None:
        """Copy page `index` of `lease` into `page_bytes` bytes of the caller's, and compare the copy (R3).

        Raises LeaseError where the page is not held, and IntegrityError where the copy is not what was stored:
        the block has left service then, and `into` holds nothing of use.
        """
        wanted = lease.checksums(index)
        if self._copied(self._bytes_of(lease.page(index)), self._bytes_of(into)) != wanted:
            lease.quarantine(index)
            raise IntegrityError(
                f"page {index} of the lease is not what was stored; the block is out of service: compute it again"
            )

    def writing(self, source: Bytes) -> Callable[[memoryview], tuple[int, ...]]:
        """What copies `source` into a page and returns the checksum of each slice of the copy (R2).

        Raises InvariantError, at once, where `source` is not as long as a page.
        """
        found = self._bytes_of(source)
        return lambda into: self._copied(found, self._bytes_of(into))

    def _copied(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> tuple[int, ...]:
        sums: list[int] = []
        for start, end, spans in self._runs:
            np.copyto(target[start:end], source[start:end])
            for first, last in spans:
                sums.append(xxhash.xxh3_64_intdigest(target[first:last]))
        return tuple(sums)

    def _bytes_of(self, memory: Bytes) -> NDArray[np.uint8]:
        found = memory if isinstance(memory, np.ndarray) else np.frombuffer(memory, dtype=np.uint8)
        if found.shape != (self._page_bytes,) or found.dtype != np.uint8:
            raise InvariantError(
                f"a page is {self._page_bytes} bytes in one row, not {found.dtype}{list(found.shape)}"
            )
        return found


def _runs(spans: list[tuple[int, int]]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Slices gathered into runs: start, end, and the slices in between."""
    runs: list[tuple[int, int, list[tuple[int, int]]]] = []
    for start, end in spans:
        if runs and end - runs[-1][0] <= RUN_BYTES:
            first, _, within = runs[-1]
            runs[-1] = (first, end, [*within, (start, end)])
        else:
            runs.append((start, end, [(start, end)]))
    return runs
