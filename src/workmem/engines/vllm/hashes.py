"""The hashes that vLLM gives to blocks with `--prefix-caching-hash-algo sha256_cbor`, computed without it.

A hash is the SHA-256 of (hash of the block before, token ids, what else decides the block) in canonical CBOR
(RFC 8949, section 4.2.1), of which only the few types that occur are written here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

SEED = "vllm-none-hash"
"""Behind which a chain starts, unless vLLM runs with PYTHONHASHSEED set: then that."""
_UINT, _NEGATIVE, _BYTES, _TEXT, _ARRAY = 0x00, 0x20, 0x40, 0x60, 0x80
_NULL = b"\xf6"

Encodable = int | bytes | str | None | Sequence["Encodable"]


def encode(value: Encodable) -> bytes:
    """Canonical CBOR of integers of up to 64 bits, bytes, text, None, and sequences of these. Raises OverflowError beyond."""
    if value is None:
        return _NULL
    if isinstance(value, int):
        return _head(_UINT, value) if value >= 0 else _head(_NEGATIVE, -1 - value)
    if isinstance(value, bytes):
        return _head(_BYTES, len(value)) + value
    if isinstance(value, str):
        body = value.encode()
        return _head(_TEXT, len(body)) + body
    return _head(_ARRAY, len(value)) + b"".join(map(encode, value))


def block_hashes(
    tokens: Sequence[int],
    block_tokens: int,
    *,
    salt: str = "",
    adapter: tuple[str, str] | None = None,
    seed: str = SEED,
) -> list[bytes]:
    """Hashes of all full blocks of a prompt of text. `salt`: the request's `cache_salt`; `adapter`: name and path of its LoRA."""
    of_all: list[Encodable] = [("lora", *adapter)] if adapter else []
    of_first = [*of_all, ("cache_salt", salt)] if salt else of_all
    extra, later = encode(of_first or None), encode(of_all or None)
    size = _head(_ARRAY, block_tokens)
    found: list[bytes] = []
    parent = hashlib.sha256(encode(seed)).digest()
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        body = b"".join(map(_token, tokens[start : start + block_tokens]))
        parent = hashlib.sha256(b"\x83\x58\x20" + parent + size + body + extra).digest()
        found.append(parent)
        extra = later
    return found


def event_hash(full: bytes) -> int:
    """How vLLM's events name a block: the low 64 bits, unless VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 has them whole."""
    return int.from_bytes(full[-8:], "big")


def _head(kind: int, value: int) -> bytes:
    """Type and the shortest form of a length or number."""
    if value < 24:
        return bytes((kind | value,))
    size = 1 if value < 1 << 8 else 2 if value < 1 << 16 else 4 if value < 1 << 32 else 8
    return bytes((kind | 23 + size.bit_length(),)) + value.to_bytes(size, "big")


@lru_cache(maxsize=1 << 18)
def _token(value: int) -> bytes:
    return _head(_UINT, value)
