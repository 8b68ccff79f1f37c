"""Where a host's store listens: a socket that only its user can reach, and that one server owns."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path

from workmem.core.errors import ConfigError
from workmem.store.host.channel import Disconnected

_BACKLOG = 64
_PROBE_S = 1.0
_PATH_BYTES_MAX = 107
"""What the kernel's address of a Unix socket holds, less the final zero."""


class SocketPlace:
    """The claim on a socket's path, held from `listen` to `close`.

    A lock beside the socket says who owns it. The kernel drops it with its owner, so a socket without a
    held lock is what a dead server left, and is replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        self._listener: socket.socket | None = None

    def listen(self) -> socket.socket:
        """The listening socket. Raises ConfigError when the place is taken or open to others."""
        _check_length(self.path)
        _own_folder(self.path.parent)
        self._lock = _claim(self.path)
        try:
            self._listener = _bind(self.path)
        except BaseException:
            os.close(self._lock)
            raise
        return self._listener

    def close(self) -> None:
        """Stop listening and remove the socket. The lock's file stays: removing it would let two own it."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A connection to the server at `path`. Raises Disconnected when none listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _check_length(path)
        connection.settimeout(timeout_s)
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise Disconnected(f"no server at {path}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def folder_identity(folder: Path | None) -> tuple[int, int]:
    """Device and inode, which are the same by whatever path; zeros where there is no such folder."""
    try:
        found = folder.stat() if folder is not None else None
    except OSError:
        found = None
    return (0, 0) if found is None else (found.st_dev, found.st_ino)


def is_served(path: Path) -> bool:
    """Whether a server listens at `path`."""
    try:
        connect(path, _PROBE_S).close()
    except Disconnected:
        return False
    return True


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise ConfigError(
            f"$.store.host.socket: {path} is longer than the {_PATH_BYTES_MAX} bytes of a socket's address; "
            "name a shorter one"
        )


def _own_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"$.store.host.socket: folder {folder} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        # Whoever can change the link would choose where clients go.
        raise ConfigError(f"$.store.host.socket: {folder} is a link; name the folder itself")
    if found.st_uid != os.getuid():
        raise ConfigError(f"$.store.host.socket: folder {folder} belongs to another user; name another")
    if found.st_mode & 0o077:
        raise ConfigError(
            f"$.store.host.socket: folder {folder} is open to other users "
            f"(mode {stat.S_IMODE(found.st_mode):o}); run chmod 700 {folder}, or name another"
        )


def _claim(path: Path) -> int:
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError(
            f"$.store.host.socket: a server is listening at {path} already; stop it, or name another"
        ) from error
    return lock


def _bind(path: Path) -> socket.socket:
    if os.path.lexists(path):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"$.store.host.socket: {path} exists and is no socket; name another")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        # Nobody can connect before `listen`, so there is no moment in which the mode matters.
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"$.store.host.socket: cannot listen at {path}: {error}") from error
    return listener
