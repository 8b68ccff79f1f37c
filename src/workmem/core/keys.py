"""Block identity: a SHA-256 chain over token ids that starts at the namespace.

`BlockKey` is the full 32-byte digest. A key names a block *and everything before it*, so equal keys
mean equal prefixes; comparing keys is comparing contexts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
KEY_BYTES = 32


def block_key(parent: bytes, tokens: Sequence[int], extra: bytes = b"") -> BlockKey:
    """Key of the block holding `tokens` behind `parent`. `extra` forks the chain (adapter input, media)."""
    body = struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)
    return BlockKey(hashlib.sha256(parent + body + extra).digest())


def block_keys(root: bytes, tokens: Sequence[int], block_tokens: int, extra: bytes = b"") -> list[BlockKey]:
    """Keys of all full blocks of `tokens`; the tail shorter than a block has no key."""
    keys: list[BlockKey] = []
    parent = root
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = block_key(parent, tokens[start : start + block_tokens], extra)
        keys.append(parent)
    return keys
