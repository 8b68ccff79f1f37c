"""The process at the other end of a socket: whose it is, and whether it is still there."""

from __future__ import annotations

import os
import select
import socket
import struct

from workmem.core.errors import TransferError

_SO_PEERPIDFD = 77
"""Race-free, since Linux 6.5: a process id may have been given to another process by the time it is used."""
_UCRED = struct.Struct("3i")


class Stranger(TransferError):
    """The other end is of another user, or cannot be told apart from other processes."""


class Peer:
    """The process that connected, or that listens. `close` gives its descriptor back."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises Stranger, naming what to change."""
        self._fd = -1
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        self.pid, uid, _ = _UCRED.unpack(raw)
        if uid != os.getuid():
            raise Stranger(f"process {self.pid} is of user {uid}, not {os.getuid()}: a pool serves one user")
        if self.pid <= 0:
            raise Stranger("the process is not visible from here; both ends must share a pid namespace")
        self._fd = _pidfd(connection, self.pid)
        self._dead = self._fd < 0

    def is_dead(self, wait_s: float = 0.0) -> bool:
        """Whether the process, with all its threads, is known to have ended."""
        # Read once: whoever closes it from another thread is done with the process.
        fd = self._fd
        if not self._dead and fd >= 0:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            self._dead = bool(poll.poll(wait_s * 1000))
        return self._dead

    def close(self) -> None:
        """Give the descriptor back. What was known of the process stays known. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _pidfd(connection: socket.socket, pid: int) -> int:
    """A descriptor of the process, or -1 where it is gone already."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        return int(struct.unpack("i", raw)[0])
    except OSError:
        # An older kernel, or a process that has ended; the next call tells which.
        pass
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    except OSError as error:
        raise Stranger(f"process {pid} cannot be watched: {error}") from error
