"""A disk whose power can be cut at any moment: what was not synced may be there, not, or in part.

`PowerCutDevice` works on real files and logs what was done to them. `cut` builds, in another folder, one
of the states that the log up to a point allows after a power cut:

- A write that no later `sync` of its file covers is kept, lost or torn at sectors, each on its own and in
  any order. A sector is whole.
- The length of a file is any that it has had since its last sync. Bytes that were never written are zero.
- A file that was created, renamed or unlinked without a later `sync_folder` may have its old name or its
  new one, each of them on its own. A name and the bytes behind it are durable apart from each other.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from workmem.store.device import Access, BlockDevice, DeviceFile, HostDevice

SECTOR_BYTES = 512


class _Write(msgspec.Struct, frozen=True):
    file: int
    offset: int
    data: bytes


class _Truncate(msgspec.Struct, frozen=True):
    file: int
    size: int


class _Sync(msgspec.Struct, frozen=True):
    file: int


class _Create(msgspec.Struct, frozen=True):
    file: int
    name: Path


class _Rename(msgspec.Struct, frozen=True):
    source: Path
    target: Path


class _Unlink(msgspec.Struct, frozen=True):
    name: Path


class _SyncFolder(msgspec.Struct, frozen=True):
    folder: Path


_Operation = _Write | _Truncate | _Sync | _Create | _Rename | _Unlink | _SyncFolder


class PowerCutDevice:
    """A device over the files below `root`. What is there at the start counts as durable.

    Names are kept relative to `root`; files that others make there (the lock, the format) are always durable.
    """

    def __init__(self, root: Path, inner: BlockDevice | None = None) -> None:
        self._root = root
        self._inner = inner or HostDevice()
        self._lock = threading.Lock()
        self._log: list[_Operation] = []
        self._start: dict[Path, bytes] = {}
        self._numbers: dict[Path, int] = {}
        """File number by the name it has now."""
        for path in sorted(root.rglob("*")) if root.exists() else []:
            if path.is_file():
                name = path.relative_to(root)
                self._start[name] = path.read_bytes()
                self._numbers[name] = len(self._numbers)
        self._next_number = len(self._numbers)

    @property
    def operations(self) -> int:
        """How many operations changed something so far. Power can be cut after each: see `cut`."""
        return len(self._log)

    def open(self, path: Path, access: Access, *, direct: bool) -> DeviceFile:
        """See `BlockDevice.open`."""
        name = path.relative_to(self._root)
        with self._lock:
            inner = self._inner.open(path, access, direct=direct)
            if access is Access.CREATE:
                number = self._numbers[name] = self._next_number
                self._next_number += 1
                self._log.append(_Create(number, name))
            else:
                number = self._numbers[name]
        return _File(inner, number, self._log, self._lock)

    def rename(self, source: Path, target: Path) -> None:
        """See `BlockDevice.rename`. Durable at the end, not half-way."""
        old, new = source.relative_to(self._root), target.relative_to(self._root)
        with self._lock:
            self._inner.rename(source, target)
            self._numbers[new] = self._numbers.pop(old)
            self._log += [_Rename(old, new), _SyncFolder(new.parent)]

    def unlink(self, path: Path) -> None:
        """See `BlockDevice.unlink`."""
        name = path.relative_to(self._root)
        with self._lock:
            self._inner.unlink(path)
            if self._numbers.pop(name, None) is not None:
                self._log.append(_Unlink(name))

    def sync_folder(self, path: Path) -> None:
        """See `BlockDevice.sync_folder`."""
        with self._lock:
            self._inner.sync_folder(path)
            self._log.append(_SyncFolder(path.relative_to(self._root)))

    def cut(self, target: Path, *, seed: int, at: int | None = None) -> None:
        """Write a state that a cut after `at` operations may leave into `target`, a folder not there yet.

        All operations count if `at` is left out. The same seed and `at` give the same state.
        """
        chance = random.Random(seed)  # noqa: S311  a test's dice
        with self._lock:
            log = self._log[:at]
            others = self._others()
        disk = _Disk(self._start)
        for operation in log:
            disk.apply(operation)
        target.mkdir(parents=True)
        for name in others:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._root / name, target / name)
        for folder in {operation.folder for operation in self._log if isinstance(operation, _SyncFolder)}:
            (target / folder).mkdir(parents=True, exist_ok=True)
        for name, raw in disk.left(chance).items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(raw)

    def _others(self) -> list[Path]:
        """Files below the root that never went through this device."""
        known = set(self._start)
        for operation in self._log:
            if isinstance(operation, _Create):
                known.add(operation.name)
            elif isinstance(operation, _Rename):
                known.add(operation.target)
        files = (path.relative_to(self._root) for path in self._root.rglob("*") if path.is_file())
        return [name for name in files if name not in known]


class _File:
    """A file of a `PowerCutDevice`."""

    def __init__(self, inner: DeviceFile, number: int, log: list[_Operation], lock: threading.Lock) -> None:
        self._inner = inner
        self._number = number
        self._log = log
        self._lock = lock
        self.is_direct = inner.is_direct

    def readv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """See `DeviceFile.readv`."""
        self._inner.readv(buffers, offset)

    def writev(self, buffers: Sequence[memoryview], offset: int) -> None:
        """See `DeviceFile.writev`."""
        with self._lock:
            # Before it is done: a write that fails may have happened all the same.
            self._log.append(_Write(self._number, offset, b"".join(buffers)))
            self._inner.writev(buffers, offset)

    def sync(self) -> None:
        """See `DeviceFile.sync`."""
        with self._lock:
            self._inner.sync()
            self._log.append(_Sync(self._number))

    def size(self) -> int:
        """See `DeviceFile.size`."""
        return self._inner.size()

    def truncate(self, size: int) -> None:
        """See `DeviceFile.truncate`."""
        with self._lock:
            self._log.append(_Truncate(self._number, size))
            self._inner.truncate(size)

    def close(self) -> None:
        """See `DeviceFile.close`."""
        self._inner.close()


class _Content:
    """The bytes of one file: durable ones, and what was done to them since."""

    def __init__(self, raw: bytes = b"") -> None:
        self._durable = bytearray(raw)
        self._since: list[_Write | _Truncate] = []

    def change(self, operation: _Write | _Truncate) -> None:
        self._since.append(operation)

    def sync(self) -> None:
        for operation in self._since:
            if isinstance(operation, _Truncate):
                _resize(self._durable, operation.size)
            else:
                _put(self._durable, operation.offset, operation.data)
        self._since.clear()

    def left(self, chance: random.Random) -> bytes:
        """One of the contents that a cut may leave."""
        raw = bytearray(self._durable)
        size = len(raw)
        sizes = [size]
        for operation in self._since:
            size = operation.size if isinstance(operation, _Truncate) else _end(operation, size)
            sizes.append(size)
        kept = _shares(chance)
        writes = [operation for operation in self._since if isinstance(operation, _Write)]
        chance.shuffle(writes)
        for write in writes:
            _lay(raw, write, kept, chance)
        _resize(raw, chance.choice((sizes[0], sizes[-1], chance.choice(sizes))))
        return bytes(raw)


class _Disk:
    """All files and names, durable ones and those that a cut may undo."""

    def __init__(self, start: dict[Path, bytes]) -> None:
        self._files = {number: _Content(raw) for number, raw in enumerate(start.values())}
        self._names = {name: number for number, name in enumerate(start)}
        self._since: list[_Create | _Rename | _Unlink] = []

    def apply(self, operation: _Operation) -> None:
        if isinstance(operation, _Write | _Truncate):
            self._files[operation.file].change(operation)
        elif isinstance(operation, _Sync):
            self._files[operation.file].sync()
        elif isinstance(operation, _SyncFolder):
            self._sync_folder(operation.folder)
        else:
            if isinstance(operation, _Create):
                self._files[operation.file] = _Content()
            self._since.append(operation)

    def left(self, chance: random.Random) -> dict[Path, bytes]:
        """Names and contents that a cut may leave."""
        kept = _shares(chance)
        names = dict(self._names)
        now = dict(self._names)
        for operation in self._since:
            number = _rename(now, operation)
            if chance.random() < kept:
                _apply_name(names, operation, number)
        return {name: self._files[number].left(chance) for name, number in names.items()}

    def _sync_folder(self, folder: Path) -> None:
        now = dict(self._names)
        later: list[_Create | _Rename | _Unlink] = []
        for operation in self._since:
            number = _rename(now, operation)
            where = operation.target if isinstance(operation, _Rename) else operation.name
            if where.parent == folder:
                _apply_name(self._names, operation, number)
            else:
                later.append(operation)
        self._since = later


def _rename(names: dict[Path, int], operation: _Create | _Rename | _Unlink) -> int:
    """Carry out `operation` and return the number of the file that it was about."""
    number = operation.file if isinstance(operation, _Create) else -1
    if isinstance(operation, _Rename):
        number = names[operation.source]
    elif isinstance(operation, _Unlink):
        number = names[operation.name]
    _apply_name(names, operation, number)
    return number


def _apply_name(names: dict[Path, int], operation: _Create | _Rename | _Unlink, number: int) -> None:
    if isinstance(operation, _Create):
        names[operation.name] = number
        return
    gone = operation.source if isinstance(operation, _Rename) else operation.name
    if names.get(gone) == number:
        del names[gone]
    if isinstance(operation, _Rename):
        names[operation.target] = number


def _shares(chance: random.Random) -> float:
    """How much survives: often all or nothing, for those are the states that code forgets."""
    return chance.choice((0.0, 1.0, 0.5, chance.random()))


def _lay(raw: bytearray, write: _Write, kept: float, chance: random.Random) -> None:
    """Put a write, or the sectors of it that made it, into `raw`."""
    if chance.random() >= kept:
        return
    if chance.random() < 0.5:
        _put(raw, write.offset, write.data)
        return
    start = 0
    while start < len(write.data):
        end = min(len(write.data), start + SECTOR_BYTES - (write.offset + start) % SECTOR_BYTES)
        if chance.random() < 0.5:
            _put(raw, write.offset + start, write.data[start:end])
        start = end


def _put(raw: bytearray, offset: int, data: bytes) -> None:
    if len(raw) < offset:
        _resize(raw, offset)
    raw[offset : offset + len(data)] = data


def _resize(raw: bytearray, size: int) -> None:
    del raw[size:]
    raw.extend(bytes(size - len(raw)))


def _end(write: _Write, size: int) -> int:
    return max(size, write.offset + len(write.data))
