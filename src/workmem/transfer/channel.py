"""Words between two endpoints: whole messages over a stream socket, with descriptors where both are on one host."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence

from workmem.core.errors import TransferError

_LENGTH = struct.Struct("<I")
_BODY_BYTES_MAX = 2**20
_FDS_MAX = 4
_SEND_S = 2.0
"""A peer that has not read for so long that its socket is full is as good as gone."""


class Lost(TransferError):
    """The connection is of no more use."""


class Channel:
    """Owns the socket. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        connection.settimeout(None)
        self._bound(socket.SO_SNDTIMEO, _SEND_S)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def socket(self) -> socket.socket:
        """For credentials."""
        return self._socket

    def patience(self, seconds: float) -> None:
        """How long `receive` waits from here on; 0 is for ever."""
        self._bound(socket.SO_RCVTIMEO, seconds)

    def send(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message; the descriptors stay the caller's. Raises Lost."""
        whole = _LENGTH.pack(len(body)) + body
        try:
            with self._lock:
                sent = socket.send_fds(self._socket, [whole], fds) if fds else 0
                self._socket.sendall(whole[sent:])
        except OSError as error:
            self.shut()
            raise Lost(f"cannot send: {error}") from error

    def receive(self) -> tuple[bytes, list[int]]:
        """A message and the descriptors that came with it, which are the caller's to close. Raises Lost."""
        fds: list[int] = []
        try:
            return self._exactly(_bounded(self._exactly(_LENGTH.size, fds)), fds), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def shut(self) -> None:
        """End both directions: whoever waits in `receive`, here or there, is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """For the thread that receives, or when none does."""
        self._socket.close()

    def _exactly(self, count: int, fds: list[int]) -> bytes:
        found = bytearray()
        while len(found) < count:
            try:
                raw, more, _, _ = socket.recv_fds(
                    self._socket, count - len(found), _FDS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                raise Lost(f"cannot receive: {error}") from error
            fds += more
            if not raw:
                raise Lost("the other end closed the connection")
            found += raw
        return bytes(found)

    def _bound(self, option: int, seconds: float) -> None:
        whole = int(seconds)
        self._socket.setsockopt(
            socket.SOL_SOCKET, option, struct.pack("ll", whole, int((seconds - whole) * 1e6))
        )


def _bounded(prefix: bytes) -> int:
    (length,) = _LENGTH.unpack(prefix)
    if length > _BODY_BYTES_MAX:
        raise Lost(f"a message of {length} bytes, more than {_BODY_BYTES_MAX}")
    return length
