"""Messages over a stream socket, whole and bounded."""

from __future__ import annotations

import socket
import struct

from workmem.core.errors import TransferError
from workmem.store.host.wire import BODY_BYTES_MAX, PREFIX, Kind, Malformed

_BUFFER_BYTES = 64 * 2**10
_pack_prefix, _unpack_prefix = PREFIX.pack, PREFIX.unpack_from
_KINDS: dict[int, Kind] = {kind.value: kind for kind in Kind}
"""Half a microsecond a message less than making the enum's member."""


class Disconnected(TransferError):
    """The other end is gone, or did not answer within the bound: the connection is of no more use."""


class Channel:
    """One end of a connection. One thread at a time sends, one at a time receives.

    Owns the socket. `send_s` and `receive_s` bound how long a call waits for the other end (0: for ever);
    they are the kernel's own timeouts, which cost no extra call per message.
    """

    def __init__(self, connection: socket.socket, *, send_s: float, receive_s: float) -> None:
        self._socket = connection
        self._sendall, self._recv_into = connection.sendall, connection.recv_into
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_s))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_s))
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    @property
    def socket(self) -> socket.socket:
        """The socket, for `poll` and for credentials."""
        return self._socket

    def send(self, kind: int, tag: int, body: bytes) -> None:
        """Send one message. Raises Disconnected."""
        try:
            self._sendall(_pack_prefix(len(body), kind, tag) + body)
        except OSError as error:
            raise Disconnected(f"cannot send: {error}") from error

    def receive(self) -> tuple[Kind, int, memoryview]:
        """(kind, tag, body) of the next message; the body is valid until the next call.

        Raises Disconnected at the end of the stream, Malformed on what is no message.
        """
        start = self._start
        if start == self._end:
            # Nothing is left of the last read: mostly the next one brings one message, whole.
            self._start = self._end = start = 0
            self._end = self._read(self._view)
        if self._end - start < PREFIX.size:
            self._fill(PREFIX.size)
            start = 0
        length, kind, tag = _unpack_prefix(self._buffer, start)
        if length > BODY_BYTES_MAX:
            raise Malformed(f"a message of {length} bytes, more than {BODY_BYTES_MAX}")
        if self._end - start < PREFIX.size + length:
            self._fill(PREFIX.size + length)
            start = 0
        self._start = stop = start + PREFIX.size + length
        known = _KINDS.get(kind)
        if known is None:
            raise Malformed(f"a message of unknown kind {kind}")
        return known, tag, self._view[stop - length : stop]

    def receive_fds(self, count: int) -> list[int]:
        """Read what is there along with up to `count` descriptors, which are the caller's to close.

        The message they came with is the next that `receive` returns. Raises Disconnected.
        """
        try:
            raw, fds, _, _ = socket.recv_fds(self._socket, _BUFFER_BYTES - self._end, count)
        except OSError as error:
            raise Disconnected(f"cannot receive: {error}") from error
        if not raw:
            raise Disconnected("the other end closed the connection")
        self._buffer[self._end : self._end + len(raw)] = raw
        self._end += len(raw)
        return fds

    @property
    def has_more(self) -> bool:
        """Whether the start of another message has been read already."""
        return self._end - self._start >= PREFIX.size

    def shut(self) -> None:
        """End both directions: whoever waits in `receive`, here or there, is told."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The other end was first.

    def close(self) -> None:
        """Give the descriptor back. For the thread that receives, or when none does."""
        self._socket.close()

    def _fill(self, wanted: int) -> None:
        """Read until `wanted` bytes lie from `_start` on."""
        have = self._end - self._start
        if self._start:
            # Moved to the front in one step: bodies handed out before are invalid from here on anyway.
            self._buffer[:have] = self._buffer[self._start : self._end]
            self._start, self._end = 0, have
        if wanted > len(self._buffer):
            grown = bytearray(wanted)
            grown[:have] = self._buffer[:have]
            self._buffer, self._view = grown, memoryview(grown)
        while self._end < wanted:
            self._end += self._read(self._view[self._end :])

    def _read(self, place: memoryview) -> int:
        try:
            count = self._recv_into(place)
        except OSError as error:
            raise Disconnected(f"cannot receive: {error}") from error
        if count == 0:
            raise Disconnected("the other end closed the connection")
        return count


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, int((seconds - whole) * 1e6))
