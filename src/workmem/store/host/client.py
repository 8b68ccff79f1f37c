"""The store as an engine process sees it when the host's processes share one, see `store.contract.KVStore`.

Lookups and leases are one round trip on a Unix socket each, pages are read and written in place in the
server's arena. Without a server everything is a miss and nothing is saved; the client comes back by itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from workmem.core.errors import CapacityError, ClientError, InvariantError, TransferError
from workmem.core.events import EventSink, TierStateChanged, discard
from workmem.core.keys import BlockKey
from workmem.core.layout import Namespace
from workmem.core.outcomes import Lookup, MissReason, TierName
from workmem.store.catalog import Space
from workmem.store.contract import PageWrite
from workmem.store.host import messages, upkeep_messages
from workmem.store.host.channel import Disconnected
from workmem.store.host.keeper import Keeper
from workmem.store.host.lease import HostLease
from workmem.store.host.link import Link
from workmem.store.host.place import folder_identity
from workmem.store.host.saver import HostSaver
from workmem.store.host.steering import Head, pack_said
from workmem.store.host.steering_client import RemoteSteering
from workmem.store.host.wire import KEYS_MAX, ErrorCode, Kind, Refused
from workmem.store.selector import Purged, PurgeSelector

CLOSE_S = 10.0
"""Longest that `close` waits for pages that are being copied."""
PURGE_S = 600.0
"""Longest that a purge is waited for: a million blocks take some seconds."""
SCRUB_CALL_S = 60.0
"""Longest that a slice of a scrub is waited for: a page may be on a disk that retries."""
SPACES_MAX = 1 << 14
"""Namespaces that a client remembers, those registered last: tenants and epochs come and go."""
DECLARED_MAX = 1024
"""Of those, how many a server is told at once that was started anew; it hears of the others as they are used."""
_FLUSH_PAUSE_S = 0.02


class HostStore(RemoteSteering):
    """`KVStore` over the server at `path`. A context manager; `close` ends its threads.

    With `attaches` the first connection is made here, and TransferError raised when there is none, or where
    `of_folder` is given and the store that is served has another folder on disk. A
    process that was forked from this one gets misses only: it opens its own.
    """

    def __init__(
        self,
        path: Path,
        sink: EventSink = discard,
        *,
        call_s: float = 1.0,
        save_queue_pages: int = 8192,
        attaches: bool = True,
        of_folder: Path | None = None,
    ) -> None:
        self._path = path
        self._call_s = call_s
        self._sink = sink
        self._spaces: OrderedDict[bytes, Space] = OrderedDict()
        """Registered longest ago first."""
        self._spaces_lock = threading.Lock()
        self._capacity_bytes = 0
        self._closed = False
        self._pid = os.getpid()
        first = self._reading_link() if attaches else None
        if first is not None and of_folder is not None and not _is_of(first, of_folder):
            first.close()
            raise TransferError(f"the store served at {path} has another folder than {of_folder}")
        # Before the keeper, whose thread may have something to tell it at once.
        self._saver = HostSaver(self._writing_link, self._is_out_of, sink, save_queue_pages)
        self._keeper = Keeper(self._reading_link, first, self._heard)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_attached(self) -> bool:
        """Whether a server answers."""
        return self._usable_link() is not None

    def register(self, namespace: Namespace) -> bytes:
        """See `KVStore.register`. Declared to the server now, and to each that follows it."""
        root = namespace.root()
        with self._spaces_lock:
            self._spaces.setdefault(root, Space(namespace, 0))
            self._spaces.move_to_end(root)
            if len(self._spaces) > SPACES_MAX:
                self._spaces.popitem(last=False)
        link = self._usable_link()
        if link is not None:
            try:
                link.register(namespace)
                self._capacity_bytes = link.capacity_bytes
            except Refused as error:
                if error.code is not ErrorCode.BOUND:
                    raise
            except TransferError:
                self._keeper.nudge()
        return root

    def lookup(self, root: bytes, keys: Sequence[BlockKey]) -> Lookup:
        """See `KVStore.lookup`. One round trip; a miss for `unavailable` without a server."""
        self._space(root)
        if self._closed:
            return Lookup((), MissReason.DISABLED if keys else None)
        if not keys:
            return Lookup()
        link = self._usable_link()
        tiers: tuple[TierName, ...] = ()
        declared = False
        while link is not None:
            part = keys[len(tiers) : len(tiers) + KEYS_MAX]
            try:
                body = root + messages.pack_keys(part)
                with link.lock:
                    found, reason = messages.unpack_found(link.ask_locked(Kind.LOOKUP, body))
            except TransferError as error:
                if self._failed(root, error) and not declared:
                    declared = True
                    continue
                break
            tiers += found
            if len(found) < len(part) or len(tiers) == len(keys):
                return Lookup(tiers, reason)
        return Lookup((), MissReason.UNAVAILABLE)

    def lease(self, root: bytes, keys: Sequence[BlockKey], *, owner: str, ttl_s: float) -> HostLease:
        """See `KVStore.lease`. One round trip; nothing arrives, for `unavailable`, without a server."""
        if self._closed:
            raise InvariantError("lease on a closed store")
        link = self._usable_link()
        lease = HostLease(self._space(root), tuple(keys), owner, link)
        if link is None or not keys:
            lease.failed = MissReason.UNAVAILABLE if keys else None
            return lease
        if len(keys) > KEYS_MAX:
            raise CapacityError(f"a lease of {len(keys)} pages; at most {KEYS_MAX} are held at a time")
        now = time.monotonic()
        body = messages.pack_lease(root, min(ttl_s, link.welcome.lease_s), owner, keys)
        try:
            with link.lock:
                leased = messages.unpack_leased(link.ask_locked(Kind.LEASE, body))
                lease.grant(leased, now, now + ttl_s)
                link.leases.add(lease)
        except Refused as error:
            if error.code in (ErrorCode.CAPACITY, ErrorCode.BOUND):
                raise CapacityError(str(error)) from error
            self._failed(root, error)
            lease.failed = MissReason.UNAVAILABLE
        except TransferError as error:
            self._failed(root, error)
            lease.failed = MissReason.UNAVAILABLE
        return lease

    def save(self, root: bytes, pages: Sequence[PageWrite]) -> None:
        """See `KVStore.save`. Raises InvariantError on a block that does not fit the namespace."""
        space = self._space(root)
        for page in pages:
            space.check(page.block)
        self._saver.put(space, pages)

    def say(self, kind: Kind, head: Head, keys: Sequence[BlockKey] = (), *, root: bytes = b"") -> memoryview:
        """See `RemoteSteering.say`."""
        if root:
            self._space(root)
        if len(keys) > KEYS_MAX:
            raise ClientError(f"{len(keys)} blocks in one call; at most {KEYS_MAX} are told of", param="keys")
        link = self._usable_link()
        if link is None:
            raise TransferError(f"no server at {self._path}")
        try:
            return link.ask(kind, pack_said(head, keys))
        except Refused as error:
            if error.code is ErrorCode.CLIENT:
                raise ClientError(str(error)) from error
            self._failed(root, error)
            raise
        except TransferError:
            self._keeper.nudge()
            raise

    def dram_capacity_bytes(self) -> int:
        """See `KVStore.dram_capacity_bytes`. As the server last said."""
        return self._capacity_bytes

    def flush(self, timeout_s: float) -> bool:
        """See `KVStore.flush`. Waits for the saves of all clients; False as well when the server goes away."""
        until = time.monotonic() + timeout_s
        if not self._saver.drain(timeout_s):
            return False
        try:
            with self._apart(self._call_s) as link:
                while not link.ask(Kind.FLUSH, messages.pack_seconds(max(0.0, until - time.monotonic())))[0]:
                    if time.monotonic() >= until:
                        return False
                    time.sleep(_FLUSH_PAUSE_S)
        except TransferError:
            return False
        return True

    def purge(self, chosen: PurgeSelector) -> Purged:
        """See `KVStore.purge`. Blocks while blocks are taken out. Raises TransferError without a server."""
        with self._apart(PURGE_S) as link:
            return upkeep_messages.unpack_purged(
                link.ask(Kind.PURGE, upkeep_messages.pack_purge(chosen, is_rehearsal=False))
            )

    def survey(self, chosen: PurgeSelector) -> Purged:
        """What `purge` would take out now. Raises TransferError without a server."""
        with self._apart(PURGE_S) as link:
            return upkeep_messages.unpack_purged(
                link.ask(Kind.PURGE, upkeep_messages.pack_purge(chosen, is_rehearsal=True))
            )

    def scrub(self, bytes_per_s: int) -> Generator[upkeep_messages.Scrubbed]:
        """Have the server read and check every page on its ssd, at most so fast; yields how far it is.

        Damaged pages leave service. It ends early where the generator is closed. Raises TransferError without
        a server or an ssd tier.
        """
        with self._apart(SCRUB_CALL_S) as link:
            while True:
                done = upkeep_messages.unpack_scrubbed(
                    link.ask(Kind.SCRUB, upkeep_messages.pack_scrub(bytes_per_s))
                )
                yield done
                if done.has_ended:
                    return

    def gauges(self) -> dict[str, float]:
        """See `KVStore.gauges`. The server's readings, and this client's."""
        readings: dict[str, Any] = {}
        link = self._usable_link()
        if link is not None:
            try:
                readings = msgspec.json.decode(link.ask(Kind.GAUGES), type=dict[str, float])
            except TransferError:
                self._keeper.nudge()
        return readings | {
            "store_save_queue_pages": self._saver.depth,
            "store_client_attached": float(self.is_attached),
            "store_client_reconnects_total": self._keeper.reconnects,
            "store_client_saves_dropped_total": self._saver.counts["saves_refused"],
        }

    def audit(self) -> None:
        """Have the server recount. Raises InvariantError with what does not add up, TransferError without a server."""
        link = self._usable_link()
        if link is None:
            raise TransferError(f"no server at {self._path}")
        problem = bytes(link.ask(Kind.AUDIT)).decode()
        if problem:
            raise InvariantError(problem)

    def close(self) -> None:
        """See `KVStore.close`. Pages still queued get a bounded time; the server and its pages stay."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            # The threads are the parent's.
            return
        self._saver.drain(CLOSE_S)
        self._saver.close(CLOSE_S)
        self._keeper.close(CLOSE_S)

    def _space(self, root: bytes) -> Space:
        try:
            return self._spaces[root]
        except KeyError:
            raise InvariantError(f"root {root.hex()[:16]} is not registered with this store") from None

    def _failed(self, root: bytes, error: TransferError) -> bool:
        """Whether it is worth a second try."""
        if isinstance(error, Refused) and error.code is ErrorCode.UNREGISTERED:
            # It is another server than the one that knew it, or has forgotten what held nothing.
            self.register(self._space(root).namespace)
            return True
        self._keeper.nudge()
        return False

    def _usable_link(self) -> Link | None:
        link = self._keeper.link
        return link if link is not None and link.is_usable else None

    def _reading_link(self) -> Link:
        link = self._open_link(writes=False)
        self._capacity_bytes = link.capacity_bytes
        return link

    def _writing_link(self) -> Link:
        if not self.is_attached:
            # The keeper tries, at its pace; a page for which nobody is there is dropped at once.
            raise Disconnected(f"no server at {self._path}")
        return self._open_link(writes=True)

    def _is_out_of(self, link: Link) -> None:
        self._keeper.finish(link)

    @contextmanager
    def _apart(self, call_s: float) -> Generator[Link]:
        """A connection of its own, for what takes its time: lookups must not wait behind it."""
        link = Link(self._path, [], call_s=call_s, writes=False)
        try:
            yield link
        finally:
            link.tell(Kind.GOODBYE, b"")
            link.close()

    def _open_link(self, *, writes: bool) -> Link:
        with self._spaces_lock:
            last = islice(reversed(self._spaces.values()), DECLARED_MAX)
            namespaces = [space.namespace for space in last]
        return Link(self._path, namespaces, call_s=self._call_s, writes=writes)

    def _heard(self, why: str) -> None:
        if why:
            self._saver.let_go()
        state, reason = ("error", why) if why else ("ok", "attached again")
        self._sink(TierStateChanged(tier=TierName.DRAM, state=state, reason=f"{self._path}: {reason}"))


def _is_of(link: Link, folder: Path) -> bool:
    """Whether the store behind `link` keeps its pages in `folder`. One without any is of no folder, nor of one to come."""
    mine = folder_identity(folder)
    return any(mine) and link.welcome.folder == mine
