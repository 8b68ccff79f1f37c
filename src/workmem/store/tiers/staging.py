"""Pages made ready for the disk: encoded and sealed beside the arena, or as they lie in it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import msgspec

from workmem.store.arena import Arena
from workmem.store.ssd_writes import WriteJob
from workmem.store.tiers.page_forms import PageForms
from workmem.store.tiers.page_header import checksum_of


class ReadyPage(msgspec.Struct, frozen=True, eq=False):
    """A page as it will lie on disk. `view` is valid until the next batch is made ready."""

    view: memoryview
    header_sum: int

    @property
    def length(self) -> int:
        """Bytes on disk."""
        return len(self.view)


class Staging:
    """Owned by the writer thread: the memory that a batch is encoded into, aligned for the disk and kept."""

    def __init__(self, arena: Arena, forms: PageForms) -> None:
        self._arena = arena
        self._forms = forms
        self._memory: mmap.mmap | None = None

    def ready(self, jobs: Sequence[WriteJob]) -> list[ReadyPage]:
        """The pages of `jobs`, whose frames are pinned, in their order. `release` them after use."""
        forms, at = self._forms, 0
        room = None
        if not forms.is_plain:
            room = self._room(sum(forms.room_bytes(job.space.layout) for job in jobs))
        pages: list[ReadyPage] = []
        try:
            for job in jobs:
                frame = self._arena.writable(job.frame.offset, job.frame.size)
                # Whatever happens, somebody releases it.
                pages.append(ReadyPage(frame, checksum_of(frame)))
                form = None if room is None else forms.encode(frame, job.space.layout, room[at:])
                if room is not None and form is not None:
                    frame.release()
                    pages[-1] = ReadyPage(room[at : at + form.length], form.header_sum)
                    at += form.length
        except BaseException:
            release(pages)
            raise
        return pages

    def _room(self, size: int) -> memoryview:
        if self._memory is None or len(self._memory) < size:
            # The old one goes once nobody looks at it any more.
            self._memory = mmap.mmap(-1, size)
        return memoryview(self._memory)


def release(pages: Sequence[ReadyPage]) -> None:
    """Let go of the arena and of the staging memory."""
    for page in pages:
        page.view.release()
