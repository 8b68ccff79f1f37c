"""The thread that keeps a client attached: renews leases, hears of arrivals, reconnects."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from workmem.core.errors import TransferError
from workmem.core.outcomes import MissReason
from workmem.store.host import messages
from workmem.store.host.channel import Disconnected
from workmem.store.host.lease import HostLease
from workmem.store.host.link import Link
from workmem.store.host.wire import Kind, Malformed, Refused

log = logging.getLogger(__name__)

_TICK_S = 1.0
"""An arrival whose notice was lost is heard of within this time."""
_RETRY_S_MIN = 0.05
_RETRY_S_MAX = 2.0
"""Bounds of the pause between two tries to connect; it doubles with each that fails."""
_FINISHED_MAX = 1024
"""Sessions that the server is yet to be told of. What a forgotten one held waits for the end of this process."""


class Keeper:
    """Owns the link of a client: `link` is the one in use, None while there is no server."""

    def __init__(self, connect: Callable[[], Link], link: Link | None, heard: Callable[[str], None]) -> None:
        """`connect` makes a link or raises TransferError; `heard` is told why a link was lost, "" when one is back."""
        self.link = link
        self.reconnects = 0
        self.finished: deque[tuple[bytes, int]] = deque(maxlen=_FINISHED_MAX)
        """Instance of the server and number of each lost session that nothing writes any more."""
        self._connect = connect
        self._heard = heard
        self._closing = False
        self._has_ended = False
        self._wake_lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pause_s = _RETRY_S_MIN
        self._renew_at = 0.0
        self._thread = threading.Thread(target=self._main, name="workmem-host-keep", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Look at the link now: a caller found it lost."""
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def finish(self, link: Link) -> None:
        """Tell the server that no thread of this process writes a frame of `link` any more, as soon as it can be told."""
        self.finished.append((link.welcome.instance, link.welcome.session))
        if self._has_ended:
            self._say_last()
        else:
            self.nudge()

    def close(self, timeout_s: float) -> bool:
        """End the thread and the link. False if it does not end within `timeout_s`."""
        self._closing = True
        self.nudge()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self.link is not None:
            self.link.tell(Kind.GOODBYE, b"")
            self._drop(self.link, "")
            self.link = None
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1
        return True

    def _main(self) -> None:
        while not self._closing:
            try:
                self._step()
            except Exception:  # thread main: without it no lease would be renewed and nothing reconnected
                log.exception("the keeper of a store's client met a bug of ours")
                time.sleep(_RETRY_S_MIN)
        # In this order: who finishes a session from here on sees that it has to say so itself.
        self._has_ended = True
        self._say_last()

    def _step(self) -> None:
        link = self.link
        if link is None:
            self._try_to_connect()
            return
        why = "a request failed"
        try:
            self._hear(link)
            if not self._closing and link.lost_at is None:
                self._renew(link)
                self._say_finished(link)
        except (Disconnected, Malformed) as error:
            link.lose()
            why = str(error)
        if link.lost_at is not None:
            self.link = None
            self._pause_s = _RETRY_S_MIN
            self._drop(link, why)

    def _try_to_connect(self) -> None:
        try:
            self.link = self._connect()
        except TransferError as error:
            log.debug("no store to attach to: %s", error)
            self._sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _RETRY_S_MAX)
            return
        self.reconnects += 1
        self._renew_at = 0.0
        self._heard("")

    def _drop(self, link: Link, why: str) -> None:
        link.close()
        for lease in link.leases.live():
            # What has arrived may stay readable (see HostLease); what has not never will.
            lease.settle(lease.ready, MissReason.UNAVAILABLE)
        if why:
            self._heard(why)

    def _hear(self, link: Link) -> None:
        """Wait for notices until a tick or a renewal is due, and settle the leases they name."""
        poll = select.poll()
        poll.register(link.notices.socket, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        wait_s = min(_TICK_S, max(0.0, self._renew_at - time.monotonic()))
        for fd, _ in poll.poll(wait_s * 1000):
            if fd == self._wake:
                os.eventfd_read(self._wake)
                continue
            self._take_notice(link)
            while link.notices.has_more:
                self._take_notice(link)

    def _take_notice(self, link: Link) -> None:
        kind, _, body = link.notices.receive()
        if kind is not Kind.SETTLED:
            raise Malformed(f"a {kind.name} among the notices")
        number, ready, failed = messages.unpack_settled(body)
        with link.lock:
            # A lease that is being asked for is filed before the lock opens.
            lease = link.leases.get(number)
        if lease is not None:
            lease.settle(ready, failed)

    def _renew(self, link: Link) -> None:
        now = time.monotonic()
        leases = link.leases.live()
        limit = link.welcome.lease_s
        due = [lease for lease in leases if not lease.is_settled]
        if now >= self._renew_at:
            self._renew_at = now + limit / 3
            due = [lease for lease in leases if lease.deadline < lease.until]
        last = [lease for lease in due if lease.until - now < limit]
        # Their own end is nearer than a renewal reaches, so each is asked for by itself.
        for lease in last:
            if lease.until > now:
                _renew(link, [lease], lease.until - now)
        others = [lease for lease in due if lease.until - now >= limit]
        if others:
            _renew(link, others, limit)

    def _say_finished(self, link: Link) -> None:
        """Raises Disconnected; what was not heard is said to the next."""
        while self.finished:
            try:
                instance, number = self.finished.popleft()
            except IndexError:
                return  # Another thread says it.
            if instance != link.welcome.instance:
                # Its arena went with its server.
                continue
            try:
                link.ask(Kind.FINISHED, messages.pack_ids([number]))
            except Refused as error:
                log.warning("the server does not believe that a session is over: %s", error)
            except Disconnected:
                self.finished.appendleft((instance, number))
                raise

    def _say_last(self) -> None:
        """There will be no next link of this keeper: say what is still unsaid, on one for that alone where there is none."""
        if not self.finished:
            return
        mine = self.link
        try:
            link = mine if mine is not None and mine.is_usable else self._connect()
        except TransferError as error:
            log.debug("no server to tell of sessions that are over: %s", error)
            return
        try:
            self._say_finished(link)
        except TransferError as error:
            log.debug("the server hung up before it heard which sessions are over: %s", error)
        if link is not mine:
            link.tell(Kind.GOODBYE, b"")
            link.close()

    def _sleep(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if poll.poll(seconds * 1000):
            os.eventfd_read(self._wake)


def _renew(link: Link, leases: Sequence[HostLease], ttl_s: float) -> None:
    now = time.monotonic()
    reply = link.ask(Kind.RENEW, messages.pack_renew(ttl_s, [lease.id for lease in leases]))
    states = messages.unpack_renewed(reply)
    if len(states) != len(leases):
        raise Malformed(f"a renewal of {len(leases)} leases got {len(states)} replies")
    for lease, (ready, failed, held) in zip(leases, states, strict=True):
        if held:
            lease.renewed(now, ttl_s)
            lease.settle(ready, failed)
        else:
            link.leases.take(lease.id)
            lease.end("expired", MissReason.EXPIRED)
