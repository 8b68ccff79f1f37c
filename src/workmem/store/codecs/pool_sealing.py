"""Encryption of what leaves the host: objects of a pool that others reach, and the words stores exchange there.

Same key files, same construction and same derivation as at rest (`sealing`); the keys that follow from a file are others, so
that nothing sealed for one place opens at the other. Nonces are 24 random bytes from the system, which neither
processes nor restarts have to agree about. Scheme and byte counts: docs/internals/codecs.md.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from typing import TYPE_CHECKING

from workmem.core.errors import IntegrityError
from workmem.store.codecs.key_file import read_key
from workmem.store.codecs.sealing import KEY_ID_BYTES, NONCE_BYTES, TAG_BYTES, derived, encryption_extra

if TYPE_CHECKING:
    from workmem.store.codecs.xaes import Xaes

SEAL_BYTES = NONCE_BYTES + TAG_BYTES
"""In front of what is sealed: its nonce, then its tag."""
_NAME_BYTES = 20


class PoolCipher:
    """One key file's worth of sealing for a pool. May be used from any thread."""

    __slots__ = ("_names", "_pages", "_words", "key_id")

    def __init__(self, key: bytes) -> None:
        # The package is an extra: who asks for a cipher has been told of it by `open_pool_cipher`.
        from workmem.store.codecs.xaes import Xaes  # noqa: PLC0415

        self.key_id = hashlib.sha256(derived(key, b"pool-key-id")).digest()[:KEY_ID_BYTES]
        """Names the key in names of objects and tells nothing else about it."""
        self._names = derived(key, b"pool-name")
        self._pages: Xaes = Xaes(derived(key, b"pool-page"))
        self._words: Xaes = Xaes(derived(key, b"pool-word"))

    def name(self, plain: str) -> str:
        """What to call an object in place of `plain`, which says whose it is and may be guessed."""
        digest = hmac.digest(self._names, plain.encode(), "sha256")
        return digest[:_NAME_BYTES].hex()

    def seal_page(self, name: str, index: int, plain: memoryview, into: memoryview) -> None:
        """Fill `into`, SEAL_BYTES longer than `plain`: page `index` of the object `name`, and of no other."""
        nonce = os.urandom(NONCE_BYTES)
        tag = self._pages.encrypt(nonce, plain, _bound(name, index), into[SEAL_BYTES:])
        into[:SEAL_BYTES] = nonce + tag

    def open_page(self, name: str, index: int, sealed: memoryview, into: memoryview) -> None:
        """What `seal_page` sealed under this name and index. Raises IntegrityError, `into` zeroed, on anything else."""
        nonce, tag = bytes(sealed[:NONCE_BYTES]), bytes(sealed[NONCE_BYTES:SEAL_BYTES])
        self._pages.decrypt(nonce, sealed[SEAL_BYTES:], tag, _bound(name, index), into)

    def seal_word(self, name: str, plain: bytes) -> bytes:
        """A small value, bound to its name: SEAL_BYTES longer."""
        nonce = os.urandom(NONCE_BYTES)
        hidden = bytearray(len(plain))
        tag = self._words.encrypt(nonce, plain, _bound(name, 0), memoryview(hidden))
        return b"".join((nonce, tag, hidden))

    def open_word(self, name: str, sealed: bytes) -> bytes:
        """What `seal_word` sealed under this name. Raises IntegrityError on anything else."""
        if len(sealed) < SEAL_BYTES:
            raise IntegrityError(f"sealed word has {len(sealed)} bytes, too few to be one")
        plain = bytearray(len(sealed) - SEAL_BYTES)
        nonce, tag = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:SEAL_BYTES]
        self._words.decrypt(nonce, sealed[SEAL_BYTES:], tag, _bound(name, 0), memoryview(plain))
        return bytes(plain)


def open_pool_cipher(key_file: str | Path, path: str) -> PoolCipher:
    """The cipher of the key in a file. Raises ConfigError, starting with the setting's `path`, where it cannot be used."""
    key = read_key(Path(key_file).expanduser(), path)
    with encryption_extra(path):
        return PoolCipher(key)


def _bound(name: str, index: int) -> bytes:
    return b"workmem.pool.1\0" + index.to_bytes(4, "little") + name.encode()
