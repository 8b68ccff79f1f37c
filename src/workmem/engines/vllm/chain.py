"""The chunks of one request of vLLM's tiered offload, in prefix order, as far as vLLM has named them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workmem.core.keys import BlockKey

GROUP_BYTES = 4
"""A chunk's name is the hash of its last block, and behind it the number of its KV group."""


def block_key(name: bytes) -> BlockKey:
    """The part of a chunk's name that tells its contents."""
    return BlockKey(name[:-GROUP_BYTES])


class Chain:
    """`ends`: name of a chunk to the token at which it ends. VLLM's own mapping, which grows with the request."""

    def __init__(self, ends: Mapping[bytes, int]) -> None:
        self._ends = ends
        self._known = 0
        self._names: dict[bytes, list[bytes]] = {}
        """By group."""
        self._place: dict[bytes, int] = {}

    def before(self, name: bytes) -> bytes | None:
        """The chunk before `name`; None for the first, and for one that is not known here."""
        place = self._find(name)
        return self._names[name[-GROUP_BYTES:]][place - 1] if place else None

    def onward(self, name: bytes) -> Sequence[bytes]:
        """`name` and all behind it."""
        place = self._find(name)
        return [name] if place is None else self._names[name[-GROUP_BYTES:]][place:]

    def place(self, name: bytes) -> int:
        """How many chunks are before `name`; 0 for one that is not known here."""
        return self._find(name) or 0

    def _find(self, name: bytes) -> int | None:
        if len(self._ends) != self._known:
            self._sort()
        return self._place.get(name)

    def _sort(self) -> None:
        ends = self._ends
        self._known = len(ends)
        self._names.clear()
        for name in sorted(ends, key=ends.__getitem__):
            names = self._names.setdefault(name[-GROUP_BYTES:], [])
            self._place[name] = len(names)
            names.append(name)
