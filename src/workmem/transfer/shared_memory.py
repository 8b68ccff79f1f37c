"""Within a host: memory that both processes map, and a copy."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from workmem.core.errors import TransferError
from workmem.transfer.contract import Access, Described, Memory, Moved, Outcome, Part

_STEP_BYTES = 2**20
"""Copied between two questions whether to stop: what a frozen writer may be in the middle of."""


def allocate(size: int) -> Memory:
    """Fresh memory that others can map. Closed with the last who refers to its view, but for the descriptor."""
    fd = os.memfd_create("workmem-transfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # Cut short by one process, all others would end with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return Memory(memoryview(mmap.mmap(fd, size)), fd)
    except BaseException:
        os.close(fd)
        raise


class SharedMemoryMover:
    """Copies. Which process has ended is known exactly, so that nothing has to be waited for."""

    name = "shared memory"
    settle_s = 0.0
    drain_s = 0.0

    def register(self, memory: Memory) -> Described:
        """See `Mover.register`."""
        return Described("", 0, len(memory.view))

    def unregister(self, memory: Memory) -> None:
        """See `Mover.unregister`. The descriptor stays its owner's."""

    def reach(self, region: Described, fd: int, access: Access) -> memoryview:
        """See `Mover.reach`."""
        if fd < 0:
            raise TransferError(
                "the memory of the window is of no file: its owner has to register it with a descriptor"
            )
        try:
            # Who only reads cannot write by mistake either.
            mode = mmap.ACCESS_WRITE if access is Access.WRITE else mmap.ACCESS_READ
            return memoryview(mmap.mmap(fd, region.size, access=mode))
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot map {region.size} bytes of another process: {error}") from error
        finally:
            os.close(fd)

    def move(
        self,
        access: Access,
        target: object,
        start: int,
        memory: Memory,
        parts: Sequence[Part],
        stop: Callable[[], bool],
    ) -> Moved:
        """See `Mover.move`."""
        assert isinstance(target, memoryview)
        theirs, mine = np.frombuffer(target, np.uint8), np.frombuffer(memory.view, np.uint8)
        for part in parts:
            for done in range(0, part.size, _STEP_BYTES):
                if stop():
                    return Moved(Outcome.REFUSED)
                size = min(_STEP_BYTES, part.size - done)
                there = theirs[start + part.there + done :][:size]
                here = mine[part.here + done :][:size]
                source, into = (here, there) if access is Access.WRITE else (there, here)
                # Lets other threads run.
                np.copyto(into, source)
        return Moved(Outcome.DONE)

    def close(self) -> None:
        """See `Mover.close`. Mappings go with the last who refers to them."""
