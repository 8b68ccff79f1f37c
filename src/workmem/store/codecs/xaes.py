"""XAES-256-GCM: AES-256-GCM under a key made for each message from the first half of a 24-byte nonce.

A random 96-bit nonce alone is safe for some 2^32 messages under one key, which a busy disk writes within
its life. With 192 bits nobody has to count, and no state can be lost. The construction is the published one
(c2sp.org/XAES-256-GCM), and its test vectors hold. Needs the `encryption` extra.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from workmem.core.errors import IntegrityError

NONCE_BYTES = 24
TAG_BYTES = 16
_HALF = 12
_BLOCK_BITS = 128
_REDUCTION = 0x87


class Xaes:
    """One 32-byte key. May be used from any thread."""

    __slots__ = ("_aes", "_mask")

    def __init__(self, key: bytes) -> None:
        self._aes = Cipher(algorithms.AES256(key), modes.ECB())  # noqa: S305 - the block cipher inside CMAC
        first = int.from_bytes(self._aes.encryptor().update(bytes(16)), "big")
        carried = _REDUCTION if first >> (_BLOCK_BITS - 1) else 0
        self._mask = (first << 1) % (1 << _BLOCK_BITS) ^ carried

    def encrypt(self, nonce: bytes, plain: bytes | memoryview, bound: bytes, into: memoryview) -> bytes:
        """Fill `into` (as long as `plain`) and return the tag, which also covers `bound`."""
        key = algorithms.AES256(self._message_key(nonce))
        work = Cipher(key, modes.GCM(nonce[_HALF:])).encryptor()
        work.authenticate_additional_data(bound)
        work.update_into(plain, into)
        work.finalize()
        return work.tag

    def decrypt(
        self, nonce: bytes, sealed: bytes | memoryview, tag: bytes, bound: bytes, into: memoryview
    ) -> None:
        """Fill `into` (as long as `sealed`). Raises IntegrityError, `into` zeroed, unless all is as it was encrypted."""
        if len(tag) != TAG_BYTES:
            raise IntegrityError(f"tag has {len(tag)} bytes, not {TAG_BYTES}")
        key = algorithms.AES256(self._message_key(nonce))
        work = Cipher(key, modes.GCM(nonce[_HALF:], tag)).decryptor()
        work.authenticate_additional_data(bound)
        work.update_into(sealed, into)
        try:
            work.finalize()
        except InvalidTag:
            # What was decrypted so far is whatever an attacker chose: nobody gets to see it.
            into[:] = bytes(len(into))
            raise IntegrityError(
                "sealed bytes do not open: changed, moved from elsewhere, or of another key"
            ) from None

    def _message_key(self, nonce: bytes) -> bytes:
        """AES-CMAC, twice over one block, as a key derivation (NIST SP 800-108 in counter mode)."""
        if len(nonce) != NONCE_BYTES:
            raise IntegrityError(f"nonce has {len(nonce)} bytes, not {NONCE_BYTES}")
        blocks = b"".join(
            (int.from_bytes(bytes((0, count)) + b"X\0" + nonce[:_HALF], "big") ^ self._mask).to_bytes(
                16, "big"
            )
            for count in (1, 2)
        )
        return self._aes.encryptor().update(blocks)
