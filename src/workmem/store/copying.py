"""Pages between the arena and a caller's memory: each byte is copied once and checked on the way.

Where a process asked for it (`use_native_copy`), `page_copy.c` does both in one pass. Else a page is copied in runs and its
checksums are taken while a cache still has them: a whole page that is larger than the cache would come from
memory twice, and a copy of one slice at a time is too short for the processor to fetch ahead.
"""

from __future__ import annotations

import ctypes
import logging
import random
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from workmem.core.errors import IntegrityError, InvariantError
from workmem.core.layout import KVLayout
from workmem.store.contract import Lease
from workmem.store.native_build import Library, build_library, find_compiler

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("page_copy.c")
_FLAGS = ("-O3", "-march=native", "-fPIC", "-std=gnu11")
_NATIVE_SLICE_BYTES_MIN = 256
"""XXH3 takes up to 240 bytes another way, which the C code leaves out."""
RUN_BYTES = 384 * 2**10
"""Most bytes copied before they are checked, a single longer slice apart: a good part of a core's own cache."""

Bytes = bytes | bytearray | memoryview | NDArray[np.uint8]
"""Contiguous memory."""
CopySlices = Callable[[range], tuple[int, ...]]
"""Copies slices of a page by their numbers, which follow each other; returns the checksum of each copy (R3)."""
_Span = tuple[int, int]
_Run = tuple[int, int, list[_Span]]
_FIRST_BYTE = ctypes.c_char.from_buffer
"""The quickest way to the address of memory that may be written to."""
_BOUND_BYTES = 8
_BYTE = np.dtype(np.uint8)


class PageCopy:
    """Copies pages of one layout. Holds no state: any number of threads may use one.

    The interpreter's lock is free during copies, so other threads go on.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._page_bytes = layout.page_bytes
        self._shape = (layout.page_bytes,)
        self._spans = spans = [layout.slice_span(index) for index in range(layout.slice_count)]
        self._runs = _runs(spans)
        self._count = len(spans)
        self._bounds = _bounds(spans)
        self._bounds_at = self._bounds.ctypes.data
        self._sums = ctypes.c_uint64 * len(spans)
        self._unpack = struct.Struct(f"={len(spans)}Q").unpack
        is_long = min(end - start for start, end in spans) >= _NATIVE_SLICE_BYTES_MIN
        native = native_copy() if is_long else None
        self._native = native.page if native else None

    def read(self, lease: Lease, index: int, into: Bytes) -> None:
        """Copy page `index` of `lease` into `page_bytes` bytes of the caller's, and compare the copy (R3).

        Raises LeaseError where the page is not held, InvariantError where it is of another layout, and
        IntegrityError where the copy is not what was stored: the block has left service then, and `into` holds
        nothing of use.
        """
        page, page_at, wanted = lease.source(index)
        target = self._bytes_of(into)
        if page.nbytes != self._page_bytes or len(wanted) != self._count:
            raise InvariantError(
                f"a page of {page.nbytes} bytes in {len(wanted)} slices is read by the layout of one of "
                f"{self._page_bytes} in {self._count}: take the PageCopy of the lease's layout"
            )
        if self._native is None:
            found = _copied(self._runs, np.frombuffer(page, dtype=np.uint8), target)
        else:
            found = self._native_copied(page_at, target.data)
        if found != wanted:
            lease.quarantine(index)
            raise IntegrityError(
                f"page {index} of the lease is not what was stored; the block is out of service: compute it again"
            )

    def writing(self, source: Bytes) -> Callable[[memoryview], tuple[int, ...]]:
        """What copies `source` into a page and returns the checksum of each slice of the copy (R2).

        Raises InvariantError, at once, where `source` is not as long as a page.
        """
        found = self._bytes_of(source)
        if self._native is None:
            return lambda into: _copied(self._runs, found, np.frombuffer(into, dtype=np.uint8))
        return lambda into: self._native_copied(_address(found.data), into)

    def between(self, source: Bytes, target: Bytes) -> CopySlices:
        """What copies slices of the page `source` to their places in `target`: for a page that is used as it comes.

        Both are whole pages, and stay where they are while it is used. Raises InvariantError, at once, where one is
        not as long as a page.
        """
        given, into = self._bytes_of(source), self._bytes_of(target)
        native = self._native
        if native is None:
            return lambda parts: _copied(_runs(self._spans[parts.start : parts.stop]), given, into)
        source_at, target_at = _address(given.data), _address(into.data)

        def copy(parts: range, held: object = (given, into)) -> tuple[int, ...]:
            del held  # only kept: the addresses are good as long as it lives
            sums = (ctypes.c_uint64 * len(parts))()
            native(target_at, source_at, self._bounds_at + _BOUND_BYTES * parts.start, sums, len(parts))
            return tuple(sums)

        return copy

    def _native_copied(self, source_at: int, target: memoryview) -> tuple[int, ...]:
        sums = self._sums()
        assert self._native is not None
        self._native(ctypes.addressof(_FIRST_BYTE(target)), source_at, self._bounds_at, sums, self._count)
        return self._unpack(sums)

    def _bytes_of(self, memory: Bytes) -> NDArray[np.uint8]:
        found = memory if isinstance(memory, np.ndarray) else np.frombuffer(memory, dtype=np.uint8)
        if found.shape != self._shape or found.dtype != _BYTE or not found.flags.c_contiguous:
            raise InvariantError(
                f"a page is {self._page_bytes} contiguous bytes, not {found.dtype}{list(found.shape)}"
            )
        return found


def _copied(runs: Sequence[_Run], source: NDArray[np.uint8], target: NDArray[np.uint8]) -> tuple[int, ...]:
    found: list[int] = []
    for start, end, spans in runs:
        np.copyto(target[start:end], source[start:end])
        for first, last in spans:
            found.append(xxhash.xxh3_64_intdigest(target[first:last].data))
    return tuple(found)


def _address(memory: memoryview) -> int:
    if not memory.readonly:
        return ctypes.addressof(_FIRST_BYTE(memory))
    # Slower; `array.ctypes.data` would be slower still.
    return np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]


class NativeCopy(NamedTuple):
    """The functions of `page_copy.c`, see there."""

    page: Callable[..., None]
    slices: Callable[..., None]


def native_copy() -> NativeCopy | None:
    """Where this process uses it."""
    return _Process.copy


def use_native_copy(cache_dir: Path) -> bool:
    """Let this process copy pages by compiled code, for namespaces that it registers from now on.

    Compiled when it is first used on a machine (under a second) and kept in `cache_dir`. False, with a line in the
    log, where there is no C compiler or what it makes is wrong.
    """
    if _Process.copy is None:
        _Process.copy = _built(cache_dir)
    return _Process.copy is not None


class _Process:
    """What is loaded into a process is there for all of it."""

    copy: NativeCopy | None = None


def _built(cache_dir: Path) -> NativeCopy | None:
    compiler = find_compiler()
    if compiler is None:
        _LOG.info("no C compiler found: pages are copied first and then checked, slower")
        return None
    try:
        wanted = Library("page-copy", _FLAGS, {_SOURCE: ()})
        library = ctypes.CDLL(str(build_library(compiler, wanted, cache_dir)))
        copy, slices = library.workmem_copy_page, library.workmem_copy_slices
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        _LOG.warning(
            "the native copy could not be built (%s): pages are copied first and then checked", error
        )
        return None
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    slices.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    copy.restype = slices.restype = None
    if not _is_right(copy):
        _LOG.warning("the native copy makes other checksums than xxhash here: it is not used")
        return None
    return NativeCopy(copy, slices)


def _is_right(copy: Callable[..., None]) -> bool:
    """Whether it copies and sums slices of awkward lengths as it should: a compiler is not to be trusted blindly."""
    source = np.frombuffer(random.Random(0).randbytes(9000), dtype=np.uint8)  # noqa: S311 - any bytes do
    target = np.zeros(9001, dtype=np.uint8)
    spans = [(0, 4096), (4096, 4096 + 257), (4096 + 257, 4096 + 257 + 1024), (4096 + 257 + 1024, 9000)]
    bounds, sums = _bounds(spans), np.zeros(len(spans), dtype=np.uint64)
    wanted = [xxhash.xxh3_64_intdigest(source[start:end].data) for start, end in spans]
    for shift in (0, 1):
        into = target[shift : shift + len(source)]
        into[:] = 0
        copy(into.ctypes.data, source.ctypes.data, bounds.ctypes.data, sums.ctypes.data, len(spans))
        if sums.tolist() != wanted or not np.array_equal(into, source):
            return False
    return True


def _bounds(spans: Sequence[_Span]) -> NDArray[np.uint64]:
    """Where slices that lie one behind the other begin, and where the last of them ends."""
    return np.array([spans[0][0], *(end for _, end in spans)], dtype=np.uint64)


def _runs(spans: Sequence[_Span]) -> list[_Run]:
    """Slices gathered into runs: start, end, and the slices in between."""
    runs: list[_Run] = []
    for start, end in spans:
        if runs and end - runs[-1][0] <= RUN_BYTES:
            first, _, within = runs[-1]
            runs[-1] = (first, end, [*within, (start, end)])
        else:
            runs.append((start, end, [(start, end)]))
    return runs
