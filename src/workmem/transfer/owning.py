"""The owner's side: windows in one's own memory, and what peers ask about them."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from itertools import count

from workmem.core.errors import CapacityError, TransferError
from workmem.transfer.contract import Access, Mover, Outcome
from workmem.transfer.messages import VERSION, Answer, Arrived, Finished, Open, Opened, Summing, Ticket, pack
from workmem.transfer.peer import Peer
from workmem.transfer.region import Region
from workmem.transfer.window import Window


class Owned:
    """All windows of an endpoint that are not free."""

    def __init__(
        self,
        mover: Mover,
        instance: bytes,
        address: str,
        quarantine_bytes_max: int,
        nudge: Callable[[], None],
    ) -> None:
        """`nudge` has `look` called soon."""
        self._nudge = nudge
        self._mover, self._instance, self._address = mover, instance, address
        self._quarantine_bytes_max = quarantine_bytes_max
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._windows: dict[int, tuple[Window, bytes, Region, int]] = {}

    def grant(
        self, region: Region, offset: int, size: int, access: Access, freed: Callable[[], None] | None
    ) -> Window:
        """See `Endpoint.grant`."""
        if offset < 0 or size <= 0 or offset + size > region.size:
            raise TransferError(f"a window of {size} bytes at {offset} does not lie in {region.size} bytes")
        held = self.quarantined_bytes
        if held + size > self._quarantine_bytes_max:
            raise CapacityError(
                f"{held} bytes wait for peers that do not answer, and {size} more could exceed the bound of "
                f"{self._quarantine_bytes_max}; see which peer is silent, or raise the bound"
            )
        if not region.take():
            raise TransferError("the region of the window is registered no more")
        number, secret = next(self._numbers), secrets.token_bytes(16)
        ticket = pack(
            Ticket(VERSION, self._address, self._instance, self._mover.name, number, secret, size, access)
        )

        def forget(window: Window) -> None:
            with self._lock:
                del self._windows[window.number]
            region.give_back()
            if freed is not None:
                freed()

        window = Window(
            number, region.memory.view[offset : offset + size], access, ticket, forget, self._nudge
        )
        with self._lock:
            self._windows[number] = (window, secret, region, offset)
        return window

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of windows that are closed and not free."""
        return sum(window.size for window in self.windows() if window.is_quarantined)

    def windows(self) -> list[Window]:
        """Those that are not free."""
        with self._lock:
            return [window for window, _, _, _ in self._windows.values()]

    def close(self, until: float) -> bool:
        """Close all. Whether they are free by then."""
        for window in self.windows():
            window.close(0)
        left = [
            window
            for window in self.windows()
            if window.close(max(0.0, until - time.monotonic())) is not Outcome.DONE
        ]
        return not left

    def look(self) -> bool:
        """Free what is nobody's any more. Whether to look again soon."""
        for window in self.windows():
            window.look(self._mover.drain_s)
        return any(window.is_quarantined and window.peer and window.peer.is_gone for window in self.windows())

    def open(self, peer: Peer, asked: Open) -> None:
        """`peer` comes with a ticket."""
        with self._lock:
            found = self._windows.get(asked.window)
        if found is None or not hmac.compare_digest(found[1], asked.secret) or not found[0].take(peer):
            peer.tell(Answer(asked.tag, [Outcome.REFUSED], []))
            return
        _, _, region, offset = found
        memory = region.memory
        fds = [memory.fd] if memory.fd >= 0 and self._address.startswith("unix:") else []
        peer.tell(Opened(asked.tag, region.described, region.number, offset), fds)

    def check(self, peer: Peer, said: Arrived) -> None:
        """`peer` has written something."""
        window = self._window(said.window)
        outcomes = window.check(peer, said.spans) if window else [Outcome.REFUSED] * len(said.spans)
        peer.tell(Answer(said.tag, outcomes, []))

    def sum(self, peer: Peer, asked: Summing) -> None:
        """`peer` has read something."""
        window = self._window(asked.window)
        sums = window.sums(peer, asked.spans) if window else None
        outcome = Outcome.REFUSED if sums is None else Outcome.DONE
        peer.tell(Answer(asked.tag, [outcome] * len(asked.spans), sums or []))

    def finish(self, peer: Peer, said: Finished) -> None:
        """`peer` needs a window no more."""
        window = self._window(said.window)
        if window:
            window.finish(peer)

    def _window(self, number: int) -> Window | None:
        with self._lock:
            found = self._windows.get(number)
        return found[0] if found else None
