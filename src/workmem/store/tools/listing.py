"""The blocks of a namespace, each behind the one before it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from workmem.core.errors import ConfigError
from workmem.store.tiers.journal_records import PutEntry
from workmem.store.tools.folder_view import FolderView, SpaceView


class BlockLine(msgspec.Struct, frozen=True, kw_only=True):
    """A block and where its page lies. `segment` to `bytes` are its place on disk."""

    key: str
    parent: str
    depth: int
    tokens: int
    segment: int
    offset: int
    bytes: int


def find_space(view: FolderView, root_prefix: str) -> SpaceView:
    """The namespace whose root starts with `root_prefix` (hex); the only one there is where it is empty.

    Raises ConfigError where none or more than one fits.
    """
    fits = [space for space in view.spaces if space.root.hex().startswith(root_prefix.lower())]
    if len(fits) == 1:
        return fits[0]
    known = ", ".join(space.root.hex()[:12] for space in fits or view.spaces) or "none"
    problem = "fits more than one namespace" if fits else "fits no namespace"
    raise ConfigError(f"root {root_prefix!r} {problem}; there are: {known}")


def find_chain(space: SpaceView, key_prefix: str) -> list[PutEntry]:
    """The block whose key starts with `key_prefix` (hex), and those before it that are there, first one first.

    Raises ConfigError where none or more than one fits.
    """
    fits = [page for key, page in space.pages.items() if key.hex().startswith(key_prefix.lower())]
    if len(fits) != 1:
        raise ConfigError(f"key {key_prefix!r} fits {len(fits)} blocks; give more digits, or see `store ls`")
    chain = [fits[0]]
    while (before := space.pages.get(chain[-1].parent)) is not None:
        chain.append(before)
    return chain[::-1]


def blocks_of(space: SpaceView) -> Iterator[PutEntry]:
    """All blocks of a namespace: a block comes right behind its parent, a block with no parent here first."""
    children: dict[bytes, list[PutEntry]] = {}
    for page in space.pages.values():
        children.setdefault(page.parent, []).append(page)
    tops = [page for page in space.pages.values() if page.parent not in space.pages]
    stack = sorted(tops, key=lambda page: (page.depth, page.key), reverse=True)
    while stack:
        page = stack.pop()
        yield page
        stack += sorted(children.get(page.key, ()), key=lambda child: child.key, reverse=True)


def line_of(space: SpaceView, page: PutEntry) -> BlockLine:
    """What is shown of a block."""
    return BlockLine(
        key=page.key.hex(),
        parent=page.parent.hex(),
        depth=page.depth,
        tokens=space.namespace.layout.block_tokens,
        segment=page.segment,
        offset=page.offset,
        bytes=page.length,
    )
