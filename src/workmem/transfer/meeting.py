"""Where an endpoint listens, and how two come to speak."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable

from workmem.core.errors import TransferError
from workmem.transfer.channel import Channel
from workmem.transfer.messages import VERSION, Hello, pack, unpack
from workmem.transfer.peer import Peer

_BACKLOG = 64
_UNIX = "unix:"

Wrap = Callable[[Channel], Channel]
"""For tests: a channel that loses words."""


class Meeting:
    """The listening socket. An empty `host` is this host alone: a name that the kernel forgets with the process."""

    def __init__(self, instance: bytes, mover: str, host: str, wrap: Wrap) -> None:
        self._hello = Hello(VERSION, instance, mover)
        self._wrap = wrap
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
            self.address = f"{host}:{self.listener.getsockname()[1]}"
        else:
            name = f"workmem-transfer-{secrets.token_hex(8)}"
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.listener.bind("\0" + name)
            self.listener.listen(_BACKLOG)
            self.address = _UNIX + name

    def greet(self, connection: socket.socket, within_s: float) -> Peer:
        """Who has connected. Takes the socket over. Raises TransferError."""
        channel = self._wrap(Channel(connection))
        try:
            channel.patience(within_s)
            return self._met(channel)
        except BaseException:
            channel.close()
            raise

    def dial(self, address: str, within_s: float) -> Peer:
        """Who listens there. Raises TransferError, OSError where nobody does."""
        if address.startswith(_UNIX):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(within_s)
                connection.connect("\0" + address.removeprefix(_UNIX))
            except BaseException:
                connection.close()
                raise
        else:
            host, _, port = address.rpartition(":")
            if not port.isdigit():
                raise TransferError(f"{address!r} is no address of an endpoint: host:port, or unix:name")
            connection = socket.create_connection((host, int(port)), within_s)
        return self.greet(connection, within_s)

    def close(self) -> None:
        """Nobody can connect any more."""
        self.listener.close()

    def _met(self, channel: Channel) -> Peer:
        channel.send(pack(self._hello))
        body, fds = channel.receive()
        hello = unpack(body)
        if fds or not isinstance(hello, Hello):
            raise TransferError("the other end does not greet")
        if (hello.version, hello.mover) != (VERSION, self._hello.mover):
            raise TransferError(
                f"the other end moves by {hello.mover}, version {hello.version}; this one by {self._hello.mover}, {VERSION}"
            )
        peer = Peer(channel, hello.instance)
        channel.patience(0)
        return peer
