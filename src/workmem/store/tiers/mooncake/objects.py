"""Pages of one context that are put together are one object of the pool, so that each is worth a request."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from workmem.store.tiers.contract import HeldPage, PageName


class PoolObject(msgspec.Struct, frozen=True, eq=False):
    """Consecutive pages of one chain, header first each, one behind the other."""

    name: str
    pages: tuple[HeldPage, ...]
    peer: str = ""
    """Where it lies: the transfer address of the process whose memory it is in."""
    group: str = ""
    """Lives and dies in the pool with the other objects of this group; empty is none."""
    pin_s: float = 0.0
    """For so long it is to be put as one that is evicted last."""
    seal_bytes: int = 0
    """What a seal adds in front of each page."""

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(page.length for page in self.pages) + self.seal_bytes * len(self.pages)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each page begins."""
        found: list[int] = []
        at = 0
        for page in self.pages:
            found.append(at)
            at += page.length + self.seal_bytes
        return tuple(found)


def group(pages: Sequence[HeldPage], bytes_max: int, groups: Sequence[str] | None = None) -> list[list[int]]:
    """Indices of `pages` by object: runs of a chain of at most `bytes_max`, or single pages that are larger.

    `groups`: of each page; no object has pages of two.
    """
    runs: list[list[int]] = []
    size = 0
    for index, page in enumerate(pages):
        last = pages[runs[-1][-1]] if runs else None
        if last is not None and groups is not None and groups[index] != groups[runs[-1][-1]]:
            last = None
        if last is not None and _follows(page, last) and size + page.length <= bytes_max:
            runs[-1].append(index)
            size += page.length
        else:
            runs.append([index])
            size = page.length
    return runs


def _follows(page: HeldPage, last: HeldPage) -> bool:
    return (page.name.root, page.parent, page.depth) == (last.name.root, last.name.key, last.depth + 1)


def object_name(pool: str, pages: Sequence[HeldPage]) -> str:
    """A name that says what the bytes are: namespace (tenant and all), keys, and the checksums of the headers.

    Headers vouch for every slice, so whatever lies under a name is the same, whoever put it.
    """
    digest = hashlib.sha256(b"workmem.object.1\0")
    root = pages[0].name.root
    digest.update(root)
    for page in pages:
        digest.update(page.name.key + page.header_sum.to_bytes(8, "little"))
    return f"{prefix(pool)}page/{root[:16].hex()}/{digest.digest()[:16].hex()}"


def prefix(pool: str) -> str:
    """What all names of a pool begin with."""
    return f"workmem/1/{pool}/"


def names_of(found: PoolObject) -> list[PageName]:
    """Its pages by name."""
    return [page.name for page in found.pages]
