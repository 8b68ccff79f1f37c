"""Reads every live page of a folder and says which are not what was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from workmem.core.errors import IntegrityError
from workmem.store.device import BlockDevice
from workmem.store.tiers.journal_records import PutEntry
from workmem.store.tools.folder_view import FolderView, SpaceView, read_folder
from workmem.store.tools.pages import PageReader
from workmem.store.tools.stat import PREFIX_DIGITS


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """A page, or something larger, that is not what was written. Empty fields do not apply."""

    problem: str
    root: str = ""
    key: str = ""
    segment: int = 0
    offset: int = 0


class Verdict(msgspec.Struct, kw_only=True):
    """What came out. `damage` is empty where all is sound."""

    pages: int = 0
    """Pages that were read and are what was written."""
    bytes: int = 0
    """Bytes read."""
    left: int = 0
    """Pages that a running store struck out or moved before they were read."""
    damage: list[Damage] = []


def verify(
    view: FolderView, device: BlockDevice | None = None, on_read: Callable[[int], None] | None = None
) -> Verdict:
    """Read and check all live pages, in the order they lie. `on_read` hears the bytes of each as it is done.

    A page that fails beside a running store is looked up again at the end: one that left is no damage.
    """
    verdict = Verdict()
    suspects: list[tuple[SpaceView, PutEntry, str]] = []
    pages = sorted(
        ((page, space) for space in view.spaces for page in space.pages.values()),
        key=lambda pair: (pair[0].segment, pair[0].offset),
    )
    with PageReader(view, device) as reader:
        for page, space in pages:
            try:
                reader.check(space, page)
            except (IntegrityError, OSError) as error:
                suspects.append((space, page, str(error)))
            else:
                verdict.pages += 1
                verdict.bytes += page.length
            if on_read is not None:
                on_read(page.length)
    if suspects:
        _judge(verdict, suspects, read_folder(view.path, device, keyring=view.keyring))
    verdict.damage += _unused(view)
    return verdict


def _judge(verdict: Verdict, suspects: Sequence[tuple[SpaceView, PutEntry, str]], now: FolderView) -> None:
    for space, page, problem in suspects:
        if not now.still_names(space, page):
            verdict.left += 1
            continue
        verdict.damage.append(
            Damage(
                problem=problem,
                root=space.root.hex()[:PREFIX_DIGITS],
                key=page.key.hex()[:PREFIX_DIGITS],
                segment=page.segment,
                offset=page.offset,
            )
        )


def _unused(view: FolderView) -> list[Damage]:
    """What the store leaves out as a whole."""
    lost = [
        Damage(problem="the namespace is not the one of its root", root=root.hex()[:PREFIX_DIGITS])
        for root in view.lost_spaces
    ]
    named = {page.segment for space in view.spaces for page in space.pages.values()}
    return lost + [
        Damage(problem=f"the whole segment is left out: {segment.problem}", segment=segment.number)
        for segment in view.segments.values()
        # One without pages is what a crash leaves of a segment that was just begun.
        if segment.problem and segment.number in named
    ]
