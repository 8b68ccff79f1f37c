"""One stretch of shared memory that holds every page in dram.

The arena is a file description (memfd, or a file on a DAX or tmpfs path), so another process can map
the same pages. It is never pickled and never copied: everything else speaks of offsets into it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path

from workmem.core.errors import ConfigError

PAGE = 4096
"""Alignment of every frame: what O_DIRECT and the MMU both want, in bytes."""


def align(count: int) -> int:
    """`count` bytes rounded up to whole memory pages."""
    return -(-count // PAGE) * PAGE


class Arena:
    """`capacity_bytes` of memory, zero until touched. Owner of the mapping: `close` gives it back."""

    def __init__(self, capacity_bytes: int, path: str = "") -> None:
        self.capacity_bytes = capacity_bytes // PAGE * PAGE
        if self.capacity_bytes == 0:
            raise ConfigError(
                f"$.store.dram.bytes: {capacity_bytes} bytes hold no page; give at least {PAGE}"
            )
        self._fd = _open_backing(path)
        try:
            os.ftruncate(self._fd, self.capacity_bytes)
            self._map = mmap.mmap(self._fd, self.capacity_bytes)
        except (OSError, ValueError) as error:
            os.close(self._fd)
            raise ConfigError(
                f"$.store.dram.bytes: cannot map {self.capacity_bytes} bytes ({error}); lower it"
            ) from error
        # The address holds as long as the mapping; the ctypes view that reveals it must not outlive this line.
        self.base_address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._writable = memoryview(self._map)
        self._readable = self._writable.toreadonly()

    def writable(self, offset: int, size: int) -> memoryview:
        """The bytes at `offset`, in place, for whoever is filling that frame."""
        return self._writable[offset : offset + size]

    def readable(self, offset: int, size: int) -> memoryview:
        """The bytes at `offset`, in place, read-only."""
        return self._readable[offset : offset + size]

    def close(self) -> None:
        """Unmap. Views still held by a caller keep the mapping alive until they are dropped."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        self._readable.release()
        self._writable.release()
        try:
            self._map.close()
        except BufferError:
            # A caller still holds a page it no longer leases. Unmapping under it would turn that
            # bug into a crash, so the last view to go takes the mapping along.
            return


def _open_backing(path: str) -> int:
    if not path:
        return os.memfd_create("workmem-arena", os.MFD_CLOEXEC)
    target = Path(path).expanduser()
    try:
        fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"$.store.dram.path: cannot open {target}: {error.strerror}") from error
    try:
        # Two owners of one file would write each other's frames.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"$.store.dram.path: {target} is in use by another process; name another"
        ) from error
    return fd
