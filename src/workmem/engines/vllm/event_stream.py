"""One engine's events in their order: what to do about gaps, late joins, restarts and silence. No sockets here.

vLLM numbers the messages of each publisher from 0 and can send again what is still in its buffer, from a number on,
ending with number -1. So a listener asks for all there is when it comes, and after a gap for what follows the last
message it has *with that message*: whether it is the same one tells a gap from an engine that has started anew.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from enum import StrEnum

import msgspec

from workmem.engines.vllm.events import apply, decode_batch
from workmem.index.residency import ResidencyIndex

log = logging.getLogger(__name__)

PENDING_MAX = 4096
"""Messages kept while earlier ones are being sent again; past it they are let go, and asked for later."""
RECENT_MAX = 4096
"""Messages recognised when they come once more."""
ANSWER_S = 5.0
"""Longest that an answer may pause before it is given up."""
PROBE_S = 10.0
"""After so much silence the engine is asked whether it has anything behind the last message."""
TRIES_MAX = 3
WITHOUT_S = 60.0
"""So long a replay endpoint that does not answer is left alone, unless messages are missed."""
_MASK = 0xFFFFFFFF


class StreamState(StrEnum):
    """How far what the index says of an engine can be trusted."""

    ASKING = "asking"
    """Messages are being sent again: what is known is of before."""
    LIVE = "live"
    SILENT = "silent"
    """The engine does not answer: what is known may be of an engine that is gone."""


class EventStream:
    """The events of one publisher: one data-parallel rank of `engine`. Single-threaded; `now` in seconds.

    The owner of the sockets passes on what arrives, and asks `wants` what to ask for. `counts`: `lost` says how
    often messages were gone for good, so that all of the engine was forgotten and learnt anew from what followed.
    """

    def __init__(self, engine: str, index: ResidencyIndex, *, can_replay: bool, now: float = 0.0) -> None:
        self.engine = engine
        self.counts: Counter[str] = Counter()
        self.state = StreamState.ASKING if can_replay else StreamState.LIVE
        self.is_partial = not can_replay
        """Something was there before what is known: more may be held."""
        self._index = index
        self._can_replay = can_replay
        self._next = 0
        self._recent: deque[int] = deque(maxlen=RECENT_MAX)
        """Digests of the last messages, the newest being number `_next - 1`."""
        self._pending: deque[tuple[int, bytes]] = deque()
        self._covered = 0
        """So many of them came before the answer was asked for, and are in it unless they are of an engine that is gone."""
        self._ranks: set[int] = set()
        self._asked_from = -1
        """Where the answer that is under way starts; -1: none is."""
        self._answers = 0
        """Messages of it so far."""
        self._is_broken = False
        """The rest of it is of no use."""
        self._torn_at = -1
        """Where the last answer had a hole: one that is there again is in the engine's buffer itself."""
        self._tries = 0
        self._quiet_since = now
        self._ask_at = now

    # -- asking

    def wants(self, now: float) -> int | None:
        """The number from which to ask for messages now, if at all. Who gets one has asked."""
        if not self._can_replay or self._asked_from >= 0:
            return None
        if self.state is StreamState.LIVE and now < self._quiet_since + PROBE_S:
            return None
        if now < self._ask_at:
            return None
        self._asked_from = max(0, self._next - 1)
        self._answers, self._is_broken = 0, False
        self._covered = len(self._pending)
        self._quiet_since = now
        self.counts["replays"] += 1
        return self._asked_from

    def is_late(self, now: float) -> bool:
        """Whether the answer under way is given up: then ask anew on another connection. Old answers would mix in."""
        if self._asked_from < 0 or now < self._quiet_since + ANSWER_S:
            return False
        self._asked_from = -1
        self._tries += 1
        self._ask_at = now + min(2.0**self._tries, PROBE_S)
        self.counts["replays_unanswered"] += 1
        self.state = StreamState.ASKING
        if self._tries >= TRIES_MAX:
            self._go_without(now)
        return True

    # -- what arrives

    def live(self, number: int, payload: bytes, now: float) -> None:
        """A message as it is published."""
        if self._asked_from < 0:
            self._quiet_since = now
        if self.state is StreamState.SILENT:
            # Nobody knows whether it is still the same engine: hear that first.
            self.state = StreamState.ASKING
            self._ask_at = min(self._ask_at, now)
        if self.state is StreamState.ASKING or self._asked_from >= 0:
            self._keep(number, payload)
            return
        self._take(number, payload)

    def doubt(self, now: float) -> None:
        """The connection was lost: whatever comes next may be of another engine, with a number that fits by chance."""
        if self._asked_from >= 0:
            self._is_broken = True
        elif self._can_replay and self.state is StreamState.LIVE:
            self.state = StreamState.ASKING
            self._ask_at = min(self._ask_at, now)

    def replayed(self, number: int, payload: bytes, now: float) -> None:
        """A message that is sent again; number -1 ends them."""
        if self._asked_from < 0:
            return
        self._quiet_since = now
        if number < 0:
            self._answered()
            return
        if self._is_broken or number < self._asked_from:
            return
        first, self._answers = self._answers == 0, self._answers + 1
        if first and not self._joins(number, payload):
            return
        if number == self._next:
            self._apply(number, payload)
        elif number > self._next and self._torn_at != self._next:
            # A part of the answer was dropped on its way: what was applied so far shortens the next.
            self.counts["replays_torn"] += 1
            self._torn_at = self._next
            self._is_broken = True
        elif number > self._next:
            self._lose("a message is missing in the engine's buffer")
            self._apply(number, payload)

    # -- inside

    def _joins(self, number: int, payload: bytes) -> bool:
        """Judge the first message of an answer: does it continue what is known? False when nothing is to be applied."""
        if self._next == 0:
            if number > 0:
                self.counts["joined_late"] += 1
                self.is_partial = True
                self._next = number
            return True
        if number > self._asked_from:
            self._lose("messages are no longer in the engine's buffer")
            self._next = number
            return True
        if hash(payload) & _MASK == self._recent[-1]:
            return False
        self._restarted()
        self._is_broken = True
        return False

    def _answered(self) -> None:
        asked, self._asked_from = self._asked_from, -1
        self._tries = 0
        if not self._answers and asked < self._next:
            # It has nothing as new as what is known: another engine, and a younger one.
            self._restarted()
            self._is_broken = True
        if self._is_broken:
            self.state = StreamState.ASKING
            self._ask_at = 0.0
            return
        for _ in range(self._covered):
            self._pending.popleft()
        self._take_pending()

    def _take_pending(self) -> None:
        self.state = StreamState.LIVE
        waiting, self._pending = self._pending, deque()
        while waiting and self.state is StreamState.LIVE:
            self._take(*waiting.popleft())
        self._pending.extend(waiting)

    def _take(self, number: int, payload: bytes) -> None:
        if number == self._next:
            self._apply(number, payload)
        elif number < self._next:
            back = self._next - number
            if back <= len(self._recent) and self._recent[-back] == hash(payload) & _MASK:
                self.counts["duplicates"] += 1
                return
            self._restarted()
            self._ask_or_go_on(number, payload)
        else:
            self.counts["gaps"] += self._next > 0
            if not self._can_replay:
                if self._next:
                    self._lose("messages were missed, and the engine has no replay endpoint")
                self.is_partial = True
            self._ask_or_go_on(number, payload)

    def _ask_or_go_on(self, number: int, payload: bytes) -> None:
        if self._can_replay:
            self.state = StreamState.ASKING
            self._ask_at = 0.0
            self._keep(number, payload)
        else:
            self._next = number
            self._apply(number, payload)

    def _go_without(self, now: float) -> None:
        """Nobody answers. With messages at hand go on from them; else wait for some."""
        if not self._pending:
            self.state = StreamState.SILENT
            return
        first = self._pending[0][0]
        if first != self._next:
            if self._next:
                self._lose("messages were missed, and the replay endpoint does not answer")
            self.is_partial = True
            self._next = first
        self._ask_at = now + WITHOUT_S
        self._take_pending()

    def _keep(self, number: int, payload: bytes) -> None:
        if len(self._pending) >= PENDING_MAX:
            self.counts["pending_dropped"] += len(self._pending)
            self._pending.clear()
            self._covered = 0
        self._pending.append((number, payload))

    def _apply(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._recent.append(hash(payload) & _MASK)
        self.counts["batches"] += 1
        try:
            batch = decode_batch(payload)
        except msgspec.DecodeError as error:
            # Asking again would bring the same bytes.
            self.counts["batches_malformed"] += 1
            log.warning("%s: message %d is not understood: %s", self.engine, number, error)
            return
        self._ranks.add(batch.rank)
        apply(batch, self.engine, self._index, self.counts)

    def _lose(self, why: str) -> None:
        self.counts["lost"] += 1
        self.is_partial = True
        self._forget(why)

    def _restarted(self) -> None:
        self.counts["restarts"] += 1
        self.is_partial = not self._can_replay
        self._next = 0
        self._forget("the engine has started anew")

    def _forget(self, why: str) -> None:
        blocks = sum(self._index.cleared(self.engine, rank) for rank in self._ranks)
        self._ranks.clear()
        self._recent.clear()
        self.counts["blocks_forgotten"] += blocks
        log.warning("%s: %s; %d blocks are forgotten", self.engine, why, blocks)
