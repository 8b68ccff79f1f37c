"""What a client and the server of a host's store say to each other.

A message is a prefix (length of the body, kind, tag; 8 bytes) and a body of packed little-endian fields.
A reply carries the tag of its request. Keys travel as one blob of 32-byte keys, what a lease grants as
arrays; no byte of a page ever does. Layout of every body: docs/internals/host-store.md.

Here: the prefix, the kinds and the codes; the bodies are in `messages`.
"""

from __future__ import annotations

import struct
from enum import IntEnum, unique

from workmem.core.errors import TransferError
from workmem.core.outcomes import MissReason, TierName
from workmem.store.contract import SaveState

MAGIC = b"WMHOST\x00\x00"
VERSION = 4
"""Of this protocol. Ends of two versions do not talk: the page format differs with it."""
PREFIX = struct.Struct("<IHH")
BODY_BYTES_MAX = 8 * 2**20
KEYS_MAX = 1 << 17
"""In one message: a context of two million tokens in blocks of 16."""
PAGES_MAX = 256
"""Of a reservation in one message."""
OWNER_BYTES_MAX = 200
WORKFLOW_BYTES_MAX = 255


class Malformed(TransferError):
    """A message that the other end cannot have meant: the connection it came by is of no more use."""


class Refused(TransferError):
    """The server answered a request with an error; the connection goes on."""

    def __init__(self, message: str, code: ErrorCode) -> None:
        super().__init__(message)
        self.code = code


@unique
class Kind(IntEnum):
    """Of a message. Those marked so are told and not answered."""

    HELLO = 1
    REGISTER = 2
    LOOKUP = 3
    LEASE = 4
    RENEW = 5
    RELEASE = 6
    """Told."""
    QUARANTINE = 7
    """Told."""
    RESERVE = 8
    COMMIT = 9
    ABORT = 10
    """Told."""
    FLUSH = 11
    GAUGES = 12
    AUDIT = 13
    GOODBYE = 14
    """Told: nothing reserved is being written any more."""
    SETTLED = 15
    """Told by the server, on the socket of notices."""
    ERROR = 16
    """A reply."""
    PURGE = 17
    SCRUB = 18
    PIN = 19
    UNPIN = 20
    ANNOUNCE = 21
    BIND = 22
    QUOTA = 23
    FINISHED = 24
    """What GOODBYE says, of sessions whose connection is lost, by their numbers."""


@unique
class ErrorCode(IntEnum):
    """Why a request got an ERROR."""

    VERSION = 1
    STRANGER = 2
    """The process cannot be told apart from others, or is not this user's."""
    BOUND = 3
    CAPACITY = 4
    UNREGISTERED = 5
    UNAVAILABLE = 7
    CLIENT = 8
    """What was asked cannot be done, whoever asks."""


REASONS: tuple[MissReason | None, ...] = (
    None,
    MissReason.COLD,
    MissReason.EVICTED,
    MissReason.CORRUPT,
    MissReason.UNAVAILABLE,
    MissReason.EXPIRED,
    MissReason.DISABLED,
    MissReason.CHANGED,
    MissReason.TAIL,
)
REASON_CODE: dict[MissReason | None, int] = {reason: code for code, reason in enumerate(REASONS)}
TIERS: tuple[TierName, ...] = (TierName.VRAM, TierName.DRAM, TierName.SSD, TierName.REMOTE)
TIER_CODE: dict[TierName, int] = {tier: code for code, tier in enumerate(TIERS)}
STATES: tuple[SaveState | None, ...] = (
    None,
    SaveState.STORED,
    SaveState.ALREADY_THERE,
    SaveState.DROPPED,
)
"""None: reserved, go on and fill it."""
STATE_CODE: dict[SaveState | None, int] = {state: code for code, state in enumerate(STATES)}
