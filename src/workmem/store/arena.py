"""One stretch of shared memory that holds every page in dram.

The arena is a file description (memfd, or a file on a DAX or tmpfs path), so another process can map
the same pages. It is never pickled and never copied: everything else speaks of offsets into it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import time
from pathlib import Path

from workmem.core.errors import ConfigError

ALIGNMENT_BYTES = 4096
"""Of every frame, and of every place on ssd: what O_DIRECT and the MMU both want."""
_WARM_STEP_BYTES = 2 * 2**20
_MADV_POPULATE_WRITE = 23
_LOCK_WAIT_S = 2.0
_LOCK_PAUSE_S = 0.02


def align(count: int) -> int:
    """`count` bytes rounded up to the alignment."""
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """`capacity_bytes` of memory, zero until touched. Owner of the mapping: `close` gives it back."""

    def __init__(self, capacity_bytes: int, path: str = "") -> None:
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if self.capacity_bytes == 0:
            raise ConfigError(
                f"$.store.dram.bytes: {capacity_bytes} bytes hold no page; give at least {ALIGNMENT_BYTES}"
            )
        self._fd = _open_backing(path)
        try:
            os.ftruncate(self._fd, self.capacity_bytes)
            if not path:
                # Every client has it: cut short by one of them, all would end with SIGBUS at their next read.
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self._fd, self.capacity_bytes)
        except (OSError, ValueError) as error:
            os.close(self._fd)
            raise ConfigError(
                f"$.store.dram.bytes: cannot map {self.capacity_bytes} bytes ({error}); lower it"
            ) from error
        # The address holds as long as the mapping; the ctypes view that reveals it must not outlive this line.
        self.base_address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._warm_bytes = 0
        self.memory = memoryview(self._map)
        """All of it, in place, for who writes a few bytes of a frame by their offset."""
        self._readable = self.memory.toreadonly()

    @property
    def fd(self) -> int:
        """Descriptor of the memory, to be passed to another process; -1 once closed."""
        return self._fd

    def writable(self, offset: int, size: int) -> memoryview:
        """The bytes at `offset`, in place, for whoever is filling that frame."""
        return self.memory[offset : offset + size]

    def readable(self, offset: int, size: int) -> memoryview:
        """The bytes at `offset`, in place, read-only."""
        return self._readable[offset : offset + size]

    def clear(self, offset: int, size: int) -> None:
        """Zero the bytes at `offset`. Takes no memory for it: what frees a frame must not fail."""
        ctypes.memset(self.base_address + offset, 0, size)

    def warm(self, upto: int, step_bytes: int) -> None:
        """Take memory for the first `upto` bytes ahead of use, at most `step_bytes` a call.

        The first touch of a page costs several times a copy into it, and a disk read into untouched
        memory runs at a fraction of the disk's rate; so a background thread touches ahead.
        """
        end = min(upto, self.capacity_bytes, self._warm_bytes + step_bytes)
        try:
            while self._warm_bytes < end:
                size = min(_WARM_STEP_BYTES, end - self._warm_bytes)
                # Takes the memory without writing to it (a frame may be filled meanwhile) and without
                # the interpreter's lock; mapping it afterwards is short.
                os.posix_fallocate(self._fd, self._warm_bytes, size)
                self._map.madvise(_MADV_POPULATE_WRITE, self._warm_bytes, size)
                self._warm_bytes += size
        except (OSError, ValueError):
            # No memory to spare, or a kernel or file that cannot: pages come at first touch, as ever.
            self._warm_bytes = self.capacity_bytes

    def close(self) -> None:
        """Unmap. Views still held by a caller keep the mapping alive until they are dropped."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        self._readable.release()
        self.memory.release()
        try:
            self._map.close()
        except BufferError:
            # A caller still holds a page it no longer leases. Unmapping under it would turn that
            # bug into a crash, so the last view to go takes the mapping along.
            return


def _is_locked(fd: int) -> bool:
    """Whether the file is this store's alone. Two owners would write each other's frames.

    The lock goes along with every mapping, those of clients included. When their server is killed they let go
    by themselves, moments later.
    """
    until = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= until:
                return False
            time.sleep(_LOCK_PAUSE_S)
        else:
            return True


def _open_backing(path: str) -> int:
    if not path:
        return os.memfd_create("workmem-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    target = Path(path).expanduser()
    try:
        fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"$.store.dram.path: cannot open {target}: {error.strerror}") from error
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise ConfigError(f"$.store.dram.path: {target} belongs to another user; name another")
    if not _is_locked(fd):
        os.close(fd)
        raise ConfigError(
            f"$.store.dram.path: {target} is in use by another process: by a store, or by a client of one that has "
            "ended, which holds pages in it or stands still; end that, or name another"
        )
    if stat.S_ISREG(os.fstat(fd).st_mode):
        # A file that was there may be open to all, and prompts are about to lie in it.
        os.fchmod(fd, 0o600)
    return fd
