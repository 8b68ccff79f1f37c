"""What a tier asks of a codec, and the checks that every codec shares. Pure: no file, no clock, no thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import xxhash

from workmem.core.errors import IntegrityError
from workmem.core.layout import KVLayout


class UnreadableError(IntegrityError):
    """The page may be sound, but this process cannot read it: another key, or a codec it does not have.

    A miss like any IntegrityError, but no sign of a failing disk: it neither quarantines the copy nor
    counts against its tier.
    """


class Codec(Protocol):
    """One way to keep a page. Every method may be called from any thread, several at a time."""

    @property
    def id(self) -> int:
        """Number in page headers, 0 to 255. Never given to another codec."""
        ...

    @property
    def name(self) -> str:
        """Name in settings."""
        ...

    @property
    def exact(self) -> bool:
        """Whether `decode` gives back the very bytes that `encode` took."""
        ...

    def encode(self, payload: memoryview, *, key: bytes, layout: KVLayout) -> bytes | memoryview | None:
        """What to store for the `layout.page_bytes` bytes of block `key`; None: not worth it, store raw."""
        ...

    def decode(self, stored: memoryview, into: memoryview, *, key: bytes, layout: KVLayout) -> None:
        """Fill `into` (`layout.page_bytes` writable bytes) with the page.

        Raises IntegrityError on anything but what `encode` made for this `key`; `into` is then undefined.
        """
        ...

    def check(self, stored: memoryview, *, key: bytes, layout: KVLayout) -> None:
        """Raise IntegrityError where the stored bytes changed, without decoding them (compaction, scrubbing)."""
        ...


def slice_checksums(payload: memoryview, layout: KVLayout) -> tuple[int, ...]:
    """xxh3-64 of each slice of a page."""
    spans = (layout.slice_span(index) for index in range(layout.slice_count))
    return tuple(xxhash.xxh3_64_intdigest(payload[start:end]) for start, end in spans)


def restore(
    codec: Codec,
    stored: memoryview,
    into: memoryview,
    *,
    key: bytes,
    layout: KVLayout,
    checksums: Sequence[int],
) -> tuple[int, ...]:
    """Decode a page and check it (R6). Returns the checksums of the slices that are now in `into`.

    `checksums` are those of the page that was encoded. An exact codec must meet them; what an approximate one
    gives back has its own, and these are what readers must compare from here on.
    """
    codec.decode(stored, into, key=key, layout=layout)
    found = slice_checksums(into, layout)
    if codec.exact and found != tuple(checksums):
        raise IntegrityError(f"page decoded by {codec.name!r} does not match its checksums")
    return found
