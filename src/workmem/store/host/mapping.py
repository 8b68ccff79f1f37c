"""The arena of a server as a client sees it: mapped once, gone with the last who reads in it."""

from __future__ import annotations

import mmap

import numpy as np

from workmem.store.host.channel import Disconnected


class ArenaMapping:
    """`size` bytes of a server's arena. There is no close: unmapping under a reader would be a crash."""

    def __init__(self, fd: int, size: int, *, writes: bool) -> None:
        """The descriptor stays the caller's. Raises Disconnected when it cannot be mapped."""
        try:
            # Who only reads cannot write by mistake either.
            access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
            self._view = memoryview(mmap.mmap(fd, size, access=access))
        except (OSError, ValueError) as error:
            raise Disconnected(f"cannot map {size} bytes of the arena: {error}") from error
        self.base_address: int = np.frombuffer(self._view, dtype=np.uint8).ctypes.data

    def at(self, offset: int, size: int) -> memoryview:
        """The bytes at `offset`, in place."""
        return self._view[offset : offset + size]
