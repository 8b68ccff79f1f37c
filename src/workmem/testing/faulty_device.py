"""A disk that misbehaves on order: fails the Nth call, tears a write, flips a bit, is full or slow."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from workmem.store.device import Access, BlockDevice, DeviceFile, HostDevice


class FaultPlan:
    """What goes wrong and when. Counters cover all files of the device; change fields at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0
        self.fail_at: int | None = None
        """Number of the call (from 1) that raises EIO; later ones work again."""
        self.writes_fail = 0
        """An errno that every write and sync raises; 0 for none."""
        self.reads_fail = 0
        """An errno that every read raises; 0 for none."""
        self.tear_next_write = False
        """The next write stores its first half and raises EIO."""
        self.delay_s = 0.0
        """Added to every call, in seconds."""
        self.log: list[tuple[str, str]] = []
        """("write" or "sync", file name) of what reached the device, in order."""
        self.before_read: Callable[[Path, int], None] | None = None
        """Called with file and offset before each read."""

    def step(self, *, failing: int) -> None:
        """Count one call and raise what is planned for it."""
        if self.delay_s:
            time.sleep(self.delay_s)
        with self._lock:
            self.calls += 1
            hit = self.calls == self.fail_at
        if hit or failing:
            code = failing or errno.EIO
            raise OSError(code, os.strerror(code))


class FaultyFile:
    """A file of a `FaultyDevice`."""

    def __init__(self, inner: DeviceFile, path: Path, plan: FaultPlan) -> None:
        self._inner = inner
        self._path = path
        self._plan = plan
        self.is_direct = inner.is_direct

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """See `DeviceFile.readv`."""
        if self._plan.before_read is not None:
            self._plan.before_read(self._path, offset)
        self._plan.step(failing=self._plan.reads_fail)
        self._inner.readv(buffers, offset)

    def writev(self, buffers: Sequence[memoryview], offset: int) -> None:
        """See `DeviceFile.writev`."""
        if self._plan.tear_next_write:
            self._plan.tear_next_write = False
            total = sum(len(buffer) for buffer in buffers) // 2
            # Direct writes go in whole sectors, and so do torn ones.
            half = total // 4096 * 4096 if self.is_direct else total
            if half:
                joined = [memoryview(buffer) for buffer in buffers]
                self._inner.writev(_first(joined, half), offset)
            raise OSError(errno.EIO, "torn write")
        self._plan.step(failing=self._plan.writes_fail)
        self._inner.writev(buffers, offset)
        self._plan.log.append(("write", self._path.name))

    def sync(self) -> None:
        """See `DeviceFile.sync`."""
        self._plan.step(failing=self._plan.writes_fail)
        self._inner.sync()
        self._plan.log.append(("sync", self._path.name))

    def size(self) -> int:
        """See `DeviceFile.size`."""
        return self._inner.size()

    def truncate(self, size: int) -> None:
        """See `DeviceFile.truncate`."""
        self._plan.step(failing=self._plan.writes_fail)
        self._inner.truncate(size)

    def close(self) -> None:
        """See `DeviceFile.close`."""
        self._inner.close()


class FaultyDevice:
    """Wraps a device (the host's by default) and obeys a `FaultPlan`."""

    def __init__(self, plan: FaultPlan, inner: BlockDevice | None = None) -> None:
        self.plan = plan
        self._inner = inner or HostDevice()

    def open(self, path: Path, access: Access, *, direct: bool) -> DeviceFile:
        """See `BlockDevice.open`."""
        self.plan.step(failing=self.plan.writes_fail if access is Access.CREATE else 0)
        return FaultyFile(self._inner.open(path, access, direct=direct), path, self.plan)

    def rename(self, source: Path, target: Path) -> None:
        """See `BlockDevice.rename`."""
        self.plan.step(failing=self.plan.writes_fail)
        self._inner.rename(source, target)

    def unlink(self, path: Path) -> None:
        """See `BlockDevice.unlink`."""
        self.plan.step(failing=0)
        self._inner.unlink(path)

    def sync_folder(self, path: Path) -> None:
        """See `BlockDevice.sync_folder`."""
        self.plan.step(failing=self.plan.writes_fail)
        self._inner.sync_folder(path)


def _first(buffers: list[memoryview], count: int) -> list[memoryview]:
    head: list[memoryview] = []
    for buffer in buffers:
        if count <= 0:
            break
        head.append(buffer[:count])
        count -= len(buffer)
    return head
