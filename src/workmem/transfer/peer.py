"""Another endpoint, as this one sees it: a connection for words, and whether the process behind it still is."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from workmem.core.errors import TransferError
from workmem.transfer.channel import Channel, Lost
from workmem.transfer.contract import Outcome
from workmem.transfer.messages import (
    Answer,
    Arrived,
    Finished,
    Goodbye,
    Hello,
    Malformed,
    Message,
    Notify,
    Open,
    Opened,
    Reply,
    Revoke,
    Summing,
    pack,
    unpack,
)

_SO_PEERPIDFD = 77
"""Race-free, since Linux 6.5: a process id may have been given to another process by the time it is used."""
_UCRED = struct.Struct("3i")
_WAITING_MAX = 4096
"""Questions that a peer has not answered."""

T = TypeVar("T")
Told = Open | Arrived | Summing | Notify | Revoke | Finished
Settle = Callable[[Reply | Outcome, int], None]
"""Gets the reply and its descriptor (-1 where there is none), which it takes over; or why there is none."""


class Peer:
    """One connection. Lost once, it stays lost."""

    def __init__(self, channel: Channel, instance: bytes) -> None:
        self.instance = instance
        self.lost_at: float | None = None
        """On `time.monotonic`."""
        self.said_goodbye = False
        """Nothing of it was under way when it ended."""
        self._channel = channel
        self._lock = threading.Lock()
        self._tag = 0
        self._order = threading.Lock()
        """Tags go out in their order."""
        self._heard = 0
        self._waiting: dict[int, Settle] = {}
        self._gone = threading.Event()
        self._pidfd = pidfd_of(channel.socket)

    @property
    def is_gone(self) -> bool:
        """Whether the connection has ended."""
        return self._gone.is_set()

    def wait_gone(self, within_s: float) -> bool:
        """The same, waited for."""
        return self._gone.wait(within_s)

    def has_ended(self, drain_s: float) -> bool:
        """Whether nothing that it began can arrive any more."""
        if self.lost_at is None:
            return False
        if self.said_goodbye:
            return True
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            return bool(poll.poll(0))
        return time.monotonic() >= self.lost_at + drain_s

    def tell(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send what gets no reply. Where that fails the connection is lost, and whoever waits hears of it."""
        try:
            self._channel.send(pack(message), fds)
        except Lost:
            self._channel.shut()

    def ask(self, make: Callable[[int], Message], settle: Settle) -> None:
        """Send what `make` makes of a tag. `settle` is called once, from some thread, and does not wait."""
        with self._order:
            with self._lock:
                self._tag += 1
                tag = self._tag
                why = Outcome.PEER_GONE if self.lost_at is not None else None
                if len(self._waiting) >= _WAITING_MAX:
                    why = Outcome.REFUSED
                if why is None:
                    self._waiting[tag] = settle
            if why is None:
                self.tell(make(tag))
        if why is not None:
            settle(why, -1)

    def ask_and_wait(
        self, make: Callable[[int], Message], use: Callable[[Reply, int], T], within_s: float
    ) -> T | Outcome:
        """What `use` makes of the reply; TIMED_OUT where none comes in time.

        `use` takes the descriptor over. It runs in the thread that hears, so that no later word overtakes it.
        """
        found: list[T | Outcome] = []
        came = threading.Event()
        given_up = threading.Lock()

        def settle(reply: Reply | Outcome, fd: int) -> None:
            with given_up:
                if came.is_set():
                    _close(fd)
                    return
                found.append(reply if isinstance(reply, Outcome) else use(reply, fd))
                came.set()

        self.ask(make, settle)
        came.wait(max(0.0, within_s))
        with given_up:
            came.set()
        return found[0] if found else Outcome.TIMED_OUT

    def notify(self, body: bytes, within_s: float) -> Outcome:
        """Have `body` arrive among the notices there."""
        return self.ask_and_wait(lambda tag: Notify(tag, body), _outcome_of, within_s)

    def is_new(self, notice: Notify) -> bool:
        """Whether it follows those that were heard: not a second time, and not late."""
        is_new = notice.tag > self._heard
        self._heard = max(self._heard, notice.tag)
        return is_new

    def hear(self, told: Callable[[Peer, Told], None]) -> None:
        """Receive until the connection ends: replies settle what waits, the rest is `told`."""
        try:
            while not self.said_goodbye:
                body, fds = self._channel.receive()
                message = unpack(body) if len(fds) <= 1 else None
                if isinstance(message, Opened):
                    self._settle(message, fds[0] if fds else -1)
                    continue
                for fd in fds:
                    os.close(fd)
                if isinstance(message, Answer):
                    self._settle(message, -1)
                    continue
                if message is None or isinstance(message, Hello):
                    break
                if isinstance(message, Goodbye):
                    self.said_goodbye = True
                else:
                    told(self, message)
        except (Lost, Malformed):
            pass  # Either way it is over.
        finally:
            # Whoever waits is told so.
            self._end()

    def shut(self) -> None:
        """End the connection; who hears notices."""
        self._channel.shut()

    def __del__(self) -> None:
        _close(getattr(self, "_pidfd", -1))

    def _settle(self, reply: Reply, fd: int) -> None:
        with self._lock:
            settle = self._waiting.pop(reply.tag, None)
        if settle is None:
            # A second reply to the same.
            _close(fd)
        else:
            settle(reply, fd)

    def _end(self) -> None:
        with self._lock:
            self.lost_at = time.monotonic()
            waiting, self._waiting = list(self._waiting.values()), {}
        self._channel.shut()
        self._channel.close()
        self._gone.set()
        for settle in waiting:
            settle(Outcome.PEER_GONE, -1)


def _outcome_of(reply: Reply, fd: int) -> Outcome:
    _close(fd)
    return reply.outcomes[0] if isinstance(reply, Answer) and reply.outcomes else Outcome.FAILED


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def pidfd_of(connection: socket.socket) -> int:
    """A descriptor of the process at the other end; -1 where that is on another host.

    Raises TransferError where it is another user's, or cannot be watched.
    """
    if connection.family != socket.AF_UNIX:
        return -1
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.getuid():
        raise TransferError(
            f"process {pid} is of user {uid}, not {os.getuid()}: memory is shared within one user"
        )
    if pid <= 0:
        raise TransferError(
            "the other process is not visible from here; both ends must share a pid namespace"
        )
    try:
        return int(struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0])
    except OSError:
        pass  # An older kernel.
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise TransferError(f"process {pid} cannot be watched: {error}") from error
