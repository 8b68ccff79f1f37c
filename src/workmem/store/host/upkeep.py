"""What a client asks of the store as a whole: to settle, to recount, to purge, to be read through.

Each is asked on a connection of its own, which it keeps busy: whoever leases there meanwhile would wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from workmem.core.errors import InvariantError
from workmem.store.host import messages, upkeep_messages
from workmem.store.host.wire import ErrorCode, Kind, Refused
from workmem.store.scrubber import Scrubber
from workmem.store.ssd_index import StoredPage
from workmem.store.store import Store

_SLICE_S = 0.25
"""Longest that one request takes of a session's thread, purges aside: a client asks again."""


class Upkeep:
    """Answers of one session. `census` has the server's own gauges."""

    def __init__(self, store: Store, census: Callable[[], dict[str, float]]) -> None:
        self._store = store
        self._census = census
        self._scrubber: Scrubber[StoredPage] | None = None
        self._next_at = 0.0
        """When the next page may be read: a pause may be longer than a slice."""
        self.answers: dict[Kind, Callable[[memoryview], bytes | None]] = {
            Kind.FLUSH: self._flush,
            Kind.GAUGES: self._gauges,
            Kind.AUDIT: self._audit,
            Kind.PURGE: self._purge,
            Kind.SCRUB: self._scrub,
        }

    def _flush(self, body: memoryview) -> bytes:
        return bytes([self._store.flush(min(messages.unpack_seconds(body), _SLICE_S))])

    def _gauges(self, body: memoryview) -> bytes:
        del body
        return msgspec.json.encode(self._store.gauges() | self._census())

    def _audit(self, body: memoryview) -> bytes:
        del body
        try:
            self._store.audit()
        except InvariantError as error:
            return str(error).encode()
        return b""

    def _purge(self, body: memoryview) -> bytes:
        selector, is_rehearsal = upkeep_messages.unpack_purge(body)
        taken = self._store.survey(selector) if is_rehearsal else self._store.purge(selector)
        return msgspec.json.encode(taken)

    def _scrub(self, body: memoryview) -> bytes:
        """A slice of a pass, which begins with the first; the client who hangs up ends it."""
        bytes_per_s = upkeep_messages.unpack_scrub(body)
        scrubber = self._scrubber or self._store.scrub(bytes_per_s)
        if scrubber is None:
            raise Refused("the store has no ssd tier to scrub", ErrorCode.UNAVAILABLE)
        if scrubber is not self._scrubber:
            self._scrubber, self._next_at = scrubber, 0.0
        until = time.monotonic() + _SLICE_S
        while not scrubber.has_ended and (now := time.monotonic()) < until:
            if now < self._next_at:
                time.sleep(min(self._next_at, until) - now)
                continue
            self._next_at = scrubber.step() + time.monotonic()
        counts, has_ended = scrubber.counts, scrubber.has_ended
        if has_ended:
            self._scrubber = None
        return upkeep_messages.pack_scrubbed(
            upkeep_messages.Scrubbed(has_ended, counts.pages, counts.bytes, counts.damaged, counts.unreadable)
        )
