"""Addresses of pages in the arena, for an engine that is given addresses and believes them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from workmem.store.tiers.contract import ArenaMemory

Span = tuple[int, int]
"""Address and bytes."""


def span_of(view: memoryview, arena: ArenaMemory) -> Span:
    """Where `view` lies. Raises ValueError unless it is plain bytes of the arena, which is all that is registered.

    An item of several bytes would be counted as one: the engine takes lengths for sizes, and stores a part.
    """
    if view.itemsize != 1 or not view.c_contiguous:
        raise ValueError(f"a page has items of {view.itemsize} bytes; hand over plain bytes")
    address = int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else arena.address
    if not arena.address <= address <= arena.address + arena.size_bytes - len(view):
        raise ValueError("a page does not lie in the arena, and only that is registered")
    return address, len(view)


def joined(spans: Iterable[Span]) -> list[Span]:
    """`spans` with neighbours as one: the engine sends a request for each."""
    found: list[Span] = []
    for address, size in spans:
        if found and found[-1][0] + found[-1][1] == address:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((address, size))
    return found
