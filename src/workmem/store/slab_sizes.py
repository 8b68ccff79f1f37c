"""How finely an arena is cut, and how many slabs in a row a frame size takes at a time.

What is behind the last frame of a run is lost for as long as the run is there, and what is FREE in a size's
last run no other size can have. Short slabs keep both small; many slabs cost time to search.
"""

from __future__ import annotations

from workmem.store.arena import ALIGNMENT_BYTES

_SLABS = 16384
_SLAB_BYTES_MIN = 16 * 2**10
_SLAB_BYTES_MAX = 2**20
_SLABS_FEW = 32
"""Of a small arena, which is then cut finer than that."""
_SLABS_PER_RUN_SHARE = 32
"""Runs of one size that an arena has room for at least, lest one layout take it in a few."""
_SIZES_AT_ONCE = 4
"""So many layouts are expected to share an arena: each has a last run of its own."""


def slab_bytes_of(capacity_bytes: int) -> int:
    """Bytes of a slab in an arena of `capacity_bytes`."""
    fine = max(ALIGNMENT_BYTES, capacity_bytes // _SLABS_FEW // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    fitting = max(_SLAB_BYTES_MIN, capacity_bytes // _SLABS // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    return min(_SLAB_BYTES_MAX, fine, fitting)


def slabs_per_run(capacity_bytes: int, frame_bytes: int) -> int:
    """Slabs of the run that loses least: behind its last frame, and with one frame of it in use."""
    slab_bytes = slab_bytes_of(capacity_bytes)
    shortest = -(-frame_bytes // slab_bytes)
    longest = max(shortest, capacity_bytes // slab_bytes // _SLABS_PER_RUN_SHARE)

    def lost(slabs: int) -> float:
        count, tail = divmod(slabs * slab_bytes, frame_bytes)
        return tail / (slabs * slab_bytes) + _SIZES_AT_ONCE * (count - 1) * frame_bytes / capacity_bytes

    return min(range(shortest, longest + 1), key=lost)
