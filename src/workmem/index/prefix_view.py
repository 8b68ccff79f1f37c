"""What an engine holds, as a forest of contexts: stretches of blocks that are alike are one line."""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec

from workmem.index.residency import Block, Holder, ResidencyIndex

SESSIONS_SHOWN = 4
TOKENS_SHOWN = 4


class Stretch(msgspec.Struct):
    """Neighbouring blocks that are in the same places, up to a fork or to where the places change."""

    blocks: int
    tokens: int
    places: list[str]
    """Media; of other ranks than 0 as `GPU/1`. Empty: the engine holds only what lies behind."""
    sessions: list[str]
    """The latest of some of the blocks, each once."""
    salt: str
    """First digits of a digest of it: a salt may be a secret."""
    adapter: str
    start: list[int]
    """First token ids."""
    is_first: bool
    """A context begins here. A stretch on top without it has something before it that is not known."""
    below: list[Stretch] = []


class EngineView(msgspec.Struct):
    """One engine."""

    engine: str
    blocks: dict[str, int]
    """Blocks by place."""
    contexts: list[Stretch]
    """The longest first."""


def view_of(index: ResidencyIndex, engine: str) -> EngineView:
    """What `index` knows of an engine. Takes time with the number of its blocks."""
    chosen = _with_what_leads_there(index.held_by(engine))
    below: dict[Block | None, list[Block]] = {}
    for block in chosen:
        below.setdefault(block.parent, []).append(block)
    mask = index.mask_of(engine)
    tops: list[Stretch] = []
    todo = [(block, tops) for block in below.get(None, ())]
    while todo:
        block, siblings = todo.pop()
        stretch, after = _stretch(index, engine, block, mask, below)
        siblings.append(stretch)
        todo += [(child, stretch.below) for child in after]
    _sort(tops)
    held = {
        place_of(holder): count for holder, count in index.stats().holders.items() if holder.engine == engine
    }
    return EngineView(engine, held, tops)


def place_of(holder: Holder) -> str:
    """Short name of a place within its engine."""
    parts = [holder.medium, str(holder.rank) if holder.rank or holder.group else ""]
    return "/".join(part for part in parts if part) + (f"#{holder.group}" if holder.group else "")


def _with_what_leads_there(held: set[Block]) -> set[Block]:
    found = set(held)
    for block in held:
        above = block.parent
        while above is not None and above not in found:
            found.add(above)
            above = above.parent
    return found


def _stretch(
    index: ResidencyIndex, engine: str, top: Block, mask: int, below: dict[Block | None, list[Block]]
) -> tuple[Stretch, list[Block]]:
    """The stretch that begins with `top`, and the blocks that follow it."""
    here = top.holders & mask
    sessions: Counter[str] = Counter()
    block, blocks, tokens = top, 0, 0
    while True:
        blocks += 1
        tokens += len(block.tokens or ())
        sessions[block.origin.session] += 1
        after = below.get(block, [])
        if len(after) != 1 or after[0].holders & mask != here:
            break
        block = after[0]
    del sessions[""]
    places = [place_of(holder) for holder in index.holders_of(top) if holder.engine == engine]
    stretch = Stretch(
        blocks=blocks,
        tokens=tokens,
        places=sorted(places),
        sessions=[name for name, _ in sessions.most_common(SESSIONS_SHOWN)],
        salt=hashlib.sha256(top.origin.salt.encode()).hexdigest()[:8] if top.origin.salt else "",
        adapter=top.origin.adapter,
        start=list((top.tokens or [])[:TOKENS_SHOWN]),
        is_first=top.is_first,
        below=[],
    )
    return stretch, after


def _sort(tops: list[Stretch]) -> None:
    """The one with most tokens first, itself and all behind it."""
    order: list[list[Stretch]] = [tops]
    for siblings in order:
        order += [one.below for one in siblings]
    size: dict[int, int] = {}
    for siblings in reversed(order):
        for one in siblings:
            size[id(one)] = one.tokens + sum(size[id(child)] for child in one.below)
        siblings.sort(key=lambda one: -size[id(one)])
