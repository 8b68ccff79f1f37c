"""The folder of an ssd tier: whose it is, what format it has, and which files lie in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

import msgspec

from workmem.core.errors import ConfigError
from workmem.store.device import sync_folder
from workmem.store.tiers.segments import segment_numbers

FORMAT_VERSION = 2


class FolderFormat(msgspec.Struct, frozen=True):
    """`FORMAT`: written once, when the folder is made."""

    format: int
    store_id: str


class StoreFolder:
    """An ssd tier's folder, locked for this process until `close`."""

    def __init__(self, path: str) -> None:
        if not path:
            # It would be the working directory, which nobody meant.
            raise ConfigError("$.store.ssd.path: is empty; name a folder")
        self.path = Path(path).expanduser()
        self.segments = self.path / "segments"
        try:
            _make_durably(self.segments)
            self._lock_fd = os.open(self.path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"$.store.ssd.path: cannot use {self.path}: {error.strerror}; name a writable folder"
            ) from error
        try:
            self._take_lock()
            self.store_id = self._read_format()
        except BaseException:
            os.close(self._lock_fd)
            raise

    @property
    def journal(self) -> Path:
        """Path of the journal."""
        return self.path / "journal"

    def segment_numbers(self) -> list[int]:
        """Numbers of the segment files that exist, ascending."""
        return segment_numbers(self.segments)

    def is_ours(self) -> bool:
        """Whether the path still leads to the folder that is locked: somebody may have removed it."""
        try:
            return (self.path / "LOCK").stat().st_ino == os.fstat(self._lock_fd).st_ino
        except OSError:
            return False

    def close(self) -> None:
        """Give the folder up."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise ConfigError(
                f"$.store.ssd.path: {self.path} is in use by process {holder}; "
                "stop it, or give this one a folder of its own"
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def _read_format(self) -> bytes:
        file = self.path / "FORMAT"
        with contextlib.suppress(FileNotFoundError):
            try:
                found = msgspec.json.decode(file.read_bytes(), type=FolderFormat)
                store_id = bytes.fromhex(found.store_id)
            except (msgspec.DecodeError, ValueError) as error:
                raise ConfigError(
                    f"$.store.ssd.path: {file} is damaged ({error}); remove {self.path}"
                ) from error
            if found.format != FORMAT_VERSION or len(store_id) != 16:
                raise ConfigError(
                    f"$.store.ssd.path: {self.path} has format {found.format}, this program writes "
                    f"{FORMAT_VERSION}; remove the folder or name another"
                )
            return store_id
        store_id = secrets.token_bytes(16)
        fresh = file.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(FolderFormat(FORMAT_VERSION, store_id.hex())))
        fd = os.open(fresh, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        fresh.replace(file)
        sync_folder(self.path)
        return store_id


def _make_durably(path: Path) -> None:
    """Make a folder and those above it. Each name is durable before anything is put below it."""
    if path.is_dir():
        return
    _make_durably(path.parent)
    path.mkdir(exist_ok=True, mode=0o700)
    sync_folder(path.parent)
