"""The thread that keeps a client attached: renews leases, hears of arrivals, reconnects."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from workmem.core.errors import TransferError
from workmem.core.outcomes import MissReason
from workmem.store.host import messages
from workmem.store.host.channel import Disconnected
from workmem.store.host.lease import HostLease
from workmem.store.host.link import Link
from workmem.store.host.wire import Kind, Malformed

log = logging.getLogger(__name__)

_TICK_S = 1.0
"""An arrival whose notice was lost is heard of within this time."""
_RETRY_S_MIN = 0.05
_RETRY_S_MAX = 2.0
"""Bounds of the pause between two tries to connect; it doubles with each that fails."""


class Keeper:
    """Owns the link of a client: `link` is the one in use, None while there is no server."""

    def __init__(self, connect: Callable[[], Link], link: Link | None, heard: Callable[[str], None]) -> None:
        """`connect` makes a link or raises TransferError; `heard` is told why a link was lost, "" when one is back."""
        self.link = link
        self.reconnects = 0
        self._connect = connect
        self._heard = heard
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pause_s = _RETRY_S_MIN
        self._renew_at = 0.0
        self._thread = threading.Thread(target=self._main, name="workmem-host-keep", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Look at the link now: a caller found it lost."""
        os.eventfd_write(self._wake, 1)

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
        os.close(self._wake)
        return True

    def _main(self) -> None:
        while not self._closing:
            try:
                self._step()
            except Exception:  # thread main: without it no lease would be renewed and nothing reconnected
                log.exception("the keeper of a store's client met a bug of ours")
                time.sleep(_RETRY_S_MIN)

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
