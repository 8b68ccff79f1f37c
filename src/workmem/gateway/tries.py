"""The servers that may have one request, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workmem.core.events import BoundReached, EventSink
from workmem.gateway.failures import Refusal
from workmem.gateway.sending import Failed, Hop, Outgoing, Sender
from workmem.gateway.servers import UpstreamServer

Hold = Callable[[Callable[[], None]], object]


class Tries:
    """Asks the best server that was not asked yet. `hold` gets what must be closed when the exchange ends.

    Who refuses a connection costs nothing, and the next one is asked. A generation may also be asked again where a server
    broke off or says that it failed (5xx), `tries_max` servers in all: a request that kills whoever computes it must not
    go through the whole fleet. Where nobody is left, the last 5xx is the answer.
    """

    def __init__(
        self,
        sender: Sender,
        choose: Callable[[], Sequence[UpstreamServer]],
        request: Outgoing,
        hold: Hold,
        tries_max: int,
        events: EventSink,
    ) -> None:
        self.request = request
        self.hops: list[Hop] = []
        """The answers that began, the latest last."""
        self.broke_off = 0
        """Servers that died before they answered, or had nothing but a 5xx, which was not the answer."""
        self._sender = sender
        self._choose = choose
        self._hold = hold
        self._left = tries_max if request.is_generation else 1
        self._tries_max = tries_max
        self._events = events
        self._asked: set[UpstreamServer] = set()
        self._failures: list[Failed] = []

    async def next(self) -> Hop | None:
        """The next answer that begins; None where nobody is left, or may be asked."""
        failed: Hop | None = None
        while self._left > 0:
            server = next((one for one in self._choose() if one not in self._asked), None)
            if server is None:
                break
            self._asked.add(server)
            found = await self._sender.send(server, self.request)
            if isinstance(found, Hop):
                self._hold(found.close)
                if failed is not None:
                    failed.close()
                failed = None
                if not self.request.is_generation or found.answer.status < 500:
                    self._left -= 1
                    self.hops.append(found)
                    return found
                failed = found
                self._broke_off(f"The upstream server answered {found.answer.status}.")
                continue
            self._failures.append(found)
            if found.kind == "broke_off":
                self._broke_off(found.text)
            elif found.kind == "silent":
                # It may still be at it, and elsewhere it would take as long.
                self._left = 0
        if failed is not None:
            self.broke_off -= 1
            self.hops.append(failed)
        return failed

    def _broke_off(self, text: str) -> None:
        self._left -= 1
        self.broke_off += 1
        if self._left == 0 and self.request.is_generation:
            self._events(BoundReached(name="upstream.tries", limit=self._tries_max, detail=text))

    def refusal(self) -> Refusal:
        """What the client hears when nobody answered."""
        for failed in self._failures:
            if failed.kind == "silent":
                return Refusal(504, failed.text, code="upstream_timeout")
        for failed in self._failures:
            if failed.kind == "broke_off":
                return Refusal(502, failed.text, code="upstream_error")
        last = self._failures[0].text if self._failures else "there is none"
        text = f"None of the {len(self._failures)} upstream servers accepts connections: {last}."
        return Refusal(502, text, code="upstream_unreachable")
