"""The page as it is."""

from __future__ import annotations

from workmem.core.errors import IntegrityError
from workmem.core.layout import KVLayout

RAW_ID = 0


class Raw:
    """Keeps the payload in place, so that a page moves between frame and disk in one copy or none.

    It adds nothing, so it can tell a wrong length only; the slice checksums of the header find the rest
    (`contract.restore`).
    """

    id = RAW_ID
    name = "raw"
    exact = True

    def encode(self, payload: memoryview, *, key: bytes, layout: KVLayout) -> memoryview | None:
        """The payload itself, not a copy."""
        del key, layout
        return payload

    def decode(self, stored: memoryview, into: memoryview, *, key: bytes, layout: KVLayout) -> None:
        """See `Codec.decode`."""
        self.check(stored, key=key, layout=layout)
        into[:] = stored

    def check(self, stored: memoryview, *, key: bytes, layout: KVLayout) -> None:
        """Length only."""
        del key
        if len(stored) != layout.page_bytes:
            raise IntegrityError(f"raw page has {len(stored)} bytes, its layout {layout.page_bytes}")
