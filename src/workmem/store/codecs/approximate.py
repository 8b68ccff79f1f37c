"""Approximate storage: 8 bits a value. Off unless asked for by name, and never under an exact identity.

Pages with a value that is not finite, or too large to scale, are stored raw.
"""

from __future__ import annotations

import numpy as np

from workmem.core.errors import IntegrityError
from workmem.core.layout import KVLayout
from workmem.store.codecs import body, floats
from workmem.store.codecs.floats import Float32

_INT8_MAX = 127
_SCALABLE_MAX = 1e37
"""Above it a rounded scale times a code may pass the largest float32."""
_SCALE_MIN = np.uint32(1 << 16).view(np.float32)
"""The least positive bf16: a tinier scale would be lost."""


class Int8:
    """Whole numbers from -127 to 127 times a bf16 scale: one per channel of K, one per row of V, within a block.

    Channels of K differ in size far more than its tokens do, V the other way round; figures in
    docs/internals/codecs.md.
    """

    id = 2
    name = "int8"
    exact = False

    def encode(self, payload: memoryview, *, key: bytes, layout: KVLayout) -> bytes | None:
        """See `Codec.encode`."""
        page = floats.load(payload, layout)
        if not _is_scalable(page):
            return None
        scales: list[bytes] = []
        codes = np.empty(page.shape, np.int8)
        for kind, axis in ((0, 1), (1, 3)):
            values = page[:, kind]
            peak = np.abs(values).max(axis=axis, keepdims=True)
            scale = floats.bf16_at_least(peak / np.float32(_INT8_MAX))
            scale = np.where(peak > 0, np.maximum(scale, _SCALE_MIN), np.float32(0))
            steps = values / np.where(scale > 0, scale, np.float32(1))
            np.rint(steps, out=steps)
            # The scale was rounded up, so no code passes 127.
            np.copyto(codes[:, kind], steps, casting="unsafe")
            scales.append((scale.view(np.uint32) >> 16).astype("<u2").tobytes())
        return body.pack([*scales, codes.tobytes()], key=key)

    def decode(self, stored: memoryview, into: memoryview, *, key: bytes, layout: KVLayout) -> None:
        """See `Codec.decode`."""
        inner = body.unpack(stored, key=key, codec=self.name)
        shape = (layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        layers, _, tokens, heads, dim = shape
        k_scales, v_scales = layers * heads * dim, layers * tokens * heads
        head = 2 * (k_scales + v_scales)
        _require(len(inner), head + int(np.prod(shape)), self.name)
        bits = np.frombuffer(inner[:head], "<u2").astype(np.uint32) << 16
        scales = bits.view(np.float32)
        codes = np.frombuffer(inner[head:], np.int8).reshape(shape)
        page = codes.astype(np.float32)
        page[:, 0] *= scales[:k_scales].reshape(layers, 1, heads, dim)
        page[:, 1] *= scales[k_scales:].reshape(layers, tokens, heads, 1)
        floats.save(page, into, layout)

    def check(self, stored: memoryview, *, key: bytes, layout: KVLayout) -> None:
        """See `Codec.check`."""
        del layout
        body.unpack(stored, key=key, codec=self.name)


class Fp8:
    """e4m3 times a float32 scale, one per layer, K|V and head: the largest value of each becomes 448."""

    id = 3
    name = "fp8"
    exact = False

    def encode(self, payload: memoryview, *, key: bytes, layout: KVLayout) -> bytes | None:
        """See `Codec.encode`."""
        page = floats.load(payload, layout)
        if not _is_scalable(page):
            return None
        peak = np.abs(page).max(axis=2, keepdims=True).max(axis=4, keepdims=True)
        scale = np.where(peak > 0, np.maximum(peak / np.float32(floats.E4M3_MAX), _SCALE_MIN), np.float32(1))
        codes = floats.to_e4m3((page / scale).astype(np.float32, copy=False))
        return body.pack([scale.astype("<f4").tobytes(), codes.tobytes()], key=key)

    def decode(self, stored: memoryview, into: memoryview, *, key: bytes, layout: KVLayout) -> None:
        """See `Codec.decode`."""
        inner = body.unpack(stored, key=key, codec=self.name)
        shape = (layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
        head = 4 * layout.layers * 2 * layout.kv_heads
        _require(len(inner), head + int(np.prod(shape)), self.name)
        scale = np.frombuffer(inner[:head], "<f4").reshape(layout.layers, 2, 1, layout.kv_heads, 1)
        codes = np.frombuffer(inner[head:], np.uint8).reshape(shape)
        page: Float32 = floats.e4m3_values().take(codes)
        page *= scale
        floats.save(page, into, layout)

    def check(self, stored: memoryview, *, key: bytes, layout: KVLayout) -> None:
        """See `Codec.check`."""
        del layout
        body.unpack(stored, key=key, codec=self.name)


def _is_scalable(page: Float32) -> bool:
    """Whether all values are finite and small enough; a NaN makes the comparison false."""
    return bool(np.abs(page).max() <= _SCALABLE_MAX)


def _require(found: int, expected: int, codec: str) -> None:
    if found != expected:
        raise IntegrityError(f"page stored by {codec!r} has {found} bytes, its layout makes {expected}")
