"""What the scheduler's side tells the workers' side with each step, and what it hears back."""

from __future__ import annotations

import msgspec

from workmem.core.keys import BlockKey
from workmem.core.layout import Namespace
from workmem.core.outcomes import MissReason

LATE = "late"
"""Why a page was not loaded: it did not come in time."""
NO_ROOM = "no room"
"""Dram is held by others."""
OTHER_WEIGHTS = "weights"
"""They were changed after it was stored."""
DAMAGED = frozenset({MissReason.CORRUPT.value, LATE})
"""A page of which this is true is not to be promised again soon. What else failed, a lookup knows by itself."""


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of the engine that it believes will be filled."""

    request: str
    blocks: tuple[int, ...]
    """In prefix order."""
    is_async: bool
    """The request waits aside; else this step computes with what is loaded."""


class LoadOp(Promise, frozen=True, kw_only=True):
    """Pages to bring into them."""

    namespace: Namespace
    """Of the first worker; each takes its own rank."""
    keys: tuple[BlockKey, ...]


class SaveOp(msgspec.Struct, frozen=True):
    """Blocks that this step completes, neighbours in a prefix."""

    namespace: Namespace
    keys: tuple[BlockKey, ...]
    parent: bytes
    """Key of the block before the first; empty for the first of a context."""
    depth: int
    """Number of blocks before the first."""
    tokens: tuple[int, ...]
    """Of all blocks, one behind the other."""
    blocks: tuple[int, ...]


class StepPlan(msgspec.Struct):
    """One step. `written`: blocks that the engine writes to in it; what is still being saved from them comes first."""

    loads: list[LoadOp] = []
    saves: list[SaveOp] = []
    written: list[int] = []
    broken: list[Promise] = []
    """Nothing of these is to be had."""
    is_idle: bool = False
    """Nothing is computed in it."""
    holds_back: bool = False
    """Somebody waits for a handoff."""
    is_off: bool = False
    """The scheduler's side does nothing any more: what the step writes to is not known."""
    epoch: int = 0
    """In which it was planned."""
    resets: int = 0
    """How often the engine had dropped all of its own blocks by then."""


class Loaded(msgspec.Struct):
    """How a load ended: so many pages, from the first, are in place."""

    request: str
    pages: int
    why_short: str = ""
    """Why the next one is not."""


class StaleEpoch(msgspec.Struct, frozen=True):
    """The model's weights were changed in this epoch: nothing of it is a hit for them."""

    epoch: int
    is_empty: bool
    """The engine has dropped its own blocks since it computed with the weights of before."""


class StepReport(msgspec.Struct):
    """Of one worker, or of all: a page is in place when every worker has its part."""

    loads: dict[str, Loaded] = {}
    off: str = ""
    """Why the worker does nothing any more."""
    stale: StaleEpoch | None = None

    def with_(self, other: StepReport) -> StepReport:
        """Both as one."""
        loads = dict(self.loads)
        for request, load in other.loads.items():
            mine = loads.get(request)
            if mine is None or load.pages < mine.pages:
                loads[request] = load
        return StepReport(loads, self.off or other.off, self.stale or other.stale)
