"""Bodies of the messages that concern a store as a whole, as `messages` has those of leases and saves."""

from __future__ import annotations

import struct

import msgspec

from workmem.core.errors import ConfigError
from workmem.store.host.messages import fields
from workmem.store.host.wire import Malformed
from workmem.store.selector import Purged, PurgeSelector

_RATE = struct.Struct("<Q")
_SCRUBBED = struct.Struct("<BQQQQ")


class Scrubbed(msgspec.Struct, frozen=True):
    """How far a scrub is."""

    has_ended: bool = False
    pages: int = 0
    bytes: int = 0
    damaged: int = 0
    """Pages that were not what was written; they have left service."""
    unreadable: int = 0


def pack_purge(selector: PurgeSelector, *, is_rehearsal: bool) -> bytes:
    """Body of PURGE. A rehearsal only counts what would go. The reply is a `Purged` as JSON."""
    return bytes([is_rehearsal]) + msgspec.json.encode(selector)


def unpack_purge(body: memoryview) -> tuple[PurgeSelector, bool]:
    """(selector, whether it only counts) of a PURGE."""
    if not len(body) or body[0] > 1:
        raise Malformed("a purge that does not say whether it is a rehearsal")
    try:
        return msgspec.json.decode(body[1:], type=PurgeSelector), bool(body[0])
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise Malformed(f"a purge of what cannot be chosen: {error}") from error


def unpack_purged(body: memoryview) -> Purged:
    """What a PURGE took out, or would."""
    try:
        return msgspec.json.decode(body, type=Purged)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"a purge's reply that is none: {error}") from error


def pack_scrub(bytes_per_s: int) -> bytes:
    """Body of SCRUB."""
    return _RATE.pack(bytes_per_s)


def unpack_scrub(body: memoryview) -> int:
    """Bytes a second to read at most."""
    (rate,) = fields(_RATE, body)
    if not rate:
        raise Malformed("a scrub that reads nothing")
    return rate


def pack_scrubbed(scrubbed: Scrubbed) -> bytes:
    """Body of the reply to SCRUB."""
    return _SCRUBBED.pack(*msgspec.structs.astuple(scrubbed))


def unpack_scrubbed(body: memoryview) -> Scrubbed:
    """How far a scrub is."""
    has_ended, *counts = fields(_SCRUBBED, body)
    return Scrubbed(bool(has_ended), *counts)
