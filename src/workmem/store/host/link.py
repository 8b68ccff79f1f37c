"""A client's connection to the server of its host: requests in, replies out, the arena mapped."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from workmem.core.layout import Namespace
from workmem.store.host import messages
from workmem.store.host.channel import Channel, Disconnected
from workmem.store.host.lease import HeldLeases
from workmem.store.host.mapping import ArenaMapping
from workmem.store.host.peer import Peer, Stranger
from workmem.store.host.place import connect
from workmem.store.host.wire import ErrorCode, Kind, Malformed, Refused

_TAGS = 1 << 16
_DEAD_WAIT_S = 0.2
"""A killed server is known dead within moments of its connection's end."""


class Link:
    """One connection, from its greeting to its loss. A lost link stays lost; leases on it may outlive it.

    Any thread may ask; requests go one at a time and none waits longer than `call_s` for its reply.
    Raises Disconnected when there is no server, or not ours; Refused when it does not want us.
    """

    def __init__(self, path: Path, namespaces: Sequence[Namespace], *, call_s: float, writes: bool) -> None:
        connection = connect(path, call_s)
        self._channel = Channel(connection, send_s=call_s, receive_s=call_s)
        self.lock = threading.Lock()
        """Held from a request to its reply; a lease is in `leases` before it opens."""
        self.leases = HeldLeases()
        self.lost_at: float | None = None
        """When the connection was found lost, on `time.monotonic`."""
        self._tag = 0
        self._pid = os.getpid()
        self._notices: Channel | None = None
        try:
            self._server = Peer(connection)
            self.welcome = self._greet(writes=writes, call_s=call_s)
            self.capacity_bytes = self.welcome.arena_bytes
            for namespace in namespaces:
                try:
                    self.register(namespace)
                except Refused as error:
                    # One too many for the server is a miss in that one, and nothing to the others.
                    if error.code is not ErrorCode.BOUND:
                        raise
        except Stranger as error:
            self.close()
            raise Disconnected(f"the server at {path} is not ours: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def notices(self) -> Channel:
        """What the server tells without being asked."""
        assert self._notices is not None
        return self._notices

    @property
    def is_usable(self) -> bool:
        """Not lost, and opened by this process rather than by one that it was forked from."""
        return self.lost_at is None and self._pid == os.getpid()

    def server_is_dead(self) -> bool:
        """Whether the server's process is known to have ended: nobody changes its arena any more."""
        return self._server.is_dead()

    def has_hung_up(self) -> bool:
        """Whether the server ended the connection and lives, be that noticed or not.

        It hangs up before it takes leased pages back: who has read them and then finds it there has read what it held.
        """
        poll = select.poll()
        try:
            poll.register(self._channel.socket, select.POLLRDHUP)
        except ValueError:
            pass  # Closed by now.
        else:
            if not poll.poll(0) and self.lost_at is None:
                return False
        return not self._server.is_dead(_DEAD_WAIT_S)

    def ask(self, kind: Kind, body: bytes = b"") -> memoryview:
        """The reply to a request, as a copy. Raises Disconnected or Refused."""
        with self.lock:
            return memoryview(bytes(self.ask_locked(kind, body)))

    def ask_locked(self, kind: Kind, body: bytes) -> memoryview:
        """The reply to a request, valid until the next. `lock` is held by the caller."""
        try:
            return self._exchange(kind, body)
        except (Disconnected, Malformed) as error:
            # A late reply would be taken for that of a later request.
            self._lose_locked()
            raise Disconnected(str(error)) from error

    def tell(self, kind: Kind, body: bytes) -> None:
        """Send what has no reply. A connection that is lost with it is noticed by the next request."""
        with self.lock:
            if not self.is_usable:
                return
            try:
                self._channel.send(kind, 0, body)
            except Disconnected:
                self._lose_locked()

    def register(self, namespace: Namespace) -> bytes:
        """Declare a namespace; returns its root."""
        reply = self.ask(Kind.REGISTER, msgspec.json.encode(namespace))
        root, self.capacity_bytes = messages.unpack_registered(reply)
        if root != namespace.root():
            raise Disconnected(
                "the server names the namespace differently: run the same workmem on both ends"
            )
        return root

    def close(self) -> None:
        """Give the connection and its notices up. For the one thread that hears the notices. Idempotent.

        Leases on it know what that means for them: the arena and what is known of the server stay.
        """
        self.lose()
        if self._notices is not None:
            self._notices.close()

    def lose(self) -> None:
        """Give the connection up, from any thread. Idempotent."""
        # Wakes a thread that waits for a reply, which then lets go of the lock.
        self._channel.shut()
        with self.lock:
            self._lose_locked()

    def _lose_locked(self) -> None:
        if self.lost_at is None:
            self.lost_at = time.monotonic()
            self._channel.shut()
            self._channel.close()

    def _exchange(self, kind: Kind, body: bytes) -> memoryview:
        if self.lost_at is not None:
            raise Disconnected("the connection was lost")
        channel = self._channel
        self._tag = tag = (self._tag + 1) % _TAGS
        channel.send(kind, tag, body)
        answered, stated, reply = channel.receive()
        if answered is Kind.ERROR:
            raise messages.unpack_error(reply)
        if answered is not kind or stated != tag:
            raise Malformed(f"a reply {answered.name} {stated} to the request {kind.name} {tag}")
        return reply

    def _greet(self, *, writes: bool, call_s: float) -> messages.Welcome:
        try:
            self._channel.send(Kind.HELLO, 0, messages.pack_hello(os.getpid()))
        except Disconnected:
            # A server with no room says so and hangs up without waiting for a hello: hear why.
            with suppress(Disconnected, Malformed):
                self._take_welcome(())
            raise
        fds = self._channel.receive_fds(2)
        try:
            welcome = self._take_welcome(fds)
            self.arena = ArenaMapping(fds[0], welcome.arena_bytes, writes=writes)
            self._notices = Channel(socket.socket(fileno=os.dup(fds[1])), send_s=call_s, receive_s=call_s)
        except Malformed as error:
            raise Disconnected(f"the server cannot be understood: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)
        return welcome

    def _take_welcome(self, fds: Sequence[int]) -> messages.Welcome:
        kind, _, body = self._channel.receive()
        if kind is Kind.ERROR:
            raise messages.unpack_error(body)
        if kind is not Kind.HELLO or len(fds) != 2:
            raise Malformed(f"a {kind.name} with {len(fds)} descriptors where a welcome belongs")
        return messages.unpack_welcome(body)
