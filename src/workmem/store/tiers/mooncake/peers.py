"""Which owners of memory are left alone: one that froze costs its deadline once, and then nothing for a while."""

from __future__ import annotations

import threading
import time

PAUSE_S = 30.0
"""Longer than a master takes to strike off a process that it does not hear of: what it held is a miss by then."""
FRESH_S = 0.1
"""A peer that answered so lately is taken to be well."""
MASTER = "the master"
"""Asked before every call, so a peer like others, but for its pause."""
MASTER_PAUSE_S = 2.0
"""It comes back where it was, and clients find it again by themselves."""


class Peers:
    """A peer that did not answer within the deadline is not asked again for PAUSE_S, one that is dead likewise."""

    def __init__(self, pause_s: float = PAUSE_S) -> None:
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}
        self._answered: dict[str, float] = {}

    def may_ask(self, peer: str) -> bool:
        """Whether to ask it; always of one that is not known."""
        with self._lock:
            until = self._until.get(peer)
            if until is None:
                return True
            if time.monotonic() < until:
                return False
            del self._until[peer]
            return True

    def failed(self, peer: str) -> bool:
        """It did not answer. True where that is news."""
        if not peer:
            return False
        with self._lock:
            is_news = peer not in self._until
            pause_s = MASTER_PAUSE_S if peer == MASTER else self._pause_s
            self._until[peer] = time.monotonic() + pause_s
            return is_news

    def worked(self, peer: str) -> None:
        """It gave or took a page: it is there, or there again."""
        with self._lock:
            self._until.pop(peer, None)
            self._answered[peer] = time.monotonic()

    def is_fresh(self, peer: str) -> bool:
        """It answered a moment ago. One that did not is asked for a single page first: a batch waits several deadlines."""
        with self._lock:
            return time.monotonic() - self._answered.get(peer, -FRESH_S) < FRESH_S
