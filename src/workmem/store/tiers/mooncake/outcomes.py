"""What a call to Mooncake came to, told apart as far as its return codes and the clock allow.

Its 0 is not believed: a put of a key that another writer has begun and not ended returns 0 and stores nothing.
"""

from __future__ import annotations

from enum import StrEnum

from workmem.transfer.mooncake_library import LATE_S


class PutResult(StrEnum):
    """One object after a put, and after a look at where it lies."""

    STORED = "stored"
    ALREADY_THERE = "already_there"
    """This store knew, and put nothing. What it did not know of is STORED: names say what the bytes are."""
    IN_PROGRESS = "in_progress"
    """Another writer has begun it and not ended, or died over it; nothing was stored."""
    NO_ROOM = "no_room"
    OWNER_DEAD = "owner_dead"
    """The process that should have taken it does not answer."""
    TIMEOUT = "timeout"
    """As OWNER_DEAD, and it cost the whole deadline."""
    MASTER_AWAY = "master_away"
    BROKEN = "broken"
    """Any other answer: a setting or a call is wrong."""


class GetResult(StrEnum):
    """One object after a get."""

    ARRIVED = "arrived"
    MISS = "miss"
    LEASE_LOST = "lease_lost"
    """Reading took longer than the master held the object; what arrived is not to be used."""
    OWNER_DEAD = "owner_dead"
    TIMEOUT = "timeout"
    MASTER_AWAY = "master_away"
    BROKEN = "broken"
    """Any other answer: it is not as long as it was told to be, say."""
    TAMPERED = "tampered"
    """Not all of its pages open under this store's key; those that do not are zeros."""


SILENT = frozenset({GetResult.OWNER_DEAD, GetResult.TIMEOUT})
"""The peer did not answer: it is left alone for a while."""
NO_ROOM, NOT_FOUND, HAS_LEASE, LEASE_LOST = -200, -704, -706, -707
TRANSFER_FAILED = -800
NO_MASTER = frozenset({-900, -901})
"""It refuses the connection, or takes it and says nothing."""

_PUTS = {0: PutResult.STORED, NO_ROOM: PutResult.NO_ROOM}
_GETS = {NOT_FOUND: GetResult.MISS, LEASE_LOST: GetResult.LEASE_LOST}


def put_result(code: int, seconds: float) -> PutResult:
    """What a put returned after `seconds`. STORED is to be checked."""
    if code == TRANSFER_FAILED:
        return PutResult.TIMEOUT if seconds >= LATE_S else PutResult.OWNER_DEAD
    if code in NO_MASTER:
        return PutResult.MASTER_AWAY
    return _PUTS.get(code, PutResult.BROKEN)


def get_result(code: int, wanted: int, seconds: float) -> GetResult:
    """What a get of `wanted` bytes returned after `seconds`."""
    if code == wanted:
        return GetResult.ARRIVED
    if code == TRANSFER_FAILED:
        return GetResult.TIMEOUT if seconds >= LATE_S else GetResult.OWNER_DEAD
    if code in NO_MASTER:
        return GetResult.MASTER_AWAY
    return _GETS.get(code, GetResult.BROKEN)
