"""Giving the room of dead pages back, while the store is stopped, with the tier's own compaction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from workmem.core.clock import SystemClock
from workmem.core.events import BlockQuarantined, Event
from workmem.store.arena import Arena
from workmem.store.codecs.sealing import Keyring
from workmem.store.device import BlockDevice, HostDevice
from workmem.store.pool import Pool
from workmem.store.tiers.folder import StoreFolder
from workmem.store.tiers.page_forms import PageForms
from workmem.store.tiers.segments import SEGMENT_BYTES_MAX, segment_path
from workmem.store.tiers.ssd import SsdTier
from workmem.store.tools.folder_view import FolderView, read_folder
from workmem.store.tools.verify import verify

_ARENA_BYTES = 2**20
"""No page passes through it."""


class Collected(msgspec.Struct, frozen=True):
    """Before and after, in bytes and records; and how many pages were found damaged and struck out."""

    segment_bytes: tuple[int, int]
    journal_bytes: tuple[int, int]
    records: tuple[int, int]
    damaged: int


def collect(
    path: Path,
    device: BlockDevice | None = None,
    *,
    keyring: Keyring | None = None,
    on_read: Callable[[int], None] | None = None,
    on_segment: Callable[[int, int], None] | None = None,
) -> Collected:
    """Strike out damaged pages, move live ones together, remove what is dead, write the journal anew. Blocks.

    Every page is read once, and those that are moved twice. `on_read` hears the bytes of each as it is
    checked, `on_segment` hears how many segments of how many are done. Raises ConfigError where `path` is no store or
    a process has it open, OSError where the disk fails or is too full to write one segment.
    """
    used = device or HostDevice()
    before = read_folder(path, used, keyring=keyring)
    damaged = 0

    def hear(event: Event) -> None:
        nonlocal damaged
        damaged += isinstance(event, BlockQuarantined)

    folder = StoreFolder(str(path), keyring)
    arena = Arena(_ARENA_BYTES)
    try:
        # Nothing is evicted: there is room for everything once more.
        room = 2 * _file_bytes(before) + 16 * SEGMENT_BYTES_MAX
        tier = SsdTier(
            folder,
            Pool(arena, SystemClock(), hear),
            used,
            hear,
            room,
            forms=PageForms(keyring=keyring),
        )
        try:
            damage = verify(before, used, on_read).damage
            tier.open()
            _remove_strangers(before, used)
            tier.compact_all(on_segment, also={found.segment for found in damage})
        finally:
            tier.close()
    finally:
        folder.close()
        arena.close()
    after = read_folder(path, used, keyring=keyring)
    return Collected(
        (_file_bytes(before), _file_bytes(after)),
        (before.journal_bytes, after.journal_bytes),
        (before.record_count, after.record_count),
        damaged,
    )


def _remove_strangers(view: FolderView, device: BlockDevice) -> None:
    """Files that begin otherwise than a segment of this store does can never be used."""
    for segment in view.segments.values():
        if segment.is_foreign:
            device.unlink(segment_path(view.segments_folder, segment.number))


def _file_bytes(view: FolderView) -> int:
    return sum(segment.size for segment in view.segments.values())
