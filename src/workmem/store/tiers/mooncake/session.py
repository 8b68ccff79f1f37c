"""A tier from `open` to `close`: its client, its threads, and what it tells the others and hears of them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from workmem.store.codecs.pool_sealing import PoolCipher
from workmem.store.tiers.contract import PUT_S, ArenaMemory, HeldPage, Outcome, PageName, PageOut
from workmem.store.tiers.mooncake.answers import Answers
from workmem.store.tiers.mooncake.caring import Caring
from workmem.store.tiers.mooncake.closing_up import ClosingUp
from workmem.store.tiers.mooncake.getting import Getting
from workmem.store.tiers.mooncake.lanes import Job, Lanes
from workmem.store.tiers.mooncake.ledger import Entry, Follower, Log, entry_of, objects_in
from workmem.store.tiers.mooncake.link import Link, MasterAwayError
from workmem.store.tiers.mooncake.links import borrow, give_back
from workmem.store.tiers.mooncake.objects import PoolObject, names_of, prefix
from workmem.store.tiers.mooncake.options import MooncakeOptions, capacity_bytes, object_bytes, segment_bytes
from workmem.store.tiers.mooncake.peers import Peers
from workmem.store.tiers.mooncake.putting import ANYWHERE, Putting
from workmem.store.tiers.mooncake.sealed_link import SealedLink
from workmem.store.tiers.mooncake.shelf import Shelf
from workmem.transfer.mooncake_library import TIMEOUT_S

log = logging.getLogger(__name__)

FULL = 0.75
"""Share of the pool that objects may take, bytes of dropped pages in them included."""
READERS = 4
READERS_OF_A_PEER = 2
WRITERS = 1
QUEUE_MAX = 4096
ABANDON_S = 20.0
"""Longer than a put is tried, and below what the store gives it: after that it would take the pool for broken."""
_PATIENCE_S = TIMEOUT_S + 1.0
_AWAY_PAUSE_S = 2.0
_LAST_WORD_S = 1.0
SOON_S = 0.01
"""Pause between looks at what others put while somebody waits for it: a look is one round trip to the master, or two."""


class Session:
    """Made by `MooncakeTier.open`. Raises OSError where there is no pool."""

    def __init__(
        self,
        options: MooncakeOptions,
        arena: ArenaMemory,
        shelf: Shelf,
        peers: Peers,
        counts: Counter[str],
        cipher: PoolCipher | None = None,
    ) -> None:
        self._options = options
        self._arena = arena
        self._shelf = shelf
        self._peers = peers
        self._counts = counts
        self._link = _registered(options, arena, cipher)
        limit_bytes = int(capacity_bytes(options) * FULL)
        try:
            self._closing_up = ClosingUp(
                self._link, shelf, peers, options.pool, object_bytes(options), limit_bytes
            )
        except BaseException:
            # Nobody closes what was never made: the arena would stay known to the pool.
            self._link.unregister(arena.address)
            give_back(options)
            raise
        self._follower = Follower(self._link, options.pool)
        self._log = Log(self._link, options.pool, self._follower.finished, shelf.objects)
        self.lost: Callable[[Sequence[PageName]], None] | None = None
        """To be told of pages that others dropped."""
        self._reads = Lanes(
            "read", threads=READERS, lane_max=READERS_OF_A_PEER, queue_max=QUEUE_MAX, patience_s=_PATIENCE_S
        )
        self._writes = Lanes("write", threads=WRITERS, lane_max=1, queue_max=QUEUE_MAX, patience_s=PUT_S)
        self._putting = Putting(self._link, arena, shelf, peers, counts, options.pool, object_bytes(options))
        self.caring = Caring(
            self._link, shelf, counts, capacity_bytes(options), segment_bytes(options), self._lose
        )
        self.getting = Getting(self._link, arena, shelf, peers, counts, self._reads, self._lose)
        self._ending = threading.Event()
        self._stir = threading.Event()
        """Ends the listener's pause."""
        self._soon_until = 0.0
        self._listener: threading.Thread | None = None
        self._is_away = False
        self._has_said_farewell = False

    # -- pages

    def put(self, pages: Sequence[PageOut], answers: Answers) -> None:
        """See `Tier.put`."""
        need = sum(page.about.length for page in pages)
        if not self._peers.may_ask(ANYWHERE):
            answers.rest(Outcome.REFUSED)
            return

        # From now on: also who waits in the lane has only so long, and its pages may be others after that.
        late = threading.Timer(ABANDON_S, self._abandon, (answers,))
        late.daemon = True
        late.start()

        def run() -> None:
            try:
                if not answers.is_over:
                    self._closing_up.run(need, lambda kept, gone: self._tell(entry_of(kept, gone)))
                self._putting.put(pages, answers, self._tell_kept)
            finally:
                late.cancel()

        # Who waits behind a call that does not end: not now. A master that is away is told by the calls themselves.
        self._write(run, answers, given_up=Outcome.REFUSED)

    def _abandon(self, answers: Answers) -> None:
        """A host that lost its power holds a call for a minute. The pages stay where they are, and reads go on."""
        if not answers.is_over and self._peers.failed(ANYWHERE):
            log.warning("a host of the pool takes nothing and says nothing; nothing is put for a while")
        answers.rest(Outcome.REFUSED)

    def drop(self, names: Sequence[PageName], answers: Answers) -> None:
        """See `Tier.drop`."""
        # Given up it has failed: what is to go must not be taken for gone.
        self._write(lambda: self._drop(names, answers), answers, given_up=Outcome.FAILED)

    def _write(self, run: Callable[[], None], answers: Answers, *, given_up: Outcome) -> None:
        def guarded() -> None:
            try:
                run()
            except MasterAwayError as error:
                log.warning("%s", error)
            answers.rest(Outcome.FAILED)

        self._writes.submit(Job("write", guarded, lambda: answers.rest(given_up)))

    def _tell_kept(self, kept: Sequence[PoolObject]) -> None:
        for found in kept:
            self._shelf.keep(found)
        self._tell(entry_of(kept))

    def _drop(self, names: Sequence[PageName], answers: Answers) -> None:
        """An object goes with the last of its pages. Raises MasterAwayError."""
        emptied = self._shelf.emptied_by(names)
        if not emptied:
            # Whether anybody would hear of it has to be known all the same.
            self._link.is_there([f"{prefix(self._options.pool)}nothing"])
        removed = self._link.remove([one.name for one in emptied]) if emptied else []
        stays = {
            name
            for one, is_gone in zip(emptied, removed, strict=True)
            for name in (() if is_gone else names_of(one))
        }
        off = self._shelf.take_off(name for name in names if name not in stays)
        if off:
            self._tell(entry_of(gone=off))
        for index, name in enumerate(names):
            answers(index, Outcome.FAILED if name in stays else Outcome.DONE)

    def _tell(self, entry: Entry) -> None:
        """What cannot be told costs others hits, and the page is kept all the same."""
        try:
            self._log.tell(entry)
        except MasterAwayError as error:
            log.warning("other stores hear later of pages that were put: %s", error)

    # -- the others

    def catch_up(self) -> list[HeldPage]:
        """All that is in the pool, as far as logs tell. Raises MasterAwayError."""
        return self._look()

    def listen(self, seen: Callable[[Sequence[HeldPage]], None]) -> None:
        """Look for more from now on."""

        def main() -> None:
            pause = self._options.poll_s
            while self._paused(pause):
                try:
                    if pages := self._look():
                        seen(pages)
                    self.caring.step()
                except MasterAwayError:
                    self._is_away, pause = True, _AWAY_PAUSE_S
                    continue
                except Exception:  # thread main: what others write must not end it
                    log.exception("what other stores put could not be taken in; looking on")
                    continue
                self._is_away, pause = False, self._options.poll_s

        self._listener = threading.Thread(target=main, name="workmem-mooncake-listen", daemon=True)
        self._listener.start()

    def look_sooner(self, seconds: float) -> None:
        """See `ListeningTier.look_sooner`."""
        is_slow = time.monotonic() >= self._soon_until
        self._soon_until = time.monotonic() + seconds
        # One that waits for the master to come back goes on waiting.
        if is_slow and not self._is_away:
            self._stir.set()

    def _paused(self, pause_s: float) -> bool:
        """Wait before the next look. False at the end."""
        if not self._is_away and time.monotonic() < self._soon_until:
            pause_s = min(pause_s, SOON_S)
        if self._stir.wait(pause_s):
            self._stir.clear()
        return not self._ending.is_set()

    def _look(self) -> list[HeldPage]:
        """Pages that are new, a parent before its children."""
        pages: list[HeldPage] = []
        gone: list[PageName] = []
        for entry in self._follower.look(but=self._log.mine):
            try:
                found = objects_in(entry)
            except ValueError:
                self._follower.unreadable += 1
                continue
            # In this order: what was moved is told as gone from there, and kept here.
            for name, root, keys in entry.gone:
                names = [PageName(root, key) for key in keys]
                self._shelf.forget(name, names)
                gone += names
            for one in found:
                pages += self._shelf.add(one)
        self._counts["heard_pages"] += len(pages)
        self._lose(gone)
        places = self._shelf.find([page.name for page in pages])
        there = [page for page, place in zip(pages, places, strict=True) if place is not None]
        return sorted(there, key=lambda page: page.depth)

    def _lose(self, names: Sequence[PageName]) -> None:
        """Tell of pages that lie nowhere any more."""
        tell = self.lost
        places = self._shelf.find(names) if tell is not None else []
        gone = [name for name, place in zip(names, places, strict=False) if place is None]
        if tell is not None and gone:
            tell(gone)

    # -- the end

    def close(self, timeout_s: float) -> bool:
        """See `Tier.close`."""
        until = time.monotonic() + timeout_s
        self._ending.set()
        self._stir.set()
        self._say_farewell(min(_LAST_WORD_S, timeout_s))
        listener = self._listener
        if listener is not None and listener is not threading.current_thread():
            listener.join(max(0.0, until - time.monotonic()))
            if listener.is_alive():
                return False
        for lanes in (self._reads, self._writes):
            if not lanes.close(max(0.0, until - time.monotonic())):
                return False
        self._closing_up.close()
        self._link.unregister(self._arena.address)
        if isinstance(self._link, SealedLink):
            self._link.release()
        give_back(self._options)
        return True

    def _say_farewell(self, timeout_s: float) -> None:
        if self._has_said_farewell or self._is_away:
            return
        self._has_said_farewell = True
        said = threading.Event()

        def run() -> None:
            try:
                self._log.close()
            except MasterAwayError as error:
                log.debug("others do not hear that this store has closed: %s", error)
            said.set()

        self._writes.submit(Job("write", run, said.set))
        said.wait(timeout_s)


def _registered(options: MooncakeOptions, arena: ArenaMemory, cipher: PoolCipher | None) -> Link | SealedLink:
    link = borrow(options)
    if cipher is not None:
        # The arena stays this host's: pages go through scratch memory.
        return SealedLink(link, cipher, options.pool, threads=READERS + WRITERS)
    try:
        link.register(arena.address, arena.size_bytes)
    except BaseException:
        give_back(options)
        raise
    return link
