"""A stream that outlives its server: another one is asked again, and goes on where the first broke off.

That is done where asking again gives the same, and never on trust: what comes again is held against what was sent, and
where it differs the stream ends with an error, as it does where it cannot be asked for again.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import aiohttp

from workmem.core.events import RequestMoved
from workmem.gateway.sending import AHEAD_BYTES_MAX, Hop
from workmem.gateway.sent import (
    Course,
    Diverged,
    Replay,
    Sent,
    before_failure,
    data_of,
    decoded,
    is_half,
)
from workmem.gateway.sse import DONE, event
from workmem.gateway.upstream_metrics import UpstreamMetrics

log = logging.getLogger("workmem.gateway")

_CUT = "its stream ended before its answer"
Again = Callable[[], Awaitable[Hop | None]]
"""Asks the next server; None where there is none, or none may be asked."""


class _SaidItFailed(aiohttp.ClientError):
    """The server lives, and says that what computes behind it does not."""

    def __init__(self, words: bytes, behind: AsyncGenerator[bytes]) -> None:
        super().__init__("it says that it failed")
        self.words = words
        self.behind = behind
        """What comes behind its words."""


class SteadyStream:
    """The events of `hop`, and after its death those of the hops that `again` gives."""

    def __init__(self, hop: Hop, again: Again, sent: Sent, metrics: UpstreamMetrics, request_id: str) -> None:
        self.resumed_on: list[str] = []
        """The servers that went on."""
        self._hop = hop
        self._again = again
        self._sent = sent
        self._metrics = metrics
        self._request_id = request_id
        self._failure: aiohttp.ClientError | TimeoutError | None = None

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Whole events, byte for byte as long as nobody dies. Raises what the last server broke off with."""
        events = _to_the_end(self._hop, self._sent.course)
        while True:
            try:
                async for data in events:
                    self._sent.see(data)
                    yield data
            except (aiohttp.ClientError, TimeoutError) as error:
                if self._sent.course.is_done:
                    return
                log.warning("upstream %s broke off in a stream: %s", self._hop.server.url, error)
                hop = await self._next()
                if hop is not None:
                    self._hop.close()
                    self._hop, self._failure = hop, error
                    events = self._rest(hop)
                elif isinstance(error, _SaidItFailed) and self._failure is None:
                    # Its own words, and what it sends behind them, tell more than ours.
                    events = _quoted(error)
                else:
                    raise
            except Diverged as error:
                log.warning("a stream cannot go on at %s: %s", self._hop.server.url, error)
                self._count("other_text")
                assert self._failure is not None
                raise self._failure from error
            else:
                if self._failure is not None:
                    self._count("resumed")
                    self.resumed_on.append(self._hop.server.url)
                return

    async def _next(self) -> Hop | None:
        """Who goes on; None where nobody may or can."""
        if self._sent.is_lost:
            self._count("not_repeatable")
            return None
        hop = await self._again()
        if hop is None:
            self._count("nobody_left")
        return hop

    def _count(self, outcome: str) -> None:
        self._metrics.resumed.labels(outcome).inc()
        self._metrics.events(RequestMoved(request_id=self._request_id, outcome=outcome))

    async def _rest(self, hop: Hop) -> AsyncGenerator[bytes]:
        """What of `hop`'s answer was not sent yet. Raises Diverged, or what it broke off with."""
        replay, course = Replay(self._sent), Course()
        async for events in _to_the_end(hop, course):
            out: list[bytes] = []
            for data in data_of(events):
                course.see(data)
                if data == DONE[5:].strip():
                    replay.end()
                    out.append(DONE)
                    continue
                body = decoded(data)
                if body is None:
                    raise Diverged("it is no answer that is understood")
                rest = replay.trim(body)
                if rest is not None:
                    out.append(event(rest))
            if out:
                yield b"".join(out)
        if not course.is_done:
            replay.end()


async def _quoted(failure: _SaidItFailed) -> AsyncGenerator[bytes]:
    yield failure.words
    async for events in failure.behind:
        yield events


async def _to_the_end(hop: Hop, course: Course) -> AsyncGenerator[bytes]:
    """Its whole events, of which `course` hears. Raises what it broke off with, also where that looks like an end."""
    behind = whole_events(hop.chunks())
    async for events in behind:
        # What is larger is cut where it is, and more of it comes.
        if len(events) <= AHEAD_BYTES_MAX and is_half(events) and not course.is_ended:
            raise aiohttp.ClientPayloadError(_CUT)
        before = before_failure(events)
        if before:
            yield before
        if len(before) < len(events):
            raise _SaidItFailed(events[len(before) :], behind)
    if course.is_cut:
        raise aiohttp.ClientPayloadError(_CUT)


async def whole_events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """The same bytes, cut behind events: half a one could neither be gone on with nor followed by an error."""
    held = b""
    async for data in chunks:
        # The end of an event may lie across two chunks.
        held += data
        end = max(_end_of(held, b"\n\n"), _end_of(held, b"\r\n\r\n"))
        if len(held) - end > AHEAD_BYTES_MAX:
            end = len(held)
        if end:
            yield held[:end]
            held = held[end:]
    if held:
        yield held


def _end_of(held: bytes, mark: bytes) -> int:
    place = held.rfind(mark)
    return place + len(mark) if place >= 0 else 0
