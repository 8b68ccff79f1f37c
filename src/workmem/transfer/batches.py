"""The side that moves: batches into and out of windows of others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

import msgspec
import xxhash

from workmem.transfer.contract import Access, Moved, Mover, Outcome, Part
from workmem.transfer.keeping import Keeping
from workmem.transfer.messages import (
    PARTS_MAX,
    Answer,
    Arrived,
    Finished,
    Opened,
    Reply,
    Revoke,
    Summing,
    Ticket,
)
from workmem.transfer.moving import Lane, Moving, Work
from workmem.transfer.peer import Peer
from workmem.transfer.region import Region, RemoteWindow

log = logging.getLogger(__name__)
_GONE_S = 0.3
"""Bytes of a peer that dies stop before its connection for words says so."""


_REMEMBERED_MAX = 4096
_Key = tuple[Peer, int]


class _Batch(msgspec.Struct, frozen=True, eq=False):
    access: Access
    region: Region
    window: RemoteWindow
    parts: tuple[Part, ...]
    moving: Moving

    def sums(self) -> list[int]:
        """Checksums of the parts as they lie here."""
        view = self.region.memory.view
        return [xxhash.xxh3_64_intdigest(view[part.here : part.here + part.size]) for part in self.parts]

    def must_stop(self) -> bool:
        return self.window.is_closed or self.moving.outcomes is not None or self.window.peer.is_gone


class Batches:
    """Windows of others that are open, and a lane for each peer."""

    def __init__(self, mover: Mover, keeping: Keeping) -> None:
        self._mover, self._keeping = mover, keeping
        self._lock = threading.Lock()
        self._lanes: dict[Peer, Lane] = {}
        self._windows: dict[_Key, RemoteWindow] = {}
        self._revoked: dict[_Key, None] = {}
        self._told: dict[_Key, None] = {}
        """Windows that are over, the newest of them: their owner may ask again."""
        self._changed = threading.Condition()
        self._under_way = 0

    def opened(self, peer: Peer, asked: Ticket, reply: Opened, target: object) -> RemoteWindow:
        """A window is open. For the thread that hears `peer`."""
        window = RemoteWindow(
            asked.window, peer, asked.access, asked.size, target, reply.start, self._finished
        )
        key = (peer, asked.window)
        with self._lock:
            self._windows[key] = window
            is_revoked = key in self._revoked
        if is_revoked:
            window.finish()
        return window

    def revoke(self, peer: Peer, said: Revoke) -> None:
        """Its owner closes it."""
        key = (peer, said.window)
        with self._lock:
            window = self._windows.get(key)
            is_told = key in self._told
            if window is None and not is_told:
                # Of one that is being opened.
                _remember(self._revoked, key)
        if window is not None:
            window.finish()
        elif is_told:
            peer.tell(Finished(said.window))

    def _finished(self, window: RemoteWindow) -> None:
        key = (window.peer, window.number)
        with self._lock:
            self._windows.pop(key, None)
            self._revoked.pop(key, None)
            _remember(self._told, key)
        window.peer.tell(Finished(window.number))

    def forget(self, peer: Peer) -> None:
        """It is gone."""
        with self._lock:
            lane = self._lanes.pop(peer, None)
            for keys in (self._windows, self._revoked, self._told):
                for key in [key for key in keys if key[0] is peer]:
                    del keys[key]
        if lane is not None:
            lane.close()

    def close(self, within_s: float) -> bool:
        """No window stays open. Whether nothing is under way any more."""
        with self._lock:
            lanes, self._lanes = list(self._lanes.values()), {}
            windows = list(self._windows.values())
        for window in windows:
            window.finish()
        for lane in lanes:
            lane.close()
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, within_s)

    def move(
        self, access: Access, region: Region, window: RemoteWindow, parts: Sequence[Part], within_s: float
    ) -> Moving:
        """See `Endpoint.write` and `Endpoint.read`."""
        batch = _Batch(access, region, window, tuple(parts), Moving(len(parts), within_s))
        why = self._begin(batch)
        if why is not None:
            batch.moving.settle_all(why)
            batch.moving.end()
        return batch.moving

    def _begin(self, batch: _Batch) -> Outcome | None:
        """None where it is on its way; why not otherwise."""
        region, window, peer = batch.region, batch.window, batch.window.peer
        if not 0 < len(batch.parts) <= PARTS_MAX or batch.access is not window.access:
            return Outcome.REFUSED
        if any(part.here < 0 or part.here + part.size > region.size for part in batch.parts):
            return Outcome.REFUSED
        if peer.is_gone:
            return Outcome.PEER_GONE
        lane = self._lane(peer)
        if lane.is_late:
            return Outcome.TIMED_OUT
        if not region.take():
            return Outcome.NOT_REGISTERED
        if not window.take(batch.parts):
            region.give_back()
            return Outcome.REFUSED
        with self._changed:
            self._under_way += 1
        if lane.put(Work(batch.moving, lambda: self._run(batch))):
            return None
        self._end(batch)
        return Outcome.PEER_GONE if peer.is_gone else Outcome.REFUSED

    def _lane(self, peer: Peer) -> Lane:
        with self._lock:
            if peer not in self._lanes:
                self._lanes[peer] = Lane("workmem-transfer-lane")
            return self._lanes[peer]

    def _run(self, batch: _Batch) -> None:
        try:
            moved = self._moved(batch)
        except Exception:  # thread main: a bug of ours or of a mover ends this batch, and not those behind it
            log.exception("a transfer met a bug")
            moved = Moved(Outcome.FAILED, is_clean=False)
        if moved.outcome is not Outcome.DONE:
            is_gone = batch.window.peer.is_gone or (
                moved.outcome is Outcome.FAILED and batch.window.peer.wait_gone(_GONE_S)
            )
            batch.moving.settle_all(Outcome.PEER_GONE if is_gone else moved.outcome)
        if moved.is_clean:
            self._end(batch)
        else:
            self._keeping.later(self._mover.settle_s, lambda: self._end(batch))

    def _end(self, batch: _Batch) -> None:
        batch.moving.end()
        batch.region.give_back()
        batch.window.give_back()
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _moved(self, batch: _Batch) -> Moved:
        if batch.must_stop():
            return Moved(Outcome.REFUSED)
        window = batch.window
        is_write = batch.access is Access.WRITE
        sums = batch.sums() if is_write else []
        moved = self._mover.move(
            batch.access, window.target, window.start, batch.region.memory, batch.parts, batch.must_stop
        )
        if moved.outcome is not Outcome.DONE:
            return moved
        if is_write:
            spans = [(part.there, part.size, found) for part, found in zip(batch.parts, sums, strict=True)]
            window.peer.ask(lambda tag: Arrived(tag, window.number, spans), partial(_written, batch))
            return moved
        sums = batch.sums()
        wanted = [(part.there, part.size) for part in batch.parts]
        window.peer.ask(lambda tag: Summing(tag, window.number, wanted), partial(_read, batch, sums))
        return moved


def _remember(keys: dict[_Key, None], key: _Key) -> None:
    keys[key] = None
    if len(keys) > _REMEMBERED_MAX:
        del keys[next(iter(keys))]


def _written(batch: _Batch, reply: Reply | Outcome, fd: int) -> None:
    del fd
    if isinstance(reply, Answer) and len(reply.outcomes) == len(batch.parts):
        batch.moving.settle(reply.outcomes)
    else:
        batch.moving.settle_all(reply if isinstance(reply, Outcome) else Outcome.FAILED)


def _read(batch: _Batch, sums: Sequence[int], reply: Reply | Outcome, fd: int) -> None:
    del fd
    if isinstance(reply, Answer) and len(reply.sums) == len(sums):
        same = (mine == theirs for mine, theirs in zip(sums, reply.sums, strict=True))
        batch.moving.settle([Outcome.DONE if is_same else Outcome.CORRUPT for is_same in same])
    elif isinstance(reply, Answer) and reply.outcomes:
        batch.moving.settle_all(reply.outcomes[0])
    else:
        batch.moving.settle_all(reply if isinstance(reply, Outcome) else Outcome.FAILED)
