"""A mover that waits at a gate, and a channel that loses words, says them late, twice, or in another order."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from workmem.transfer.channel import Channel, Lost
from workmem.transfer.contract import Access, Memory, Moved, Mover, Part
from workmem.transfer.messages import unpack

_DELAY_S = 0.15


class GatedMover:
    """Counts batches that begin, and keeps each at its start while it is shut. `around` puts it before a mover."""

    def __init__(self) -> None:
        self._inner: Any = None
        self._changed = threading.Condition()
        self._begun = 0
        self._passes: float = float("inf")

    def around(self, mover: Mover) -> Mover:
        """The gate, in the place of `mover`."""
        self._inner = mover
        return cast("Mover", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def shut(self) -> None:
        """Let none pass."""
        with self._changed:
            self._passes = 0

    def let(self, count: int) -> None:
        """Let so many more pass."""
        with self._changed:
            self._passes += count
            self._changed.notify_all()

    def open(self) -> None:
        """Let all pass."""
        self.let(2**31)

    def wait_begun(self, count: int, within_s: float) -> bool:
        """Whether so many have come to the gate."""
        with self._changed:
            return self._changed.wait_for(lambda: self._begun >= count, within_s)

    def move(
        self,
        access: Access,
        target: object,
        start: int,
        memory: Memory,
        parts: Sequence[Part],
        stop: Callable[[], bool],
    ) -> Moved:
        """As the mover behind the gate."""
        with self._changed:
            self._begun += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._passes > 0)
            self._passes -= 1
        return self._inner.move(access, target, start, memory, parts, stop)


class FlippingMover:
    """Changes a bit of what it has read, as a bad card would."""

    def __init__(self, mover: Mover) -> None:
        self._inner = mover

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def move(
        self,
        access: Access,
        target: object,
        start: int,
        memory: Memory,
        parts: Sequence[Part],
        stop: Callable[[], bool],
    ) -> Moved:
        """As the mover inside, and then one bit."""
        moved = self._inner.move(access, target, start, memory, parts, stop)
        if access is Access.READ:
            memory.view[parts[0].here] ^= 1
        return moved


class Lent:
    """A mover that outlives the endpoints that it is lent to."""

    def __init__(self, mover: Mover, *, settle_s: float | None = None, drain_s: float | None = None) -> None:
        """With other waits than its own, for who will not wait so long."""
        self._mover = mover
        self.settle_s = mover.settle_s if settle_s is None else settle_s
        self.drain_s = mover.drain_s if drain_s is None else drain_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def close(self) -> None:
        """Others have it next."""


class LossyChannel:
    """Faults in the words of one kind that an endpoint sends. `around` is an endpoint's `wrap`."""

    def __init__(self, fault: str, words: type[Any]) -> None:
        """`fault` is drop, delay, twice or swap: each is said after the one that follows it."""
        self._fault, self._words = fault, words
        self._is_healed = False

    def heal(self) -> None:
        """No more faults from here on."""
        self._is_healed = True

    def around(self, channel: Channel) -> Channel:
        """`channel`, with faults."""
        send, held = channel.send, list[_Late]()

        def faulty(body: bytes, fds: Sequence[int] = ()) -> None:
            waiting, held[:] = held[:], []
            if self._is_healed or not isinstance(unpack(body), self._words):
                send(body, fds)
            elif self._fault == "twice":
                send(body, fds)
                send(body, fds)
            elif self._fault == "delay":
                threading.Timer(_DELAY_S, _say_late, (send, _Late(body, [os.dup(fd) for fd in fds]))).start()
            elif self._fault == "swap" and not waiting:
                held.append(_Late(body, [os.dup(fd) for fd in fds]))
            elif self._fault == "swap":
                send(body, fds)
            for late in waiting:
                _say_late(send, late)

        channel.send = faulty
        return channel


class _Late(NamedTuple):
    body: bytes
    fds: list[int]


def _say_late(send: Callable[[bytes, Sequence[int]], None], late: _Late) -> None:
    with contextlib.suppress(Lost):  # Its connection may have ended meanwhile.
        send(late.body, late.fds)
    for fd in late.fds:
        os.close(fd)
