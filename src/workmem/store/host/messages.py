"""Bodies of the messages between a host's store and its clients, each packed beside where it is unpacked.

`unpack_*` raises Malformed on anything that `pack_*` could not have written.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from workmem.core.keys import KEY_BYTES, BlockKey
from workmem.core.outcomes import MissReason, TierName
from workmem.store.contract import BlockId, SaveState
from workmem.store.host.wire import (
    KEYS_MAX,
    MAGIC,
    OWNER_BYTES_MAX,
    PAGES_MAX,
    REASON_CODE,
    REASONS,
    STATE_CODE,
    STATES,
    TIER_CODE,
    TIERS,
    VERSION,
    WORKFLOW_BYTES_MAX,
    ErrorCode,
    Malformed,
    Refused,
)

T = TypeVar("T")
FolderIdentity = tuple[int, int]
"""Device and inode of the folder that a store has on disk: by whatever path, the same folder."""
NO_FOLDER: FolderIdentity = (0, 0)

_KEYS_AT_ONCE = 512
"""A form of so many takes 16 KiB, and there is one for each count that was asked for of late."""
_HELLO = struct.Struct("<8sHxxI")
_WELCOME = struct.Struct("<8sHxxI16sQQddQQ")
_ERROR = struct.Struct("<H")
_REGISTERED = struct.Struct(f"<{KEY_BYTES}sQ")
_LEASE = struct.Struct(f"<{KEY_BYTES}sdB")
_LEASED = struct.Struct("<QdIIB")
_SECONDS = struct.Struct("<d")
_QUARANTINE = struct.Struct("<QI")
_BLOCK = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sI")
_RESERVED = struct.Struct("<QdI")
_SETTLED = struct.Struct("<QIB")
_SETTLED_NOW = struct.Struct("<IBB")


class Welcome(msgspec.Struct, frozen=True):
    """The server's answer to a hello. The arena's and the notices' descriptors come along."""

    pid: int
    instance: bytes
    """16 random bytes, new with each start of a server: an arena is never taken for another."""
    session: int
    """Number of this connection, at random: how its client speaks of it once it is lost."""
    arena_bytes: int
    lease_s: float
    """Longest deadline of a lease; to hold for longer is to renew."""
    reservation_s: float
    """Deadline of a reservation, after which it cannot be committed."""
    folder: FolderIdentity = NO_FOLDER


class Leased(msgspec.Struct, frozen=True):
    """What a lease got, for `pages` pages held, in prefix order."""

    id: int
    ttl_s: float
    pages: int
    ready: int
    failed: MissReason | None
    numbers: memoryview
    """Where each frame starts in the arena, and after those the generation of each."""


class Reserved(msgspec.Struct, frozen=True):
    """What a reservation got. Page i has id `first` + i, is at `offsets[i]` and to be filled where its state is None."""

    first: int
    ttl_s: float
    states: tuple[SaveState | None, ...]
    offsets: tuple[int, ...]


def pack_hello(pid: int) -> bytes:
    """Body of HELLO."""
    return _HELLO.pack(MAGIC, VERSION, pid)


def unpack_hello(body: memoryview) -> tuple[int, int]:
    """(version, pid) of a HELLO. Longer bodies pass: a later version may say more."""
    if len(body) < _HELLO.size:
        raise Malformed(f"a hello of {len(body)} bytes")
    magic, version, pid = _HELLO.unpack_from(body)
    if magic != MAGIC:
        raise Malformed(f"a hello starts with {magic!r}, not {MAGIC!r}")
    return version, pid


def pack_welcome(welcome: Welcome) -> bytes:
    """Body of the reply to HELLO."""
    return _WELCOME.pack(
        MAGIC,
        VERSION,
        welcome.pid,
        welcome.instance,
        welcome.session,
        welcome.arena_bytes,
        welcome.lease_s,
        welcome.reservation_s,
        *welcome.folder,
    )


def unpack_welcome(body: memoryview) -> Welcome:
    """The reply to HELLO."""
    magic, version, *rest = fields(_WELCOME, body)
    if magic != MAGIC or version != VERSION:
        raise Malformed(f"a welcome of {magic!r} version {version}")
    *rest, device, inode = rest
    return Welcome(*rest, folder=(device, inode))


def pack_error(code: ErrorCode, text: str) -> bytes:
    """Body of ERROR."""
    return _ERROR.pack(code) + text.encode()[:1000]


def unpack_error(body: memoryview) -> Refused:
    """The exception that an ERROR stands for."""
    if len(body) < _ERROR.size:
        raise Malformed("an error without a code")
    try:
        code = ErrorCode(_ERROR.unpack_from(body)[0])
    except ValueError as error:
        raise Malformed(f"an error with an unknown code: {error}") from error
    return Refused(bytes(body[_ERROR.size :]).decode(errors="replace"), code)


def pack_registered(root: bytes, capacity_bytes: int) -> bytes:
    """Body of the reply to REGISTER, whose own is the namespace as JSON."""
    return _REGISTERED.pack(root, capacity_bytes)


def unpack_registered(body: memoryview) -> tuple[bytes, int]:
    """(root, bytes of dram a single lease could hold)."""
    root, capacity = fields(_REGISTERED, body)
    return root, capacity


def pack_keys(keys: Sequence[BlockKey]) -> bytes:
    """Keys as one blob."""
    blob = b"".join(keys)
    if len(blob) != KEY_BYTES * len(keys):
        raise Malformed(f"a block key is {KEY_BYTES} bytes")
    return blob


def unpack_lookup(body: memoryview) -> tuple[bytes, tuple[BlockKey, ...]]:
    """(root, keys) of a LOOKUP, whose body is the root and then the keys."""
    if len(body) < KEY_BYTES:
        raise Malformed("a lookup without a root")
    return bytes(body[:KEY_BYTES]), unpack_keys(body[KEY_BYTES:])


def pack_found(reason: MissReason | None, tiers: Sequence[TierName]) -> bytes:
    """Body of the reply to LOOKUP."""
    codes = TIER_CODE
    return bytes([REASON_CODE[reason], *[codes[tier] for tier in tiers]])


def unpack_found(body: memoryview) -> tuple[tuple[TierName, ...], MissReason | None]:
    """(tiers, reason) of a lookup."""
    if not len(body):
        raise Malformed("a lookup's reply without a reason")
    reason, tiers = _code(REASONS, body[0]), TIERS
    try:
        return tuple([tiers[code] for code in body[1:]]), reason
    except IndexError as error:
        raise Malformed("a lookup's reply names an unknown tier") from error


def pack_lease(root: bytes, ttl_s: float, owner: str, keys: Sequence[BlockKey]) -> bytes:
    """Body of LEASE."""
    # Told to people alone: what no text can be written with must not fail a load.
    name = owner.encode(errors="replace")[:OWNER_BYTES_MAX]
    body = b"".join((_LEASE.pack(root, ttl_s, len(name)), name, *keys))
    if len(body) != _LEASE.size + len(name) + KEY_BYTES * len(keys):
        raise Malformed(f"a block key is {KEY_BYTES} bytes")
    return body


def unpack_lease(body: memoryview) -> tuple[bytes, float, str, tuple[BlockKey, ...]]:
    """(root, ttl, owner, keys) of a LEASE."""
    if len(body) < _LEASE.size:
        raise Malformed(f"a lease request of {len(body)} bytes")
    root, ttl_s, size = _LEASE.unpack_from(body)
    start = _LEASE.size + size
    if start > len(body) or not 0 < ttl_s < 1e9:
        raise Malformed(f"a lease request for {ttl_s} s by an owner of {size} bytes")
    return root, ttl_s, bytes(body[_LEASE.size : start]).decode(errors="replace"), unpack_keys(body[start:])


def pack_leased(
    number: int,
    ttl_s: float,
    ready: int,
    failed: MissReason | None,
    offsets: array[int],
    generations: array[int],
) -> bytes:
    """Body of the reply to LEASE. Arrays of unsigned 64-bit numbers, native order (one host)."""
    head = _LEASED.pack(number, ttl_s, len(offsets), ready, REASON_CODE[failed])
    return b"".join((head, offsets, generations))


def unpack_leased(body: memoryview) -> Leased:
    """What a lease got; its numbers are a copy of those in `body`."""
    if len(body) < _LEASED.size:
        raise Malformed(f"a lease's reply of {len(body)} bytes")
    number, ttl_s, count, ready, failed = _LEASED.unpack_from(body)
    if len(body) != _LEASED.size + 16 * count or ready > count:
        raise Malformed(f"a lease's reply of {len(body)} bytes for {ready} of {count} pages")
    numbers = memoryview(bytes(body[_LEASED.size :])).cast("Q")
    return Leased(number, ttl_s, count, ready, _code(REASONS, failed), numbers)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Body of RELEASE, COMMIT, ABORT and FINISHED."""
    return struct.pack(f"<{len(ids)}Q", *ids)


def unpack_ids(body: memoryview) -> tuple[int, ...]:
    """Ids of leases or reservations, or numbers of sessions."""
    count, rest = divmod(len(body), 8)
    if rest or count > KEYS_MAX:
        raise Malformed(f"ids of {len(body)} bytes")
    return struct.unpack(f"<{count}Q", body)


def pack_renew(ttl_s: float, ids: Sequence[int]) -> bytes:
    """Body of RENEW."""
    return _SECONDS.pack(ttl_s) + pack_ids(ids)


def unpack_renew(body: memoryview) -> tuple[float, tuple[int, ...]]:
    """(ttl, lease ids) of a RENEW."""
    return unpack_seconds(body[: _SECONDS.size]), unpack_ids(body[_SECONDS.size :])


def pack_renewed(leases: Sequence[tuple[int, MissReason | None, bool]]) -> bytes:
    """Body of the reply to RENEW: (pages ready, why the next cannot arrive, still held) of each lease."""
    return b"".join(_SETTLED_NOW.pack(ready, REASON_CODE[failed], held) for ready, failed, held in leases)


def unpack_renewed(body: memoryview) -> list[tuple[int, MissReason | None, bool]]:
    """What became of each lease that was to be renewed."""
    if len(body) % _SETTLED_NOW.size:
        raise Malformed(f"a renewal's reply of {len(body)} bytes")
    return [
        (ready, _code(REASONS, failed), bool(held)) for ready, failed, held in _SETTLED_NOW.iter_unpack(body)
    ]


def pack_quarantine(lease: int, index: int) -> bytes:
    """Body of QUARANTINE."""
    return _QUARANTINE.pack(lease, index)


def unpack_quarantine(body: memoryview) -> tuple[int, int]:
    """(lease id, page index) of a QUARANTINE."""
    lease, index = fields(_QUARANTINE, body)
    return lease, index


def pack_reserve(root: bytes, blocks: Sequence[BlockId], workflow: str = "") -> bytes:
    """Body of RESERVE: for which workflow, and identities, with the tokens of each."""
    name = workflow.encode()[:WORKFLOW_BYTES_MAX]
    parts = [root, bytes([len(name)]), name]
    for block in blocks:
        parts.append(_BLOCK.pack(block.key, block.parent, block.depth))
        parts.append(struct.pack(f"<{len(block.tokens)}I", *block.tokens))
    return b"".join(parts)


def unpack_reserve(body: memoryview, block_tokens: int) -> tuple[list[BlockId], str]:
    """(blocks, workflow) of a RESERVE, whose root `root_of` told."""
    size = _BLOCK.size + 4 * block_tokens
    first = KEY_BYTES + 1
    if len(body) >= first:
        first += body[KEY_BYTES]
    workflow = bytes(body[KEY_BYTES + 1 : first]).decode(errors="replace")
    count, rest = divmod(len(body) - first, size)
    if rest or not 0 < count <= PAGES_MAX:
        raise Malformed(f"a reservation of {len(body)} bytes for blocks of {block_tokens} tokens")
    blocks: list[BlockId] = []
    for start in range(first, len(body), size):
        key, parent, depth = _BLOCK.unpack_from(body, start)
        tokens = struct.unpack_from(f"<{block_tokens}I", body, start + _BLOCK.size)
        blocks.append(BlockId(BlockKey(key), parent, tokens, depth))
    return blocks, workflow


def root_of(body: memoryview) -> bytes:
    """The root that a RESERVE starts with."""
    if len(body) < KEY_BYTES:
        raise Malformed("a reservation without a root")
    return bytes(body[:KEY_BYTES])


def pack_reserved(
    first: int, ttl_s: float, states: Sequence[SaveState | None], offsets: Sequence[int]
) -> bytes:
    """Body of the reply to RESERVE."""
    codes = bytes([STATE_CODE[state] for state in states])
    return _RESERVED.pack(first, ttl_s, len(states)) + codes + pack_ids(offsets)


def unpack_reserved(body: memoryview, count: int) -> Reserved:
    """What a reservation of `count` pages got."""
    if len(body) != _RESERVED.size + 9 * count:
        raise Malformed(f"a reservation's reply of {len(body)} bytes for {count} pages")
    first, ttl_s, stated = _RESERVED.unpack_from(body)
    if stated != count:
        raise Malformed(f"a reservation's reply for {stated} pages, not {count}")
    start = _RESERVED.size
    states = tuple(_code(STATES, code) for code in body[start : start + count])
    return Reserved(first, ttl_s, states, unpack_ids(body[start + count :]))


def pack_states(states: Sequence[SaveState]) -> bytes:
    """Body of the reply to COMMIT."""
    return bytes([STATE_CODE[state] for state in states])


def unpack_states(body: memoryview, count: int) -> list[SaveState]:
    """How each of `count` commits ended."""
    states = [_code(STATES, code) for code in body]
    if len(states) != count:
        raise Malformed(f"a commit's reply for {len(states)} pages, not {count}")
    return [state for state in states if state is not None]


def pack_seconds(seconds: float) -> bytes:
    """Body of FLUSH."""
    return _SECONDS.pack(seconds)


def unpack_seconds(body: memoryview) -> float:
    """A duration."""
    (seconds,) = fields(_SECONDS, body)
    if not 0 <= seconds < 1e9:
        raise Malformed(f"a duration of {seconds} s")
    return seconds


def pack_settled(lease: int, ready: int, failed: MissReason | None) -> bytes:
    """Body of SETTLED."""
    return _SETTLED.pack(lease, ready, REASON_CODE[failed])


def unpack_settled(body: memoryview) -> tuple[int, int, MissReason | None]:
    """(lease id, pages ready, why the next cannot arrive) of a SETTLED."""
    lease, ready, failed = fields(_SETTLED, body)
    return lease, ready, _code(REASONS, failed)


def unpack_keys(blob: memoryview) -> tuple[BlockKey, ...]:
    """The keys of a blob."""
    count, rest = divmod(len(blob), KEY_BYTES)
    if rest or count > KEYS_MAX:
        raise Malformed(f"keys of {len(blob)} bytes")
    if count <= _KEYS_AT_ONCE:
        return _keys_of(count).unpack(blob)
    # Many at a time costs half of slicing them out one by one.
    keys: list[BlockKey] = []
    for start in range(0, count, _KEYS_AT_ONCE):
        keys += _keys_of(min(_KEYS_AT_ONCE, count - start)).unpack_from(blob, start * KEY_BYTES)
    return tuple(keys)


@lru_cache(maxsize=256)
def _keys_of(count: int) -> struct.Struct:
    return struct.Struct(f"{KEY_BYTES}s" * count)


def fields(form: struct.Struct, body: memoryview) -> tuple[Any, ...]:
    """The fields of a body that is of one form."""
    if len(body) != form.size:
        raise Malformed(f"a body of {len(body)} bytes where {form.size} belong")
    return form.unpack(body)


def _code(table: tuple[T, ...], code: int) -> T:
    try:
        return table[code]
    except IndexError as error:
        raise Malformed(f"code {code} stands for nothing") from error
