"""How a page lies in its frame, as another process sees it through the arena's mapping.

A frame starts with the page's header, whose last bytes are the frame's generation. Both are read from
memory that may get another page at any moment once a lease has ended, so what was read counts only if
the generation is the one that was leased *after* reading it (R3).
"""

from __future__ import annotations

from workmem.core.keys import BlockKey
from workmem.core.layout import KVLayout
from workmem.store.catalog import Space
from workmem.store.contract import BlockId
from workmem.store.tiers.page_header import generation_of, identity_of, slice_sums, unpack


def is_page_of(header: memoryview, key: BlockKey, generation: int) -> bool:
    """Whether the frame still holds the page that was leased."""
    return generation_of(header) == generation and identity_of(header)[0] == key


def stated_checksums(header: memoryview, layout: KVLayout) -> tuple[int, ...]:
    """Checksums of the page's slices."""
    sums, start = slice_sums(layout)
    return sums.unpack_from(header, start)


def check_written(header: memoryview, space: Space, block: BlockId) -> str:
    """What is wrong with the header that a client wrote for `block`; empty where nothing is.

    Raises IntegrityError when it is none.
    """
    stated, _ = unpack(header, space.layout)
    said = BlockId(stated.key, stated.parent, stated.tokens, stated.depth)
    return "" if (stated.root, said) == (space.root, block) else "the header is of another block"
