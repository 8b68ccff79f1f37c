"""Exact compression: zstandard over byte planes. Needs the `zstd` extra.

The bytes of a value differ in kind: sign and exponent repeat, mantissas are noise. Apart, the first kind
shrinks to less than half and the second is left as it is. Figures in docs/internals/codecs.md.
"""

from __future__ import annotations

import struct
import threading
from functools import lru_cache

import numpy as np
import zstandard

from workmem.core.errors import IntegrityError
from workmem.core.layout import DTYPE_BYTES, KVLayout
from workmem.store.codecs import body

WORTH = 15 / 16
"""Largest stored / plain that is worth decoding again."""
_PROBE_BYTES = 8192
"""Read from the middle of a plane to tell noise from the rest before all of it is compressed."""
_NOISE = 0.97
_AS_IS = 1 << 31
"""Set in a plane's length where the plane is stored uncompressed."""

Planes = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
Scratch = tuple[Planes, np.ndarray]


class Zstd:
    """One byte plane per byte of a value, least significant first; in each, all K then all V."""

    id = 1
    name = "zstd"
    exact = True

    def __init__(self) -> None:
        self._own = threading.local()

    def encode(self, payload: memoryview, *, key: bytes, layout: KVLayout) -> bytes | None:
        """See `Codec.encode`."""
        parts = [self._plane(plane) for plane in split(payload, layout, self._scratch(layout))]
        lengths = [
            len(part) | (_AS_IS if len(part) * len(parts) == layout.page_bytes else 0) for part in parts
        ]
        stored = body.SUM_BYTES + 4 * len(parts) + sum(map(len, parts))
        if stored > layout.page_bytes * WORTH:
            return None
        return body.pack([struct.pack(f"<{len(lengths)}I", *lengths), *parts], key=key)

    def decode(self, stored: memoryview, into: memoryview, *, key: bytes, layout: KVLayout) -> None:
        """See `Codec.decode`."""
        inner = body.unpack(stored, key=key, codec=self.name)
        count = DTYPE_BYTES[layout.dtype]
        plane_bytes = layout.page_bytes // count
        if len(inner) < 4 * count:
            raise IntegrityError(f"page stored by 'zstd' has {len(inner)} bytes, less than its table")
        table = struct.unpack_from(f"<{count}I", inner)
        at = 4 * count
        planes: list[np.ndarray] = []
        for word in table:
            length = word & ~_AS_IS
            part = inner[at : at + length]
            at += length
            plane = part if word & _AS_IS else self._expanded(part, plane_bytes)
            if len(plane) != plane_bytes:
                raise IntegrityError(f"plane of {len(plane)} bytes, its layout has {plane_bytes}")
            planes.append(np.frombuffer(plane, np.uint8))
        if at != len(inner):
            raise IntegrityError(f"page stored by 'zstd' has {len(inner)} bytes, its table says {at}")
        merge(planes, into, layout)

    def check(self, stored: memoryview, *, key: bytes, layout: KVLayout) -> None:
        """See `Codec.check`."""
        del layout
        body.unpack(stored, key=key, codec=self.name)

    def _plane(self, plane: np.ndarray) -> bytes | memoryview:
        """`plane` compressed, or itself where that is no smaller."""
        middle = max(0, (plane.size - _PROBE_BYTES) // 2)
        probe = plane[middle : middle + _PROBE_BYTES]
        squeeze = self._compressor()
        if len(squeeze.compress(probe.data)) > probe.size * _NOISE:
            return plane.data
        made = squeeze.compress(plane.data)
        return made if len(made) < plane.size else plane.data

    def _expanded(self, part: memoryview, plane_bytes: int) -> bytes:
        """A plane of `plane_bytes`; the stated size is read first, so a wrong one takes no memory."""
        try:
            stated = zstandard.frame_content_size(part)
            if stated != plane_bytes:
                raise IntegrityError(f"compressed plane states {stated} bytes, its layout {plane_bytes}")
            return self._decompressor().decompress(part, allow_extra_data=False)
        except zstandard.ZstdError as problem:
            raise IntegrityError(f"compressed plane does not decode: {problem}") from problem

    def _scratch(self, layout: KVLayout) -> Scratch:
        """Memory for `split`, kept: mapping it anew for each page costs more than the splitting."""
        kept: tuple[KVLayout, Scratch] | None = getattr(self._own, "scratch", None)
        if kept is None or kept[0] != layout:
            self._own.scratch = kept = (layout, scratch(layout))
        return kept[1]

    # A context belongs to one thread at a time, and making one costs more than a small page.
    def _compressor(self) -> zstandard.ZstdCompressor:
        made = getattr(self._own, "compressor", None)
        if made is None:
            made = self._own.compressor = zstandard.ZstdCompressor(compression_params=parameters())
        return made

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        made = getattr(self._own, "decompressor", None)
        if made is None:
            made = self._own.decompressor = zstandard.ZstdDecompressor()
        return made


@lru_cache(maxsize=1)
def parameters() -> zstandard.ZstdCompressionParameters:
    """Settings that leave almost only the entropy coder.

    Exponents of KV hold no repeated strings: the few matches that the usual levels find cost more than the
    literals they replace, in bytes and in time. A window of 32 KiB gives each few layers a code of their own.
    """
    return zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        window_log=15,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
        write_content_size=True,
        write_checksum=False,
        write_dict_id=False,
    )


def scratch(layout: KVLayout) -> Scratch:
    """What `split` works in: its planes, and room for all values."""
    width = DTYPE_BYTES[layout.dtype]
    count = layout.page_bytes // width
    return np.empty((width, count), np.uint8), np.empty(
        (2, layout.layers, count // layout.layers // 2), f"<u{width}"
    )


def split(payload: memoryview, layout: KVLayout, room: Scratch) -> Planes:
    """Byte planes of a page, uint8 [bytes per value, values], in `room`; plane 0 is the least significant."""
    planes, shifted = room
    by_kind = np.frombuffer(payload, shifted.dtype).reshape(layout.layers, 2, -1).transpose(1, 0, 2)
    for index, plane in enumerate(planes):
        np.right_shift(by_kind, 8 * index, out=shifted)
        np.copyto(plane.reshape(by_kind.shape), shifted, casting="unsafe")
    return planes


def merge(planes: list[np.ndarray], into: memoryview, layout: KVLayout) -> None:
    """The page whose `split` is `planes`."""
    width = DTYPE_BYTES[layout.dtype]
    values = np.frombuffer(into, f"<u{width}").reshape(layout.layers, 2, -1)
    by_kind = values.transpose(1, 0, 2)
    top, *rest = [plane.reshape(by_kind.shape) for plane in reversed(planes)]
    np.copyto(by_kind, top)
    for plane in rest:
        np.left_shift(by_kind, 8, out=by_kind)
        np.bitwise_or(by_kind, plane, out=by_kind)
