"""Files as the ssd tier sees them: the seam where tests put a bad disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

IOV_MAX = 1024
"""Most buffers of one vectored call (the kernel's limit)."""


class Access(Enum):
    """How a file is opened."""

    READ = "read"
    CREATE = "create"
    UPDATE = "update"


class DeviceFile(Protocol):
    """One open file. Every method raises OSError; reads and writes are whole or an error."""

    is_direct: bool

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill `buffers` from `offset` on. The end of the file is EIO: what was there is gone."""
        ...

    def writev(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write `buffers` at `offset`."""
        ...

    def sync(self) -> None:
        """Return once the data is durable."""
        ...

    def size(self) -> int:
        """Length in bytes."""
        ...

    def truncate(self, size: int) -> None:
        """Cut to `size` bytes."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class BlockDevice(Protocol):
    """Where segment and journal files live."""

    def open(self, path: Path, access: Access, *, direct: bool) -> DeviceFile:
        """Open a file. `direct` asks for O_DIRECT; `is_direct` of the result tells if it was granted."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` by `source`, durably."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file. Durable only after `sync_folder`; until then it may be there again."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Make names created or removed in a folder durable."""
        ...


class HostFile:
    """A file of the host's filesystem."""

    def __init__(self, fd: int, *, is_direct: bool) -> None:
        self._fd = fd
        self.is_direct = is_direct

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """See `DeviceFile.readv`."""
        left = list(buffers)
        while left:
            count = os.preadv(self._fd, left[:IOV_MAX], offset)
            if count == 0:
                raise OSError(errno.EIO, "read past the end of the file")
            offset += count
            left = _rest(left, count)

    def writev(self, buffers: Sequence[memoryview], offset: int) -> None:
        """See `DeviceFile.writev`."""
        left = list(buffers)
        while left:
            count = os.pwritev(self._fd, left[:IOV_MAX], offset)
            offset += count
            left = _rest(left, count)

    def sync(self) -> None:
        """See `DeviceFile.sync`."""
        os.fdatasync(self._fd)

    def size(self) -> int:
        """See `DeviceFile.size`."""
        return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        """See `DeviceFile.truncate`."""
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        """See `DeviceFile.close`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class HostDevice:
    """The host's filesystem."""

    def open(self, path: Path, access: Access, *, direct: bool) -> DeviceFile:
        """See `BlockDevice.open`."""
        flags = os.O_CLOEXEC | (os.O_RDONLY if access is Access.READ else os.O_RDWR)
        if access is Access.CREATE:
            flags |= os.O_CREAT | os.O_EXCL
        if direct:
            try:
                return HostFile(os.open(path, flags | os.O_DIRECT, 0o600), is_direct=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # A filesystem that refuses O_DIRECT may have created the file before it said so.
                flags &= ~os.O_EXCL
        return HostFile(os.open(path, flags, 0o600), is_direct=False)

    def rename(self, source: Path, target: Path) -> None:
        """See `BlockDevice.rename`."""
        source.replace(target)
        sync_folder(target.parent)

    def unlink(self, path: Path) -> None:
        """See `BlockDevice.unlink`."""
        path.unlink(missing_ok=True)

    def sync_folder(self, path: Path) -> None:
        """See `BlockDevice.sync_folder`."""
        sync_folder(path)


def sync_folder(path: Path) -> None:
    """Make names created, replaced or removed in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:] if count else buffer, *buffers[index + 1 :]]
        count -= len(buffer)
    return []
