"""The server of a host's store: listens, starts a session per connection, and watches over what they hold."""

from __future__ import annotations

import logging
import os
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from workmem.core.clock import Clock, SystemClock
from workmem.core.events import BoundReached, EventSink, discard
from workmem.store.host import messages
from workmem.store.host.channel import Channel, Disconnected
from workmem.store.host.peer import Peer, Stranger
from workmem.store.host.place import SocketPlace
from workmem.store.host.session import Hosted, HostLimits, Session
from workmem.store.host.wire import ErrorCode, Kind, Refused
from workmem.store.store import Store

log = logging.getLogger(__name__)

WATCH_S = 0.25
"""Deadlines of reservations are kept to this precision."""
_JOIN_S = 5.0
_REFUSAL_S = 0.2


class HostServer:
    """Serves `store` at `path` from construction to `close`. The store stays the caller's, to close after it.

    Raises ConfigError when the place is taken or open to other users.
    """

    def __init__(
        self,
        store: Store,
        path: Path,
        limits: HostLimits,
        sink: EventSink = discard,
        clock: Clock | None = None,
    ) -> None:
        self.instance = os.urandom(16)
        self._hosted = Hosted(
            store, self.instance, limits, clock or SystemClock(), sink, self._census, self._finish
        )
        self._sink = sink
        self._lock = threading.Lock()
        self._sessions: dict[Session, None] = {}
        self._orphans: list[Session] = []
        """Sessions that have ended while their process lives and has not said that it is done: each holds stranded
        frames."""
        self._workers: list[threading.Thread] = []
        """Of the sessions, and of some that have ended: a thread is not over with the session that it takes off the list."""
        self._malformed = 0
        self._served = 0
        self._closing = threading.Event()
        self._place = SocketPlace(path)
        self._listener = self._place.listen()
        self._threads = [
            threading.Thread(target=self._accept, name="workmem-host-accept", daemon=True),
            threading.Thread(target=self._watch, name="workmem-host-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up on every client, end the threads, remove the socket. Idempotent.

        Frames still stranded go with the store; a client that outlives it writes to memory nobody reads.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            # Wakes the thread in `accept`; closing the descriptor under it would not.
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("the listening socket was shut already: %s", error)
        with self._lock:
            sessions, workers = list(self._sessions), list(self._workers)
        for session in sessions:
            session.hang_up()
        for thread in [*workers, *self._threads]:
            thread.join(_JOIN_S)
        self._place.close()

    def _census(self) -> dict[str, float]:
        with self._lock:
            sessions, orphans = [*self._sessions], [*self._orphans]
        reservations = [session.reservations for session in [*sessions, *orphans]]
        return {
            "store_host_connections": len(sessions),
            "store_host_connections_total": self._served,
            "store_host_lost_sessions": len(orphans),
            "store_host_leases": sum(session.lease_count for session in sessions),
            "store_host_reservations": sum(held.count for held in reservations),
            "store_host_stranded_frames": sum(held.stranded for held in reservations),
            "store_host_malformed_total": self._malformed,
        }

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                # Out of descriptors, most likely: those who wait are let in once some have left.
                log.warning("cannot accept a client: %s", error)
                self._closing.wait(WATCH_S)
                continue
            try:
                self._admit(connection)
            except Stranger as error:
                _refuse(connection, ErrorCode.STRANGER, str(error))

    def _admit(self, connection: socket.socket) -> None:
        limit = self._hosted.limits.connections
        if len(self._sessions) + len(self._orphans) >= limit:
            self._sink(
                BoundReached(name="store.host.connections", limit=limit, detail="a client was refused")
            )
            _refuse(
                connection, ErrorCode.BOUND, f"{limit} connections are open; raise store.host.connections_max"
            )
            return
        session = Session(self._hosted, connection, Peer(connection))
        thread = threading.Thread(target=self._run, args=(session,), name="workmem-host-session", daemon=True)
        with self._lock:
            self._sessions[session] = None
            self._workers = [*filter(threading.Thread.is_alive, self._workers), thread]
            self._served += 1
            # Inside, so that `close` finds no thread that cannot be joined yet.
            thread.start()
        if self._closing.is_set():
            # `close` may have looked before this one was there.
            session.hang_up()

    def _run(self, session: Session) -> None:
        try:
            session.run()
        except Exception:  # thread main: one client's connection ends, the others' do not
            log.exception("a session of the host's store met a bug of ours")
        with self._lock:
            del self._sessions[session]
            self._malformed += session.was_malformed
            if session.reservations.count and not session.is_finished:
                self._orphans.append(session)
                return
        # Its client may have said that it is done after the session had stranded what was reserved.
        session.reservations.free_all()
        session.peer.close()

    def _finish(self, peer: Peer, number: int) -> None:
        """The process of `peer` writes no page of session `number` any more. One that is over, or unknown, passes."""
        with self._lock:
            found = [session for session in [*self._sessions, *self._orphans] if session.number == number]
            if not found:
                return
            [session] = found
            if session.peer.pid != peer.pid:
                raise Refused(f"session {number:x} is of another process than {peer.pid}", ErrorCode.CLIENT)
            # Under the lock, so that a session that ends now either is found among the orphans or finds this.
            session.is_finished = True
            is_orphan = session in self._orphans
        if is_orphan:
            self._give_back(session)
        else:
            # Its end was not noticed yet, or what it asked last is still being answered.
            session.hang_up()

    def _give_back(self, orphan: Session) -> None:
        """Nobody writes the frames of `orphan` any more. By whoever finds out, which may be two at once."""
        orphan.reservations.free_all()
        with self._lock:
            if orphan in self._orphans:
                self._orphans.remove(orphan)
                orphan.peer.close()

    def _watch(self) -> None:
        """Strand what is overdue; notice processes that ended, also where a child keeps the socket open."""
        while not self._closing.wait(WATCH_S):
            with self._lock:
                sessions, orphans = [*self._sessions], [*self._orphans]
            for session in sessions:
                session.reservations.strand_overdue()
                if session.peer.is_dead():
                    session.hang_up()
            for orphan in orphans:
                if orphan.peer.is_dead():
                    self._give_back(orphan)


def _refuse(connection: socket.socket, code: ErrorCode, text: str) -> None:
    channel = Channel(connection, send_s=_REFUSAL_S, receive_s=_REFUSAL_S)
    try:
        channel.send(Kind.ERROR, 0, messages.pack_error(code, text))
    except Disconnected as error:
        log.debug("a client was refused and did not wait to hear why: %s", error)
    channel.close()
