"""One client's connection as the server sees it: a thread, its leases and its reservations.

The thread blocks in `receive` and answers in place: a lookup costs one wake-up on each side and nothing
else. What it holds for the client ends with the connection (R3).
"""

from __future__ import annotations

import functools
import logging
import os
import socket
from array import array
from collections.abc import Callable
from typing import cast

import msgspec

from workmem.core.clock import Clock
from workmem.core.errors import CapacityError, LeaseError
from workmem.core.events import BoundReached, EventSink
from workmem.core.layout import KVLayout, Namespace
from workmem.core.outcomes import MissReason
from workmem.store.catalog import Space
from workmem.store.frames import Frame
from workmem.store.host import messages
from workmem.store.host.channel import Channel, Disconnected
from workmem.store.host.peer import Peer
from workmem.store.host.place import folder_identity
from workmem.store.host.reservations import Reservations
from workmem.store.host.steering import Steered
from workmem.store.host.upkeep import Upkeep
from workmem.store.host.wire import PREFIX, VERSION, ErrorCode, Kind, Malformed, Refused
from workmem.store.lease import PageLease
from workmem.store.store import Store

log = logging.getLogger(__name__)

_SEND_S = 5.0
"""A client that does not read its replies for so long loses its connection."""
_ROOM_WAIT_S = 0.5
"""How long a reservation waits for the disk to free room; below what a client waits for its reply."""
_DEAD_WAIT_S = 0.2
"""A killed process is known dead within moments of its connection's end; else the server's watch finds out."""
_PAGE_BYTES_MAX = 2**32
_NUMBER_MAX = 2**20


class HostLimits(msgspec.Struct, frozen=True):
    """What one server grants, and to how many. The first three are settings, see `HostConfig`."""

    lease_s: float = 30.0
    reservation_s: float = 30.0
    connections: int = 256
    leases: int = 4096
    """Of one connection."""
    reservations: int = 1024
    """Frames of one connection."""
    namespaces: int = 4096
    """Of the store."""


class Hosted(msgspec.Struct, frozen=True):
    """What all sessions of a server share."""

    store: Store
    instance: bytes
    limits: HostLimits
    clock: Clock
    sink: EventSink
    census: Callable[[], dict[str, float]]
    """Sessions, leases and reservations of the server, by gauge."""
    finish: Callable[[Peer, int], None]
    """A process says that it is done with the session of this number. Raises Refused where it is not its own."""


class Session:
    """Serves one connection until it ends. `run` is the thread's body; the rest is for the server."""

    def __init__(self, hosted: Hosted, connection: socket.socket, peer: Peer) -> None:
        self.peer = peer
        self.number = int.from_bytes(os.urandom(8), "little")
        """Random, so that one of an earlier server, or a mistake, is nobody's."""
        self.is_finished = False
        """Its client has said that it writes no page of it any more: nothing needs to be stranded."""
        self.reservations = Reservations(
            hosted.store.pool,
            hosted.clock,
            hosted.sink,
            ttl_s=hosted.limits.reservation_s,
            limit=hosted.limits.reservations,
        )
        self.was_malformed = False
        self._hosted = hosted
        self._store = hosted.store
        self._spaces = hosted.store.pool.state.spaces
        self._channel = Channel(connection, send_s=_SEND_S, receive_s=0)
        self._notices: socket.socket | None = None
        self._leases: dict[int, PageLease] = {}
        self._next = 1
        self._answers: dict[Kind, Callable[[memoryview], bytes | None]] = {
            Kind.REGISTER: self._register,
            Kind.LOOKUP: self._lookup,
            Kind.LEASE: self._lease,
            Kind.RENEW: self._renew,
            Kind.RELEASE: self._release,
            Kind.QUARANTINE: self._quarantine,
            Kind.RESERVE: self._reserve,
            Kind.COMMIT: self._commit,
            Kind.ABORT: self._abort,
            Kind.FINISHED: self._finished,
            **Upkeep(hosted.store, hosted.census).answers,
            **Steered(hosted.store, self._space).answers,
        }

    @property
    def lease_count(self) -> int:
        """Leases the client has not given back, expired ones included."""
        return len(self._leases)

    def run(self) -> None:
        """Answer until the client leaves, sends nonsense or dies; then give back what it held."""
        try:
            self._greet()
            self._serve()
        except Disconnected:
            log.debug("process %d left without a goodbye", self.peer.pid)
        except Malformed as error:
            self.was_malformed = True
            log.warning("the connection of process %d is closed: it sent %s", self.peer.pid, error)
        finally:
            self._end()

    def hang_up(self) -> None:
        """End the connection from another thread; `run` returns."""
        self._channel.shut()

    def _serve(self) -> None:
        receive, send, answers = self._channel.receive, self._channel.send, self._answers
        while True:
            kind, tag, body = receive()
            answer = answers.get(kind)
            if answer is None:
                if kind is Kind.GOODBYE:
                    self.is_finished = True
                    return
                raise Malformed(f"a {kind.name} where a request belongs")
            try:
                reply = answer(body)
            except Refused as error:
                send(Kind.ERROR, tag, messages.pack_error(error.code, str(error)))
                continue
            if reply is not None:
                send(kind, tag, reply)

    def _greet(self) -> None:
        kind, tag, body = self._channel.receive()
        if kind is not Kind.HELLO:
            raise Malformed(f"a {kind.name} where a hello belongs")
        version, _ = messages.unpack_hello(body)
        if version != VERSION:
            text = f"this server speaks version {VERSION}, not {version}: run the same workmem on both ends"
            self._channel.send(Kind.ERROR, tag, messages.pack_error(ErrorCode.VERSION, text))
            raise Disconnected(text)
        limits = self._hosted.limits
        welcome = messages.pack_welcome(
            messages.Welcome(
                os.getpid(),
                self._hosted.instance,
                self.number,
                self._store.arena.capacity_bytes,
                limits.lease_s,
                limits.reservation_s,
                folder_identity(self._store.folder),
            )
        )
        self._notices, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(
                    self._channel.socket,
                    [PREFIX.pack(len(welcome), Kind.HELLO, tag) + welcome],
                    [self._store.arena.fd, theirs.fileno()],
                )
            except OSError as error:
                raise Disconnected(f"cannot send: {error}") from error

    def _end(self) -> None:
        # First: who reads in place looks at the connection afterwards, and not at every page (see Link.has_hung_up).
        self._channel.shut()
        for lease in self._leases.values():
            lease.release()
        self._leases.clear()
        if self.reservations.count:
            if self.is_finished or self.peer.is_dead(_DEAD_WAIT_S):
                self.reservations.free_all()
            else:
                self.reservations.strand_all()
        if self._notices is not None:
            self._notices.close()
        self._channel.close()

    def _space(self, root: bytes) -> Space:
        space = self._spaces.get(root)
        if space is None:
            raise Refused(f"root {root.hex()[:16]} is not registered here", ErrorCode.UNREGISTERED)
        return space

    def _register(self, body: memoryview) -> bytes:
        try:
            namespace = msgspec.json.decode(body, type=Namespace)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Malformed(f"a namespace that is none: {error}") from error
        _check(namespace.layout)
        limit = self._hosted.limits.namespaces
        if (
            namespace.root() not in self._spaces
            and len(self._spaces) >= limit
            and not self._store.forget_empty()
        ):
            self._bound("store.host.namespaces", limit, "more are registered, and hold pages")
        root = self._store.register(namespace)
        return messages.pack_registered(root, self._store.dram_capacity_bytes())

    def _lookup(self, body: memoryview) -> bytes:
        root, keys = messages.unpack_lookup(body)
        self._space(root)
        found = self._store.lookup(root, keys)
        return messages.pack_found(found.reason, found.tiers)

    def _lease(self, body: memoryview) -> bytes:
        root, ttl_s, owner, keys = messages.unpack_lease(body)
        if root not in self._spaces:
            self._space(root)
        limits = self._hosted.limits
        if len(self._leases) >= limits.leases:
            self._leases = {number: lease for number, lease in self._leases.items() if not lease.ended}
            if len(self._leases) >= limits.leases:
                self._bound("store.host.leases", limits.leases, f"one for {owner!r} more")
        ttl_s = min(ttl_s, limits.lease_s)
        try:
            lease = self._store.lease(root, keys, owner=owner, ttl_s=ttl_s)
        except CapacityError as error:
            raise Refused(str(error), ErrorCode.CAPACITY) from error
        number = self._next
        self._next += 1
        self._leases[number] = lease
        # Read once and before the rest: a page that arrives meanwhile is told by the notice.
        ready, failed = lease.ready, lease.failed
        if failed is None and ready < len(keys):
            lease.on_settled(functools.partial(self._tell_settled, number, lease))
        frames = cast("list[Frame]", lease.frames)
        offsets = array("Q", [frame.offset for frame in frames])
        generations = array("Q", [frame.generation for frame in frames])
        return messages.pack_leased(number, ttl_s, ready, failed, offsets, generations)

    def _tell_settled(self, number: int, lease: PageLease) -> None:
        """On a store thread: must not wait. A notice that finds no room is made up for by a renewal."""
        notices = self._notices
        if notices is None:
            return
        body = messages.pack_settled(number, lease.ready, lease.failed)
        try:
            notices.send(PREFIX.pack(len(body), Kind.SETTLED, 0) + body, socket.MSG_DONTWAIT)
        except OSError as error:
            log.debug("process %d is not told of a settled lease: %s", self.peer.pid, error)

    def _renew(self, body: memoryview) -> bytes:
        ttl_s, ids = messages.unpack_renew(body)
        ttl_s = min(ttl_s, self._hosted.limits.lease_s)
        states: list[tuple[int, MissReason | None, bool]] = []
        for number in ids:
            lease = self._leases.get(number)
            held = lease is not None
            if lease is not None:
                try:
                    lease.renew(ttl_s)
                except LeaseError:
                    held = False
            states.append((lease.ready, lease.failed, held) if lease else (0, MissReason.EXPIRED, held))
        return messages.pack_renewed(states)

    def _release(self, body: memoryview) -> None:
        for number in messages.unpack_ids(body):
            lease = self._leases.pop(number, None)
            if lease is not None:
                lease.release()

    def _quarantine(self, body: memoryview) -> None:
        number, index = messages.unpack_quarantine(body)
        lease = self._leases.get(number)
        if lease is None:
            return
        try:
            lease.quarantine(index)
        except LeaseError as error:
            # It expired meanwhile: what the client read may have been another page, so it proves nothing.
            log.debug("process %d found a page corrupt that it no longer held: %s", self.peer.pid, error)

    def _reserve(self, body: memoryview) -> bytes:
        space = self._space(messages.root_of(body))
        blocks, workflow = messages.unpack_reserve(body, space.layout.block_tokens)
        first, states, offsets = self.reservations.reserve(space, blocks, _ROOM_WAIT_S, workflow)
        return messages.pack_reserved(first, self._hosted.limits.reservation_s, states, offsets)

    def _commit(self, body: memoryview) -> bytes:
        return messages.pack_states(
            [self.reservations.commit(number) for number in messages.unpack_ids(body)]
        )

    def _abort(self, body: memoryview) -> None:
        for number in messages.unpack_ids(body):
            self.reservations.abort(number)

    def _finished(self, body: memoryview) -> bytes:
        for number in messages.unpack_ids(body):
            self._hosted.finish(self.peer, number)
        return b""

    def _bound(self, name: str, limit: int, detail: str) -> None:
        self._hosted.sink(BoundReached(name=name, limit=limit, detail=f"process {self.peer.pid}: {detail}"))
        raise Refused(f"{name}: the limit of {limit} is reached", ErrorCode.BOUND)


def _check(layout: KVLayout) -> None:
    sizes = (layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens)
    # Its type is one of `DType`: another one is no namespace.
    if not all(0 < size <= _NUMBER_MAX for size in sizes) or layout.page_bytes > _PAGE_BYTES_MAX:
        raise Malformed(f"a layout with a size out of range: {layout}")
