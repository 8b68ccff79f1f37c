"""What two endpoints say to each other. No byte of a region is among it."""

from __future__ import annotations

import msgspec

from workmem.core.errors import TransferError
from workmem.transfer.contract import Access, Described, Outcome

VERSION = 1
NOTICE_BYTES_MAX = 64 * 2**10
PARTS_MAX = 4096
"""Of one batch."""


class Hello(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """The first word of both ends."""

    version: int
    instance: bytes
    mover: str


class Open(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """I have a ticket."""

    tag: int
    window: int
    secret: bytes


class Opened(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """Answer: where the window lies. A descriptor of its memory comes along where both are on one host."""

    tag: int
    region: Described
    region_id: int
    start: int


class Arrived(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """I have written this, by offset, size and checksum."""

    tag: int
    window: int
    spans: list[tuple[int, int, int]]


class Summing(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """I have read this, by offset and size, and want its checksums."""

    tag: int
    window: int
    spans: list[tuple[int, int]]


class Notify(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """Words of those who use us. Tags grow, so that one that comes late or twice is known."""

    tag: int
    body: bytes


class Answer(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """To what carried this tag."""

    tag: int
    outcomes: list[Outcome]
    sums: list[int]


class Revoke(msgspec.Struct, frozen=True, tag=8, array_like=True):
    """Told by the owner: write there no more, and say when nothing is under way."""

    window: int


class Finished(msgspec.Struct, frozen=True, tag=9, array_like=True):
    """Told: nothing of mine is under way in it, and nothing will be."""

    window: int


class Goodbye(msgspec.Struct, frozen=True, tag=10, array_like=True):
    """Told before the connection is closed: nothing of mine is under way anywhere."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What a window is opened with."""

    version: int
    address: str
    instance: bytes
    mover: str
    window: int
    secret: bytes
    size: int
    access: Access


Reply = Opened | Answer
Message = Hello | Open | Opened | Arrived | Summing | Notify | Answer | Revoke | Finished | Goodbye
pack = msgspec.msgpack.Encoder().encode
_message = msgspec.msgpack.Decoder(Message)
_ticket = msgspec.msgpack.Decoder(Ticket)


class Malformed(TransferError):
    """What no endpoint of this version says."""


def unpack(body: bytes) -> Message:
    """Raises Malformed."""
    try:
        return _message.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"no message: {error}") from error


def unpack_ticket(body: bytes) -> Ticket:
    """Raises Malformed."""
    try:
        found = _ticket.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"no ticket: {error}") from error
    if found.version != VERSION:
        raise Malformed(f"a ticket of version {found.version}; this is {VERSION}")
    return found
