"""The journal of the ssd tier: which page lies where, as batches of records that count or do not.

Format, byte by byte, in docs/internals/journal-format.md. A batch is whole or absent: replay stops at
the first that is not, and the file is cut there before anything is added.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from workmem.core.errors import IntegrityError, InvariantError
from workmem.store.codecs.contract import UnreadableError
from workmem.store.codecs.sealing import KEY_ID_BYTES, Keyring
from workmem.store.device import Access, BlockDevice, DeviceFile
from workmem.store.tiers.journal_records import count_records, decode, encode

if TYPE_CHECKING:
    from workmem.store.tiers.journal_records import Record

VERSION = 2
_MAGIC = b"WMJRNL\x00\x01"
_FILE = struct.Struct("<8sI4x16sQ")
"""magic, version, store id, checksum."""
_BATCH = struct.Struct("<IIQQ")
"""magic, payload bytes, sequence number, checksum of the two before it and the payload."""
_BATCH_MAGIC = 0x48435442
_SEALED_MAGIC = 0x53435442
"""Of a batch whose payload is sealed."""
_BATCH_BYTES_MAX = 64 * 2**20
_REWRITE_BATCH_BYTES = 4 * 2**20
REWRITE_RECORDS = 16384
"""Most records of a batch of a rewrite, and of puts side by side in one entry."""


class Journal:
    """An open journal. One thread appends; the lock is the folder's."""

    def __init__(
        self, device: BlockDevice, path: Path, store_id: bytes, keyring: Keyring | None = None
    ) -> None:
        self._device = device
        self._keyring = keyring
        self._path = path
        self._store_id = store_id
        self._file: DeviceFile | None = None
        self._end = 0
        self._sequence = 0
        self.record_count = 0
        """Records in the file, dead ones included."""
        self.is_broken = False
        """An append failed half-way: the file must be rewritten before it is added to."""
        self.torn_bytes = 0
        """Bytes behind the last whole batch that opening cut off."""

    @property
    def size(self) -> int:
        """Bytes of whole batches."""
        return self._end

    def open(self) -> list[Record]:
        """Open and replay; a file that is not there is left to `rewrite`.

        Raises IntegrityError when the file is no journal of this store, UnreadableError when it is one under a
        key that is not there.
        """
        if not self._path.exists():
            self.is_broken = True
            return []
        self._file = self._device.open(self._path, Access.UPDATE, direct=False)
        raw = bytearray(self._file.size())
        if raw:
            self._file.readv([memoryview(raw)], 0)
        if bytes(raw[: _FILE.size]) != _file_header(self._store_id):
            raise IntegrityError(f"{self._path} is not the journal of this store")
        entries = self._replay(memoryview(raw))
        self.torn_bytes = len(raw) - self._end
        if self.torn_bytes:
            self._file.truncate(self._end)
            self._file.sync()
        return entries

    def append(self, entries: Sequence[Record]) -> None:
        """Add a batch, or as many as its size needs, and return once it is durable. On OSError the journal `is_broken`."""
        assert self._file is not None
        batches = [
            self._batch(self._sequence + index, payload) for index, payload in enumerate(_payloads(entries))
        ]
        raw = b"".join(batches)
        try:
            self._file.writev([memoryview(raw)], self._end)
            self._file.sync()
        except OSError:
            self.is_broken = True
            raise
        self._end += len(raw)
        self._sequence += len(batches)
        self.record_count += count_records(entries)

    def rewrite(self, entries: Sequence[Record]) -> None:
        """Replace the file by one that holds `entries` only. On OSError the journal `is_broken`."""
        # Until this has worked: the strikes that `entries` leave out are nowhere else, and a rename that
        # failed half-way may have put a file in place that `_file` is not.
        self.is_broken = True
        fresh = self._path.with_suffix(".new")
        self._device.unlink(fresh)
        old = self._file
        self._create(fresh, entries)
        if old is not None:
            old.close()

    def should_rewrite(self, live_count: int) -> bool:
        """Most records are dead, and there are enough to care."""
        return self.record_count > REWRITE_RECORDS + 2 * live_count

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _create(self, path: Path, entries: Sequence[Record]) -> None:
        parts = [_file_header(self._store_id)]
        sequence = 0
        for payload in _payloads(entries):
            parts.append(self._batch(sequence, payload))
            sequence += 1
        raw = b"".join(parts)
        file = self._device.open(path, Access.CREATE, direct=False)
        try:
            file.writev([memoryview(raw)], 0)
            file.sync()
            # A crash before the rename leaves the old journal, after it the new one: both are whole.
            self._device.rename(path, self._path)
        except OSError:
            file.close()
            raise
        self._file = file
        self._end = len(raw)
        self._sequence = sequence
        self.record_count = count_records(entries)
        self.is_broken = False

    def _batch(self, sequence: int, payload: bytes) -> bytes:
        if self._keyring is None:
            return _batch(sequence, payload)
        sealed = self._keyring.current.seal_batch(self._context(sequence), payload)
        return _batch(sequence, sealed, _SEALED_MAGIC)

    def _opened(self, magic: int, sequence: int, body: memoryview) -> bytes | memoryview:
        if magic == _BATCH_MAGIC and self._keyring is None:
            return body
        if magic == _BATCH_MAGIC:
            raise IntegrityError("a batch in the clear in a sealed journal")
        if self._keyring is None:
            raise UnreadableError("it is sealed, and no key file is configured")
        sealed = bytes(body)
        return self._keyring.cipher(sealed[:KEY_ID_BYTES]).open_batch(self._context(sequence), sealed)

    def _context(self, sequence: int) -> bytes:
        """What a sealed batch is bound to: neither another store's nor another place's opens here."""
        return self._store_id + struct.pack("<Q", sequence)

    def _replay(self, raw: memoryview) -> list[Record]:
        entries: list[Record] = []
        at = _FILE.size
        while at + _BATCH.size <= len(raw):
            magic, size, sequence, checksum = _BATCH.unpack_from(raw, at)
            body = raw[at + _BATCH.size : at + _BATCH.size + size]
            if (
                magic not in {_BATCH_MAGIC, _SEALED_MAGIC}
                or size > _BATCH_BYTES_MAX
                or len(body) != size
                or sequence != self._sequence
                or checksum != _batch_sum(size, sequence, body)
            ):
                break
            try:
                entries.extend(decode(self._opened(magic, sequence, body)))
            except struct.error as error:
                raise IntegrityError(f"a whole batch holds half a record: {error}") from error
            at += _BATCH.size + size
            self._sequence += 1
        self._end = at
        self.record_count = count_records(entries)
        return entries


def _payloads(entries: Sequence[Record]) -> Iterator[bytes]:
    """Records cut into batches by their bytes: puts side by side count for one entry and may be many."""
    parts: list[bytes] = []
    size = 0
    for entry in entries:
        raw = encode(entry)
        if parts and size + len(raw) > _REWRITE_BATCH_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
        parts.append(raw)
        size += len(raw)
    if parts:
        yield b"".join(parts)


def _file_header(store_id: bytes) -> bytes:
    body = _FILE.pack(_MAGIC, VERSION, store_id, 0)[:-8]
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def _batch_sum(size: int, sequence: int, payload: bytes | memoryview) -> int:
    checksum = xxhash.xxh3_64(struct.pack("<IQ", size, sequence))
    checksum.update(payload)
    return checksum.intdigest()


def _batch(sequence: int, payload: bytes, magic: int = _BATCH_MAGIC) -> bytes:
    if len(payload) > _BATCH_BYTES_MAX:
        raise InvariantError(f"a journal batch of {len(payload)} bytes would not be read back")
    return _BATCH.pack(magic, len(payload), sequence, _batch_sum(len(payload), sequence, payload)) + payload
