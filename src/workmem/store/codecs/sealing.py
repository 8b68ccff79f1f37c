"""Encryption at rest: what a page's header keeps secret, its payload, and batches of the journal.

Compression comes first, sealing last. Everything is bound to its place, so a sealed page that is moved to another
block, namespace or depth does not open. Byte counts and the key story are in docs/internals/codecs.md.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from workmem.core.errors import ConfigError, IntegrityError
from workmem.store.codecs.contract import UnreadableError
from workmem.store.codecs.key_file import read_key

if TYPE_CHECKING:
    from workmem.store.codecs.xaes import Xaes

KEY_ID_BYTES = 8
NONCE_BYTES = 24
TAG_BYTES = 16
_BOUND = struct.Struct("<32s32s32sIQQB")


class PagePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a page belongs and what it is: sealed pages open at their own place only."""

    root: bytes
    key: bytes
    parent: bytes
    depth: int
    payload_bytes: int
    """Of the page as engines see it."""
    stored_bytes: int
    """After the codec."""
    codec: int

    def bound(self, label: bytes) -> bytes:
        """The bytes that a seal covers besides what it hides."""
        fields = (
            self.root,
            self.key,
            self.parent,
            self.depth,
            self.payload_bytes,
            self.stored_bytes,
            self.codec,
        )
        return b"workmem.page.1\0" + label + b"\0" + _BOUND.pack(*fields)


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """What the page header keeps, in clear, to open a page: 48 bytes, and the secret part of the header."""

    key_id: bytes
    nonce: bytes
    tag: bytes
    """Of the payload, whose sealed length is its stored length."""
    secret: bytes
    """The header's secret part, sealed, 16 bytes longer than in clear."""


class PageCipher:
    """One key file's worth of sealing. Keys of their own for headers, payloads and journal follow from it."""

    __slots__ = ("_header", "_journal", "_payload", "key_id")

    def __init__(self, key: bytes) -> None:
        # The package is an extra: who asks for a cipher has been told of it by `open_keyring`.
        from workmem.store.codecs.xaes import Xaes  # noqa: PLC0415

        self.key_id = hashlib.sha256(derived(key, b"key-id")).digest()[:KEY_ID_BYTES]
        """Names the key in headers and tells nothing else about it."""
        self._header: Xaes = Xaes(derived(key, b"header"))
        self._payload: Xaes = Xaes(derived(key, b"payload"))
        self._journal: Xaes = Xaes(derived(key, b"journal"))

    def seal(self, place: PagePlace, secret: bytes, stored: memoryview, into: memoryview) -> Seal:
        """Seal a page: the `secret` part of its header, and `stored` into `into`, which are equally long."""
        nonce = os.urandom(NONCE_BYTES)
        hidden = bytearray(len(secret))
        secret_tag = self._header.encrypt(nonce, secret, place.bound(b"header"), memoryview(hidden))
        tag = self._payload.encrypt(nonce, stored, place.bound(b"payload"), into)
        return Seal(key_id=self.key_id, nonce=nonce, tag=tag, secret=bytes(hidden) + secret_tag)

    def open_secret(self, place: PagePlace, seal: Seal) -> bytes:
        """The secret part of the header. Raises IntegrityError where it is not what was sealed for `place`."""
        self._require(seal.key_id)
        return _opened(self._header, seal.nonce, seal.secret, place.bound(b"header"))

    def open_payload(self, place: PagePlace, seal: Seal, sealed: memoryview, into: memoryview) -> None:
        """The stored bytes, into `into`. Raises IntegrityError, `into` zeroed, where they are not those of `place`."""
        self._require(seal.key_id)
        if len(sealed) != place.stored_bytes or len(into) != len(sealed):
            raise IntegrityError(
                f"sealed page has {len(sealed)} bytes for a target of {len(into)}, its header says {place.stored_bytes}"
            )
        self._payload.decrypt(seal.nonce, sealed, seal.tag, place.bound(b"payload"), into)

    def seal_batch(self, context: bytes, plain: bytes) -> bytes:
        """A batch of journal records, bound to `context` (store id and sequence number): 48 bytes longer."""
        nonce = os.urandom(NONCE_BYTES)
        hidden = bytearray(len(plain))
        tag = self._journal.encrypt(nonce, plain, _batch_bound(context), memoryview(hidden))
        return b"".join((self.key_id, nonce, hidden, tag))

    def open_batch(self, context: bytes, sealed: bytes) -> bytes:
        """What `seal_batch` sealed. Raises IntegrityError on anything else."""
        if len(sealed) < KEY_ID_BYTES + NONCE_BYTES + TAG_BYTES:
            raise IntegrityError(f"sealed batch has {len(sealed)} bytes, too few to be one")
        self._require(sealed[:KEY_ID_BYTES])
        start = KEY_ID_BYTES + NONCE_BYTES
        return _opened(self._journal, sealed[KEY_ID_BYTES:start], sealed[start:], _batch_bound(context))

    def _require(self, key_id: bytes) -> None:
        if key_id != self.key_id:
            raise UnreadableError(f"sealed under key {key_id.hex()}, this is key {self.key_id.hex()}")


class Keyring:
    """The key that seals, and older ones that still open."""

    __slots__ = ("_by_id", "current")

    def __init__(self, current: PageCipher, older: Sequence[PageCipher] = ()) -> None:
        self.current = current
        self._by_id = {cipher.key_id: cipher for cipher in (current, *older)}

    def knows(self, key_id: bytes) -> bool:
        """Whether what names `key_id` can be opened."""
        return key_id in self._by_id

    def cipher(self, key_id: bytes) -> PageCipher:
        """The cipher that opens what names `key_id`. Raises UnreadableError, a miss, if there is none."""
        found = self._by_id.get(key_id)
        if found is None:
            raise UnreadableError(f"sealed under key {key_id.hex()}, for which no key file is configured")
        return found


def open_keyring(key_file: str | Path, older_files: Sequence[str | Path] = (), *, path: str) -> Keyring:
    """The keys in these files. Raises ConfigError, starting with `path`, on any that cannot be used."""
    keys = [read_key(key_file, path)]
    keys += [read_key(file, f"{path} (older key {index})") for index, file in enumerate(older_files)]
    with encryption_extra(path):
        ciphers = [PageCipher(key) for key in keys]
    return Keyring(ciphers[0], ciphers[1:])


@contextmanager
def encryption_extra(path: str) -> Generator[None]:
    """Where it is not installed that is said, as a ConfigError that starts with `path`."""
    try:
        yield
    except ImportError as problem:
        raise ConfigError(
            f"{path}: encryption needs the package cryptography; install it with: pip install cryptography"
        ) from problem


def derived(key: bytes, purpose: bytes) -> bytes:
    """HKDF-Expand (RFC 5869) with SHA-256, one block; the key is uniform, so there is nothing to extract."""
    return hmac.digest(key, b"workmem.at-rest.1 " + purpose + b"\x01", "sha256")


def _opened(cipher: Xaes, nonce: bytes, sealed: bytes, bound: bytes) -> bytes:
    """`sealed` ends with its tag."""
    if len(sealed) < TAG_BYTES:
        raise IntegrityError(f"sealed part has {len(sealed)} bytes, less than its tag")
    plain = bytearray(len(sealed) - TAG_BYTES)
    cipher.decrypt(nonce, sealed[:-TAG_BYTES], sealed[-TAG_BYTES:], bound, memoryview(plain))
    return bytes(plain)


def _batch_bound(context: bytes) -> bytes:
    return b"workmem.journal.1\0" + context
