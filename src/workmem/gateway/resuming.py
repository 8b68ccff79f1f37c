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
from workmem.gateway.sent import Diverged, Replay, Sent, data_of, decoded
from workmem.gateway.sse import DONE, event
from workmem.gateway.upstream_metrics import UpstreamMetrics

log = logging.getLogger("workmem.gateway")

Again = Callable[[], Awaitable[Hop | None]]
"""Asks the next server; None where there is none, or none may be asked."""


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
        events = whole_events(self._hop.chunks())
        while True:
            try:
                async for data in events:
                    self._sent.see(data)
                    yield data
            except (aiohttp.ClientError, TimeoutError) as error:
                if self._sent.is_done:
                    return
                log.warning("upstream %s broke off in a stream: %s", self._hop.server.url, error)
                hop = await self._next()
                if hop is None:
                    raise
                self._hop, self._failure = hop, error
                events = self._rest(hop)
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
        self._hop.close()
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
        replay = Replay(self._sent)
        is_ended = False
        async for events in whole_events(hop.chunks()):
            out: list[bytes] = []
            for data in data_of(events):
                if data == DONE[5:].strip():
                    replay.end()
                    is_ended = True
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
        if not is_ended:
            replay.end()


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
