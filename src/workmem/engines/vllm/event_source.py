"""Listens to the event publishers of engines. Sockets are handed in; `zmq_sockets` makes real ones.

The queue is that of the socket: bounded, filled behind us, and what does not fit is dropped there, which an
`EventStream` finds out and asks for. So an engine never waits for us, and we never wait for an engine.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, Protocol

from workmem.core.errors import ConfigError
from workmem.engines.vllm.event_stream import EventStream

QUEUE_MAX = 4096
"""Messages that wait in a socket."""


class Socket(Protocol):
    """What is needed of a ZeroMQ socket. No call blocks but `wait`."""

    def receive(self) -> list[bytes] | None:
        """The parts of the next message; None when there is none."""
        ...

    def send(self, parts: list[bytes]) -> bool:
        """Queue a message. False when it cannot be."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when something can be received, or after `timeout_s`."""
        ...

    def has_lost_link(self) -> bool:
        """Whether a connection was lost since this was last asked."""
        ...

    def close(self) -> None:
        """Drop what is queued, too."""
        ...


class Sockets(Protocol):
    """Where one publisher is to be reached."""

    @property
    def can_replay(self) -> bool:
        """Whether it has a replay endpoint."""
        ...

    def subscribe(self) -> Socket:
        """A new socket that receives what is published from now on, and connects again by itself."""
        ...

    def ask(self) -> Socket:
        """A new connection to the replay endpoint."""
        ...


class EventSource:
    """Feeds a stream from sockets. One owner calls `pump` again and again."""

    def __init__(
        self, stream: EventStream, sockets: Sockets, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = stream
        self._sockets = sockets
        self._clock = clock
        self._live = sockets.subscribe()
        self._replay: Socket | None = None

    def pump(self, limit: int = 1000) -> int:
        """Take in what has arrived, at most `limit` messages of either kind, without waiting. Returns how many."""
        stream, now = self.stream, self._clock()
        if self._live.has_lost_link():
            stream.doubt(now)
        taken = self._pump_replay(limit, now)
        for _ in range(limit):
            parts = self._live.receive()
            if parts is None:
                break
            taken += 1
            if len(parts) == 3 and len(parts[1]) == 8:
                stream.live(int.from_bytes(parts[1], "big"), parts[2], now)
            else:
                stream.counts["messages_malformed"] += 1
        if stream.is_late(now) and self._replay is not None:
            self._replay.close()
            self._replay = None
        start = stream.wants(now)
        if start is not None:
            if self._replay is None:
                self._replay = self._sockets.ask()
            self._replay.send([b"", start.to_bytes(8, "big")])
        return taken

    def wait(self, timeout_s: float) -> None:
        """Return when something was published, or after `timeout_s`."""
        self._live.wait(timeout_s)

    def close(self) -> None:
        """Close the sockets. What the index knows stays."""
        self._live.close()
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def _pump_replay(self, limit: int, now: float) -> int:
        for taken in range(limit if self._replay is not None else 0):
            assert self._replay is not None
            parts = self._replay.receive()
            if parts is None:
                return taken
            if len(parts) == 4 and len(parts[2]) == 8:
                self.stream.replayed(int.from_bytes(parts[2], "big", signed=True), parts[3], now)
            else:
                self.stream.counts["messages_malformed"] += 1
        return limit if self._replay is not None else 0


def zmq_sockets(endpoint: str, replay: str = "", topic: str = "") -> Sockets:
    """Sockets by pyzmq. An `endpoint` with a `*` in it is bound, as vLLM connects to a host that is named.

    Raises ConfigError where pyzmq is not installed.
    """
    try:
        zmq = importlib.import_module("zmq")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "listening to KV events needs pyzmq; run in the folder of workmem: python -m pip install '.[events]'"
        ) from error
    return _ZmqSockets(zmq, endpoint, replay, topic)


class _ZmqSockets:
    def __init__(self, zmq: Any, endpoint: str, replay: str, topic: str) -> None:
        self._zmq = zmq
        self._endpoint = endpoint
        self._replay = replay
        self._topic = topic

    @property
    def can_replay(self) -> bool:
        return bool(self._replay)

    def subscribe(self) -> Socket:
        made = self._new(self._zmq.SUB, "--endpoint", self._endpoint, QUEUE_MAX)
        made.socket.setsockopt(self._zmq.SUBSCRIBE, self._topic.encode())
        return made

    def ask(self) -> Socket:
        # An answer may be all that the engine keeps, and what does not fit is dropped on its side.
        return self._new(self._zmq.DEALER, "--replay", self._replay, 16 * QUEUE_MAX)

    def _new(self, kind: int, option: str, endpoint: str, queue: int) -> _ZmqSocket:
        zmq = self._zmq
        socket = zmq.Context.instance().socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, queue)
        # A host that went away without a word would look like one with nothing to say.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        made = _ZmqSocket(zmq, socket)
        try:
            if "*" in endpoint:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            made.close()
            raise ConfigError(f"{option}: cannot use {endpoint!r} ({error})") from error
        return made


class _ZmqSocket:
    def __init__(self, zmq: Any, socket: Any) -> None:
        self._zmq = zmq
        self.socket = socket
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def receive(self) -> list[bytes] | None:
        try:
            return self.socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None

    def send(self, parts: list[bytes]) -> bool:
        try:
            self.socket.send_multipart(parts, self._zmq.NOBLOCK)
        except self._zmq.Again:
            return False
        return True

    def wait(self, timeout_s: float) -> None:
        self.socket.poll(int(timeout_s * 1000))

    def has_lost_link(self) -> bool:
        has_lost = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            has_lost = True
        return has_lost

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close()
