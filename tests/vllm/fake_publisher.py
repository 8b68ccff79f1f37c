"""A publisher of KV events as vLLM's, with a network that loses what it is told to lose."""

from __future__ import annotations

from collections import deque
from itertools import count

import msgspec

SIZE = 2
"""Tokens per block."""


def stored(hashes: list, parent=None, **more) -> dict:
    wanted = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(range(SIZE * len(hashes))),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return {**wanted, **more}


def removed(hashes: list, medium: str | None = "GPU", **more) -> dict:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **more}


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """One life of an engine after another. `truth`: what it holds, by medium."""

    def __init__(self, buffer: int = 1000) -> None:
        self._ts = count(1)
        self._steps = buffer
        self.subscribers: list[FakeSocket] = []
        self.answers_broken = 0
        """So many of the next messages of answers are lost."""
        self.is_down = False
        self.start()

    def start(self) -> None:
        """Start anew, with nothing."""
        self._next = 0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=self._steps)
        self.truth: dict[str, set[int]] = {}
        self.is_down = False
        for subscriber in self.subscribers:
            subscriber.link_lost = True

    def payload(self, *events: dict, rank: int = 0) -> bytes:
        return msgspec.msgpack.encode([float(next(self._ts)), list(events), rank])

    def publish(self, *events: dict, is_lost: bool = False, rank: int = 0) -> None:
        for event in events:
            held = self.truth.setdefault(event.get("medium") or "GPU", set())
            if event["type"] == "BlockStored":
                held.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                held.difference_update(event["block_hashes"])
            else:
                self.truth["GPU"] = set()
        self.send(self.payload(*events, rank=rank), is_lost=is_lost)

    def send(self, payload: bytes, *, is_lost: bool = False) -> None:
        number, self._next = self._next, self._next + 1
        if not is_lost:
            for subscriber in self.subscribers:
                subscriber.inbox.append([b"kv", number.to_bytes(8, "big"), payload])
        self.buffer.append((number, payload))

    def skip(self) -> None:
        """A message that could not be published: its number is gone."""
        self._next += 1

    def answer(self, socket: FakeSocket, start: int) -> None:
        if self.is_down:
            return
        for number, payload in self.buffer:
            if number < start:
                continue
            if self.answers_broken and number > start:
                self.answers_broken -= 1
                continue
            socket.inbox.append([b"", b"kv", number.to_bytes(8, "big"), payload])
        socket.inbox.append([b"", b"", (-1).to_bytes(8, "big", signed=True), b""])


class FakeSocket:
    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.inbox: deque[list[bytes]] = deque()
        self.asked: deque[int] = deque()
        self.is_closed = False
        self.link_lost = False

    def receive(self) -> list[bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, parts: list[bytes]) -> bool:
        empty, start = parts
        assert not empty
        self.asked.append(int.from_bytes(start, "big"))
        return True

    def serve(self) -> None:
        """The publisher turns to what was asked."""
        while self.asked:
            self.publisher.answer(self, self.asked.popleft())

    def has_lost_link(self) -> bool:
        found, self.link_lost = self.link_lost, False
        return found

    def wait(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
        self.inbox.clear()


class FakeSockets:
    def __init__(self, publisher: Publisher, *, can_replay: bool = True) -> None:
        self.publisher = publisher
        self.can_replay = can_replay
        self.asking: list[FakeSocket] = []

    def subscribe(self) -> FakeSocket:
        socket = FakeSocket(self.publisher)
        self.publisher.subscribers.append(socket)
        return socket

    def ask(self) -> FakeSocket:
        self.asking.append(FakeSocket(self.publisher))
        return self.asking[-1]

    def serve(self) -> None:
        for socket in self.asking:
            if not socket.is_closed:
                socket.serve()
