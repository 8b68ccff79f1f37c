"""A device that changes nothing, so that the tier's own code can read a folder that somebody else owns."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from workmem.store.device import Access, BlockDevice, DeviceFile, HostDevice


class ReadOnlyDevice:
    """Opens for reading whatever is asked. Cutting and syncing do nothing; all other changes are EROFS."""

    def __init__(self, inner: BlockDevice | None = None) -> None:
        self._inner = inner or HostDevice()

    def open(self, path: Path, access: Access, *, direct: bool) -> DeviceFile:
        """See `BlockDevice.open`."""
        if access is Access.CREATE:
            raise _refusal(path)
        return _ReadOnlyFile(self._inner.open(path, Access.READ, direct=direct), path)

    def rename(self, source: Path, target: Path) -> None:
        """See `BlockDevice.rename`."""
        del source
        raise _refusal(target)

    def unlink(self, path: Path) -> None:
        """See `BlockDevice.unlink`."""
        raise _refusal(path)

    def sync_folder(self, path: Path) -> None:
        """See `BlockDevice.sync_folder`."""


class _ReadOnlyFile:
    def __init__(self, inner: DeviceFile, path: Path) -> None:
        self._inner = inner
        self._path = path
        self.is_direct = inner.is_direct

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        self._inner.readv(buffers, offset)

    def writev(self, buffers: Sequence[memoryview], offset: int) -> None:
        del buffers, offset
        raise _refusal(self._path)

    def sync(self) -> None:
        pass

    def size(self) -> int:
        return self._inner.size()

    def truncate(self, size: int) -> None:
        """The journal cuts a torn tail off; here it is only not read."""

    def close(self) -> None:
        self._inner.close()


def _refusal(path: Path) -> OSError:
    return OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
