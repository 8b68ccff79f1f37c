"""What a client says about blocks it cares for: the messages, and a session's answers to them.

A body is a head as JSON, behind its length (2 bytes), and keys. Pins belong to the owner that is named, not to the
connection: they end with their time, and outlive the client that set them. Nothing here is asked often.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from workmem.core.errors import CapacityError, ClientError
from workmem.core.keys import KEY_BYTES, BlockKey
from workmem.core.outcomes import TierName
from workmem.policy.order import Prospect
from workmem.store.contract import Steering
from workmem.store.host import messages
from workmem.store.host.wire import ErrorCode, Kind, Malformed, Refused

_HEAD = struct.Struct("<H")
_COUNT = struct.Struct("<Q")
Root = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Name = Annotated[str, Meta(max_length=512)]


class PinHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of PIN. The reply is a `PinResult` as JSON."""

    root: Root
    owner: Name
    name: Name
    ttl_s: Annotated[float, Meta(le=1e9)]


class UnpinHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of UNPIN, without keys. The reply is one byte: whether there was such a pin."""

    owner: Name
    name: Name


class AnnounceHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of ANNOUNCE. The reply is a count (8)."""

    root: Root
    prospect: Annotated[int, Meta(ge=0, le=255)]


class BindHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of BIND. The reply is a count (8)."""

    root: Root
    group: Name


class QuotaHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of QUOTA, without keys. The reply is empty."""

    group: Name
    tier: TierName
    floor_bytes: Annotated[int, Meta(ge=0, le=2**62)]
    ceiling_bytes: Annotated[int, Meta(ge=0, le=2**62)] | None


Head = PinHead | UnpinHead | AnnounceHead | BindHead | QuotaHead
H = TypeVar("H", bound=Head)


def pack_said(head: Head, keys: Sequence[BlockKey] = ()) -> bytes:
    """Body of any of these messages. Raises ClientError on what the other end would take for nonsense."""
    try:
        # The server hangs up on nonsense, and with the connection go the leases of everybody in this process.
        msgspec.convert(msgspec.structs.asdict(head), type(head))
    except msgspec.ValidationError as error:
        raise ClientError(f"a {type(head).__name__.removesuffix('Head').lower()}: {error}") from error
    said = msgspec.json.encode(head)
    return _HEAD.pack(len(said)) + said + messages.pack_keys(keys)


def unpack_said(body: memoryview, form: type[H]) -> tuple[H, tuple[BlockKey, ...]]:
    """(head, keys)."""
    if len(body) < _HEAD.size:
        raise Malformed("a message without the length of its head")
    end = _HEAD.size + _HEAD.unpack_from(body)[0]
    try:
        head = msgspec.json.decode(body[_HEAD.size : end], type=form)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"a {form.__name__} that is none: {error}") from error
    return head, messages.unpack_keys(body[end:])


def pack_count(count: int) -> bytes:
    """Reply to ANNOUNCE and BIND."""
    return _COUNT.pack(count)


def unpack_count(body: memoryview) -> int:
    """How many of the keys it was true of."""
    if len(body) != _COUNT.size:
        raise Malformed(f"a count of {len(body)} bytes")
    return _COUNT.unpack(body)[0]


class Steered:
    """Answers of one session. `check_root` refuses a root that was never registered."""

    def __init__(self, store: Steering, check_root: Callable[[bytes], object]) -> None:
        self._store = store
        self._check_root = check_root
        answers: dict[Kind, Callable[[memoryview], bytes]] = {
            Kind.PIN: self._pin,
            Kind.UNPIN: self._unpin,
            Kind.ANNOUNCE: self._announce,
            Kind.BIND: self._bind,
            Kind.QUOTA: self._quota,
        }
        self.answers = {kind: _refusing(answer) for kind, answer in answers.items()}

    def _pin(self, body: memoryview) -> bytes:
        head, keys = unpack_said(body, PinHead)
        self._check_root(head.root)
        pinned = self._store.pin(head.root, keys, owner=head.owner, name=head.name, ttl_s=head.ttl_s)
        return msgspec.json.encode(pinned)

    def _unpin(self, body: memoryview) -> bytes:
        head, _ = unpack_said(body, UnpinHead)
        return bytes([self._store.unpin(head.owner, head.name)])

    def _announce(self, body: memoryview) -> bytes:
        head, keys = unpack_said(body, AnnounceHead)
        self._check_root(head.root)
        try:
            prospect = Prospect(head.prospect)
        except ValueError as error:
            raise Malformed(f"an unknown prospect: {error}") from error
        return pack_count(self._store.announce(head.root, keys, prospect))

    def _bind(self, body: memoryview) -> bytes:
        head, keys = unpack_said(body, BindHead)
        self._check_root(head.root)
        return pack_count(self._store.bind(head.root, keys, head.group))

    def _quota(self, body: memoryview) -> bytes:
        head, _ = unpack_said(body, QuotaHead)
        self._store.set_quota(
            head.group, head.tier, floor_bytes=head.floor_bytes, ceiling_bytes=head.ceiling_bytes
        )
        return b""


def _refusing(answer: Callable[[memoryview], bytes]) -> Callable[[memoryview], bytes]:
    """What the caller did wrong is a reply and not the end of its connection."""

    def answered(body: memoryview) -> bytes:
        try:
            return answer(body)
        except ClientError as error:
            raise Refused(str(error), ErrorCode.CLIENT) from error
        except CapacityError as error:
            raise Refused(str(error), ErrorCode.CAPACITY) from error

    return answered
