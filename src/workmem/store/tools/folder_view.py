"""What a store's folder says of itself, read without a change and without a lock.

Beside a running store the view is of one moment: the journal only grows or is replaced as a whole, and
segments are only added to or removed. A page that the view names may be gone by the time it is read;
`FolderView.still_names` tells that from damage.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from workmem.core.errors import ConfigError, IntegrityError
from workmem.core.layout import Namespace
from workmem.store.codecs.sealing import Keyring
from workmem.store.device import Access, BlockDevice
from workmem.store.tiers.folder import FORMAT_VERSION, SEALED_VERSION, FolderFormat, require_key
from workmem.store.tiers.journal import Journal
from workmem.store.tiers.journal_records import DeleteEntry, DropEntry, NamespaceEntry, PutEntry
from workmem.store.tiers.segments import (
    SEGMENT_HEADER_BYTES,
    check_segment_header,
    segment_numbers,
    segment_path,
)
from workmem.store.tools.read_only import ReadOnlyDevice

if TYPE_CHECKING:
    from workmem.store.tiers.journal_records import Record


class SpaceView(msgspec.Struct, frozen=True, eq=False):
    """A namespace of the folder and its live pages by key."""

    number: int
    root: bytes
    namespace: Namespace
    pages: dict[bytes, PutEntry]


class SegmentView(msgspec.Struct, frozen=True):
    """A segment file. `problem` says why the store leaves it out; empty where it does not."""

    number: int
    size: int
    problem: str
    is_foreign: bool
    """It can be read, and does not begin as a segment of this store under its number does."""


class FolderView(msgspec.Struct, frozen=True, eq=False):
    """A folder at one moment."""

    path: Path
    store_id: bytes
    holder: str
    """Process that has the folder open; empty where none has."""
    spaces: list[SpaceView]
    lost_spaces: list[bytes]
    """Roots that are not those of their own description: their pages are of no use."""
    segments: dict[int, SegmentView]
    journal_bytes: int
    torn_bytes: int
    """Behind the last whole batch: a batch being written, or one that was cut short."""
    record_count: int
    keyring: Keyring | None = None
    """What opens its pages where they are sealed."""

    @property
    def page_count(self) -> int:
        """Live pages of all namespaces."""
        return sum(len(space.pages) for space in self.spaces)

    @property
    def live_record_count(self) -> int:
        """Records that a rewritten journal would have."""
        return self.page_count + sum(bool(space.pages) for space in self.spaces)

    @property
    def segments_folder(self) -> Path:
        """Where the segment files are."""
        return self.path / "segments"

    def still_names(self, space: SpaceView, page: PutEntry) -> bool:
        """Whether a later view has `page` at the same place."""
        return any(other.root == space.root and other.pages.get(page.key) == page for other in self.spaces)


def read_folder(
    path: Path, device: BlockDevice | None = None, *, keyring: Keyring | None = None
) -> FolderView:
    """Read format, journal and the headers of the segments.

    Raises ConfigError where `path` is no store of this version or `keyring` does not open it, IntegrityError where its journal is of
    another store or unreadable as such, OSError where the disk fails.
    """
    seen = ReadOnlyDevice(device)
    store_id, is_sealed = _store_id(path, keyring)
    keyring = keyring if is_sealed else None
    journal = Journal(seen, path / "journal", store_id, keyring)
    try:
        records = journal.open()
    finally:
        journal.close()
    spaces, lost = _replay(records)
    return FolderView(
        path=path,
        store_id=store_id,
        holder=holder_of(path),
        spaces=spaces,
        lost_spaces=lost,
        segments=_segments(path / "segments", seen, store_id),
        journal_bytes=journal.size,
        torn_bytes=journal.torn_bytes,
        record_count=journal.record_count,
        keyring=keyring,
    )


def holder_of(path: Path) -> str:
    """Process id of whoever holds the folder's lock; empty where nobody does."""
    try:
        fd = os.open(path / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
    else:
        return ""
    finally:
        os.close(fd)


def _store_id(path: Path, keyring: Keyring | None) -> tuple[bytes, bool]:
    try:
        found = msgspec.json.decode((path / "FORMAT").read_bytes(), type=FolderFormat)
        store_id = bytes.fromhex(found.store_id)
    except (FileNotFoundError, NotADirectoryError):
        if not path.exists():
            raise ConfigError(f"{path} does not exist: a server makes its store at its first start") from None
        raise ConfigError(
            f"{path} is no store: it has no FORMAT; name the folder of store.ssd.path"
        ) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{path / 'FORMAT'} is damaged ({error}); the store can only be removed") from error
    if found.format not in {FORMAT_VERSION, SEALED_VERSION}:
        raise ConfigError(f"{path} has format {found.format}, this program reads {FORMAT_VERSION}")
    if found.key_id:
        require_key(path, found, keyring)
    return store_id, bool(found.key_id)


def _replay(records: list[Record]) -> tuple[list[SpaceView], list[bytes]]:
    """The namespaces that are alive at the end, and the roots of those that nobody can use."""
    spaces: dict[int, SpaceView] = {}
    lost: dict[int, bytes] = {}
    for record in records:
        if isinstance(record, NamespaceEntry):
            space = _space_of(record)
            if space is None:
                lost[record.number] = record.root
            else:
                spaces[record.number] = space
        elif isinstance(record, DeleteEntry):
            if record.number in spaces:
                spaces[record.number].pages.pop(record.key, None)
        elif isinstance(record, DropEntry):
            spaces.pop(record.number, None)
            lost.pop(record.number, None)
        else:
            for page in _puts(record):
                if page.number in spaces:
                    spaces[page.number].pages[page.key] = page
    return list(spaces.values()), list(lost.values())


def _puts(record: Record) -> list[PutEntry]:
    if isinstance(record, PutEntry):
        return [record]
    assert isinstance(record, np.ndarray)
    names = ("number", "key", "parent", "depth", "segment", "offset", "length", "header_sum")
    columns = [record[name].tolist() for name in names]
    return [
        PutEntry(number, key, parent, depth, segment, offset << 12, length << 12, header_sum)
        for number, key, parent, depth, segment, offset, length, header_sum in zip(*columns, strict=True)
    ]


def _space_of(entry: NamespaceEntry) -> SpaceView | None:
    try:
        namespace = msgspec.json.decode(entry.json, type=Namespace)
    except msgspec.DecodeError:
        return None
    if namespace.root() != entry.root:
        return None
    return SpaceView(entry.number, entry.root, namespace, {})


def _segments(folder: Path, device: BlockDevice, store_id: bytes) -> dict[int, SegmentView]:
    views: dict[int, SegmentView] = {}
    for number in segment_numbers(folder):
        size, problem, is_foreign = 0, "", False
        try:
            file = device.open(segment_path(folder, number), Access.READ, direct=False)
            try:
                size = file.size()
                head = bytearray(min(size, SEGMENT_HEADER_BYTES))
                if head:
                    file.readv([memoryview(head)], 0)
            finally:
                file.close()
            check_segment_header(bytes(head), number, store_id)
        except FileNotFoundError:
            # Removed since the folder was listed: a running store does that.
            continue
        except IntegrityError as error:
            problem, is_foreign = str(error), True
        except OSError as error:
            problem = str(error)
        views[number] = SegmentView(number, size, problem, is_foreign)
    return views
