"""Number formats of pages, in numpy: bf16 and fp32 to and from float32, and the 8-bit float e4m3."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from workmem.core.layout import KVLayout

E4M3_MAX = 448.0
Float32 = np.ndarray[Any, np.dtype[np.float32]]
_MANTISSA_BITS, _BIAS = 3, 7
_SIGN = 0x80
_NAN = 0x7F


def load(payload: memoryview, layout: KVLayout) -> Float32:
    """A page as float32 [layer, K|V, token, head, dim]; a copy unless it is fp32."""
    if layout.dtype == "fp32":
        flat = np.frombuffer(payload, "<f4")
    else:
        bits = np.frombuffer(payload, "<u2").astype(np.uint32)
        bits <<= 16
        flat = bits.view(np.float32)
    return flat.reshape(layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)


def save(values: Float32, into: memoryview, layout: KVLayout) -> None:
    """Write float32 `values` as a page, and use them up; to bf16 they are rounded to nearest, ties to even.

    Contiguous and finite only.
    """
    if layout.dtype == "fp32":
        np.copyto(np.frombuffer(into, "<f4"), values.reshape(-1))
        return
    bits = values.reshape(-1).view(np.uint32)
    carry = bits >> 16
    carry &= 1
    carry += np.uint32(0x7FFF)
    bits += carry
    bits >>= 16
    np.copyto(np.frombuffer(into, "<u2"), bits, casting="unsafe")


def bf16_at_least(values: Float32) -> Float32:
    """The smallest bf16 numbers, as float32, that are not below the nonnegative `values`."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) >> 16 << 16).view(np.float32)


@lru_cache(maxsize=1)
def e4m3_values() -> Float32:
    """What each of the 256 codes of e4m3 means: no infinities, NaN at 0x7F and 0xFF."""
    code = np.arange(256, dtype=np.uint32)
    exponent = ((code >> _MANTISSA_BITS) & 0xF).astype(np.int32)
    fraction = (code & 0x7).astype(np.float32) / 8
    normal = np.ldexp(1 + fraction, exponent - _BIAS)
    subnormal = np.ldexp(fraction, 1 - _BIAS)
    magnitude = np.where(exponent > 0, normal, subnormal).astype(np.float32)
    magnitude[code & _NAN == _NAN] = np.nan
    return np.where(code & _SIGN, -magnitude, magnitude).astype(np.float32)


def to_e4m3(values: Float32) -> np.ndarray:
    """The nearest e4m3 code of each value, uint8; ties to even, saturating at 448. Finite values only."""
    bits = values.view(np.uint32)
    # The upper half picks a row of the table. What is cut off counts as "a little more" (round to odd), so that
    # the table still tells a tie from its neighbours.
    below = bits & np.uint32(0xFFFF)
    below += np.uint32(0xFFFF)
    below |= bits
    below >>= 16
    return _codes().take(below, mode="clip")


@lru_cache(maxsize=1)
def _codes() -> np.ndarray:
    """The nearest code of each bf16 bit pattern, uint8 [65536]."""
    steps = e4m3_values()[:_NAN]
    halfway = (steps[1:] + steps[:-1]) / 2
    patterns = np.arange(1 << 16, dtype=np.uint32)
    magnitude = ((patterns & 0x7FFF) << 16).view(np.float32)
    magnitude[np.isnan(magnitude)] = np.inf
    low, high = np.searchsorted(halfway, magnitude), np.searchsorted(halfway, magnitude, side="right")
    nearest = np.where(low % 2 == 0, low, high)
    return (nearest | np.where(patterns >> 15, _SIGN, 0)).astype(np.uint8)
