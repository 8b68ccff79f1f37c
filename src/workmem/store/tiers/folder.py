"""The folder of an ssd tier: whose it is, what format it has, and which files lie in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

import msgspec

from workmem.core.errors import ConfigError
from workmem.store.codecs.sealing import Keyring
from workmem.store.device import sync_folder
from workmem.store.tiers.segments import segment_numbers

FORMAT_VERSION = 2
SEALED_VERSION = 3
"""Of a folder whose pages and journal are sealed: a program that knows nothing of that refuses it."""


class FolderFormat(msgspec.Struct, frozen=True):
    """`FORMAT`: written once, when the folder is made."""

    format: int
    store_id: str
    key_id: str = ""
    """Names the key that the journal is sealed under; empty where folder lies in the clear."""


class Identity(msgspec.Struct, frozen=True):
    """Which folder is taken while a store runs: the one that it had, or one that is made in its place."""

    before: bytes | None
    """Its store id; None where it was never open."""
    fresh: bytes
    """The id that a folder gets that is made. Given beforehand: one that was left half made is known again."""

    @classmethod
    def of(cls, before: bytes | None) -> Identity:
        """For a store that had `before`."""
        return cls(before, secrets.token_bytes(16))


class StoreFolder:
    """An ssd tier's folder, locked for this process until `close`."""

    def __init__(
        self, path: str, keyring: Keyring | None = None, *, identity: Identity | None = None
    ) -> None:
        """With an `identity` the folder is that store's, or is made anew; without, whosever it is."""
        if not path:
            # It would be the working directory, which nobody meant.
            raise ConfigError("$.store.ssd.path: is empty; name a folder")
        self.path = Path(path).expanduser()
        self.segments = self.path / "segments"
        self.keyring = keyring
        self._identity = identity
        self._key_id = "" if keyring is None else keyring.current.key_id.hex()
        self.is_under_current_key = True
        """The journal is not under an older key."""
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
                "stop it, give this one a folder of its own (--set store.ssd.path=FOLDER), or share one by `workmem store serve`"
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
            if found.format not in {FORMAT_VERSION, SEALED_VERSION} or len(store_id) != 16:
                raise ConfigError(
                    f"$.store.ssd.path: {self.path} has format {found.format}, this program writes "
                    f"{FORMAT_VERSION}; remove the folder or name another"
                )
            require_key(self.path, found, self.keyring)
            self._require_identity(store_id)
            self.is_under_current_key = found.key_id == self._key_id
            return store_id
        store_id = secrets.token_bytes(16) if self._identity is None else self._identity.fresh
        self._write_format(store_id)
        return store_id

    def _require_identity(self, store_id: bytes) -> None:
        known = self._identity
        if known is not None and store_id not in {known.fresh, known.before}:
            raise ConfigError(
                f"$.store.ssd.path: {self.path} is the folder of another store now; put the one back that was there, "
                "remove it, or start again to take this one"
            )

    def note_current_key(self) -> None:
        """The journal was written anew under the current key. Raises OSError."""
        if not self.is_under_current_key:
            self._write_format(self.store_id)
            self.is_under_current_key = True

    def _write_format(self, store_id: bytes) -> None:
        file = self.path / "FORMAT"
        version = SEALED_VERSION if self._key_id else FORMAT_VERSION
        fresh = file.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(FolderFormat(version, store_id.hex(), self._key_id)))
        fd = os.open(fresh, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        fresh.replace(file)
        sync_folder(self.path)


def require_key(path: Path, found: FolderFormat, keyring: Keyring | None) -> None:
    """Raises ConfigError unless `keyring` opens the folder, or both know of no key."""
    if not found.key_id:
        if keyring is not None:
            raise ConfigError(
                f"$.store.ssd.key_file: {path} holds pages in the clear, which a key comes too late for; "
                "remove the folder, or name another in store.ssd.path"
            )
    elif keyring is None:
        raise ConfigError(
            f"$.store.ssd.key_file: is empty, and {path} is sealed under key {found.key_id}; "
            "name that key's file, or remove the folder"
        )
    elif not keyring.knows(bytes.fromhex(found.key_id)):
        raise ConfigError(
            f"$.store.ssd.key_file: {path} is sealed under key {found.key_id}, this file holds "
            f"{keyring.current.key_id.hex()}; name the other key's file in store.ssd.older_key_files, "
            "or remove the folder"
        )


def _make_durably(path: Path) -> None:
    """Make a folder and those above it. Each name is durable before anything is put below it."""
    if path.is_dir():
        return
    _make_durably(path.parent)
    path.mkdir(exist_ok=True, mode=0o700)
    sync_folder(path.parent)
