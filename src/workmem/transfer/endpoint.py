"""One process's end of transfers: its memory, its windows, and its peers. See `contract` for what is promised."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from workmem.core.errors import TransferError
from workmem.transfer.batches import Batches
from workmem.transfer.contract import Access, Memory, Mover, Outcome, Part, check_memory
from workmem.transfer.keeping import Keeping
from workmem.transfer.meeting import Meeting, Wrap
from workmem.transfer.messages import (
    NOTICE_BYTES_MAX,
    Answer,
    Arrived,
    Finished,
    Goodbye,
    Notify,
    Open,
    Opened,
    Reply,
    Revoke,
    Summing,
    Ticket,
    unpack_ticket,
)
from workmem.transfer.moving import Moving
from workmem.transfer.owning import Owned
from workmem.transfer.peer import Peer, Told
from workmem.transfer.region import Region, RemoteWindow
from workmem.transfer.window import Window

log = logging.getLogger(__name__)
_GREET_S = 2.0
_PEERS_MAX = 256
_NOTICES_MAX = 1024
_QUARANTINE_BYTES_MAX = 2**30


class Notice(NamedTuple):
    """Words of a peer. `Endpoint.notify` answers it."""

    peer: Peer
    body: bytes


class Endpoint:
    """Any thread may use it. `close` ends it; what others were given of it is refused from there on."""

    def __init__(
        self,
        mover: Mover,
        *,
        host: str = "",
        quarantine_bytes_max: int = _QUARANTINE_BYTES_MAX,
        wrap: Wrap = lambda channel: channel,
    ) -> None:
        """Takes `mover` over. Listens for words at `host`, on a port of the kernel's choice; empty is this host alone."""
        self._mover = mover
        instance = secrets.token_bytes(16)
        self._meeting = Meeting(instance, mover.name, host, wrap)
        self.address = self._meeting.address
        """Where others reach it."""
        self._owned = Owned(mover, instance, self.address, quarantine_bytes_max, self._nudge)
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._regions: set[Region] = set()
        self._peers: set[Peer] = set()
        self._dialed: dict[str, Peer] = {}
        self._threads = 0
        self._reached: dict[tuple[bytes, int, Access], object] = {}
        self._notices: queue.Queue[Notice] = queue.Queue(_NOTICES_MAX)
        self._closed = False
        self._keeping = Keeping(self._meeting.listener, self._let_in, self._owned.look)
        self._batches = Batches(mover, self._keeping)

    # -- one's own memory

    def register(self, memory: Memory) -> Region:
        """Raises TransferError where the memory is not plain bytes, or the mover cannot take it."""
        check_memory(memory)
        region = Region(next(self._numbers), memory, self._mover.register(memory))
        with self._lock:
            self._regions.add(region)
        return region

    def unregister(self, region: Region) -> Outcome:
        """DONE; REFUSED while a window or a batch is in it; NOT_REGISTERED the second time."""
        outcome = region.retire()
        if outcome is Outcome.DONE:
            with self._lock:
                self._regions.discard(region)
            self._mover.unregister(region.memory)
        return outcome

    def grant(
        self,
        region: Region,
        offset: int,
        size: int,
        access: Access,
        *,
        freed: Callable[[], None] | None = None,
    ) -> Window:
        """A window for one peer. `freed` is called once, from some thread, when the memory is one's own again.

        Raises TransferError where it does not lie in the region, CapacityError where too much is quarantined.
        """
        return self._owned.grant(region, offset, size, access, freed)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of one's own memory that a silent peer may still write to."""
        return self._owned.quarantined_bytes

    # -- memory of others

    def open(self, ticket: bytes, within_s: float) -> RemoteWindow | Outcome:
        """The window of a ticket. Raises TransferError where `ticket` is none, or of another kind of transfer."""
        until = time.monotonic() + within_s
        asked = unpack_ticket(ticket)
        peer = self._connect(asked.address, within_s, asked.instance)
        if isinstance(peer, Outcome):
            return peer

        def use(reply: Reply, fd: int) -> RemoteWindow | Outcome:
            if isinstance(reply, Answer):
                return reply.outcomes[0] if reply.outcomes else Outcome.FAILED
            try:
                return self._batches.opened(peer, asked, reply, self._reach(asked, reply, fd))
            except TransferError:
                log.exception("a window cannot be reached")
                peer.tell(Finished(asked.window))
                return Outcome.FAILED

        found = peer.ask_and_wait(
            lambda tag: Open(tag, asked.window, asked.secret), use, until - time.monotonic()
        )
        if found is Outcome.TIMED_OUT:
            # It may be opened for us yet, and nobody else would say that it is over.
            peer.tell(Finished(asked.window))
        return found

    def write(self, window: RemoteWindow, region: Region, parts: Sequence[Part], within_s: float) -> Moving:
        """Begin to write `parts` of `region` into `window`, as one batch. Batches of one peer go in order."""
        return self._batches.move(Access.WRITE, region, window, parts, within_s)

    def read(self, window: RemoteWindow, region: Region, parts: Sequence[Part], within_s: float) -> Moving:
        """Begin to read `parts` of `window` into `region`, as one batch."""
        return self._batches.move(Access.READ, region, window, parts, within_s)

    def finish(self, window: RemoteWindow) -> None:
        """It is needed no more: what is queued is refused, and its owner has it back when nothing is under way."""
        window.finish()

    # -- words

    def connect(self, address: str, within_s: float) -> Peer | Outcome:
        """The endpoint that listens there."""
        return self._connect(address, within_s, None)

    def notify(self, peer: Peer, body: bytes, within_s: float) -> Outcome:
        """Have `body`, up to 64 KiB, arrive among the notices of `peer`."""
        if len(body) > NOTICE_BYTES_MAX:
            return Outcome.REFUSED
        return peer.notify(body, within_s)

    def notice(self, within_s: float) -> Notice | None:
        """The next one, or None."""
        try:
            return self._notices.get(timeout=within_s)
        except queue.Empty:
            return None

    def close(self, within_s: float) -> bool:
        """Close windows, end batches, unregister regions.

        False where that cannot be within the time: a peer may still write to memory of this process, or this process
        to memory of a peer, which keeps it quarantined until the process ends.
        """
        until = time.monotonic() + within_s
        with self._lock:
            self._closed = True
            peers = list(self._peers)
        is_free = self._owned.close(until)
        is_over = self._batches.close(until - time.monotonic())
        self._keeping.close()
        self._meeting.close()
        for peer in peers:
            if is_over:
                peer.tell(Goodbye())
            peer.shut()
        for peer in peers:
            is_over = peer.wait_gone(until - time.monotonic()) and is_over
        with self._lock:
            regions = list(self._regions)
        if is_over:
            left = [region for region in regions if self.unregister(region) is not Outcome.DONE]
            if not left:
                self._mover.close()
        return is_over and is_free

    # -- threads

    def _nudge(self) -> None:
        self._keeping.nudge()

    def _let_in(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed or self._threads >= _PEERS_MAX:
                connection.close()
                return
            self._threads += 1
        thread = threading.Thread(
            target=self._greet, args=(connection,), name="workmem-transfer-peer", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            log.warning("no thread is to be had for a peer that connects")
            connection.close()
            with self._lock:
                self._threads -= 1

    def _greet(self, connection: socket.socket) -> None:
        try:
            self._hear(self._meeting.greet(connection, _GREET_S))
        except (TransferError, OSError):
            return  # A stranger, or one that died at the door.
        finally:
            with self._lock:
                self._threads -= 1

    def _hear(self, peer: Peer) -> None:
        with self._lock:
            if self._closed:
                peer.shut()
            self._peers.add(peer)
        try:
            peer.hear(self._told)
        finally:
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            self._peers.discard(peer)
            for address in [address for address, found in self._dialed.items() if found is peer]:
                del self._dialed[address]
            for key in [key for key in self._reached if key[0] == peer.instance]:
                del self._reached[key]
        self._batches.forget(peer)
        self._keeping.nudge()

    def _told(self, peer: Peer, message: Told) -> None:
        match message:
            case Open():
                self._owned.open(peer, message)
            case Arrived():
                self._owned.check(peer, message)
            case Summing():
                self._owned.sum(peer, message)
            case Finished():
                self._owned.finish(peer, message)
            case Revoke():
                self._batches.revoke(peer, message)
            case Notify():
                peer.tell(Answer(message.tag, [self._file(peer, message)], []))

    def _file(self, peer: Peer, message: Notify) -> Outcome:
        if not peer.is_new(message):
            return Outcome.REFUSED
        try:
            self._notices.put_nowait(Notice(peer, message.body))
        except queue.Full:
            return Outcome.REFUSED
        return Outcome.DONE

    def _connect(self, address: str, within_s: float, instance: bytes | None) -> Peer | Outcome:
        with self._lock:
            peer = self._dialed.get(address)
            if self._closed:
                return Outcome.REFUSED
        if peer is None or peer.is_gone:
            until = time.monotonic() + within_s
            try:
                peer = self._meeting.dial(address, max(0.001, within_s))
            except (TransferError, OSError) as error:
                log.debug("%s does not greet: %s", address, error)
                return Outcome.TIMED_OUT if time.monotonic() >= until else Outcome.PEER_GONE
            with self._lock:
                self._dialed[address] = peer
            threading.Thread(
                target=self._hear, args=(peer,), name="workmem-transfer-peer", daemon=True
            ).start()
        return peer if instance is None or peer.instance == instance else Outcome.PEER_GONE

    def _reach(self, asked: Ticket, found: Opened, fd: int) -> object:
        """The region of a window: reached once, however many windows it has."""
        key = (asked.instance, found.region_id, asked.access)
        with self._lock:
            target = self._reached.get(key)
            if target is not None:
                if fd >= 0:
                    os.close(fd)
                return target
            self._reached[key] = target = self._mover.reach(found.region, fd, asked.access)
            return target
