"""What this engine's events say of blocks in the store: which of those that passed by here are where.

The store is another process that many share. It keeps and evicts on its own and tells nobody, so what is published
comes from looking: at blocks that were just handed over, until they are there, and in turn at all that were published,
one run of neighbours at a time. Blocks that never passed by this engine are not published, evictions only when their
turn comes, and nothing while the engine takes no steps: its events leave with its steps.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from workmem.core.keys import BlockKey
from workmem.core.outcomes import TierName
from workmem.engines.vllm.facts import Scope

KEYS_MAX = 65_536
"""Blocks that are looked after; past it the run that was used longest ago is published as removed."""
RUN_KEYS_MAX = 512
LOOK_S = 0.2
"""The store is not asked more often."""
LOOKS = 4
"""Runs looked at each time."""
YOUNG_S = 30.0
"""A block that was handed over and is not there after so long was dropped."""


class RunOrigin(msgspec.Struct, frozen=True):
    """Whose blocks these are."""

    scope: Scope
    session: str = ""


class StoredRun(msgspec.Struct, frozen=True):
    """Neighbours in a prefix that came to be in a tier."""

    keys: tuple[BlockKey, ...]
    parent: bytes
    """Key of the block before; empty for the first of a context."""
    tokens: tuple[int, ...]
    tier: TierName
    origin: RunOrigin


class RemovedRun(msgspec.Struct, frozen=True):
    """Blocks that are no longer in a tier."""

    keys: tuple[BlockKey, ...]
    tier: TierName


Announcement = StoredRun | RemovedRun


class _Run:
    """Neighbours in a prefix, and where each was published to be."""

    def __init__(self, parent: bytes, origin: RunOrigin) -> None:
        self.parent = parent
        self.origin = origin
        self.keys: list[BlockKey] = []
        self.tokens = array("I")
        self.tiers: list[TierName | None] = []
        self.until = 0.0
        """Blocks that are not there yet are waited for until then."""

    @property
    def is_young(self) -> bool:
        return None in self.tiers


class Announcer:
    """The store's blocks as far as this engine knows of them. Called by the scheduler's thread alone.

    `resident`: tiers of the leading keys that all workers can load, see `SchedulerSide`; asked at most `LOOKS` times
    per `LOOK_S`, for at most `RUN_KEYS_MAX` keys each.
    """

    def __init__(
        self,
        resident: Callable[[Scope, Sequence[BlockKey]], Sequence[TierName]],
        block_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._resident = resident
        self._size = block_tokens
        self._clock = clock
        self._of: dict[BlockKey, _Run] = {}
        self._runs: dict[_Run, None] = {}
        """Used longest ago first."""
        self._young: dict[_Run, None] = {}
        self._turn: deque[_Run] = deque()
        self._said: list[Announcement] = []
        self._look_at = 0.0

    def __len__(self) -> int:
        return len(self._of)

    def seen(self, keys: Sequence[BlockKey], parent: bytes, tokens: Sequence[int], origin: RunOrigin) -> None:
        """These blocks were handed to the store, or found in it. `parent`: key of the block before, empty for none."""
        size = self._size
        touched: dict[_Run, None] = {}
        for index, key in enumerate(keys):
            run = self._of.get(key)
            if run is None:
                run = self._run_behind(parent, origin)
                run.keys.append(key)
                run.tokens.extend(tokens[index * size : (index + 1) * size])
                run.tiers.append(None)
                self._of[key] = run
            touched[run] = None
            parent = key
        for run in touched:
            if run.is_young:
                run.until = self._clock() + YOUNG_S
                self._young[run] = None
            del self._runs[run]
            self._runs[run] = None
        while len(self._of) > KEYS_MAX:
            self.counts["announcer_full"] += 1
            self._forget(next(iter(self._runs)))

    def forget_all(self) -> None:
        """No block of before is a hit any more."""
        for run in [*self._runs]:
            self._forget(run)

    def take(self) -> list[Announcement]:
        """What changed since the last call, as far as it is known."""
        now = self._clock()
        if now >= self._look_at and self._runs:
            self._look_at = now + LOOK_S
            young = [*self._young][: LOOKS - 1]
            for run in young:
                del self._young[run]
                self._look(run, now)
            self._look_in_turn(now, young)
        said, self._said = self._said, []
        return said

    # -- inside

    def _run_behind(self, parent: bytes, origin: RunOrigin) -> _Run:
        """The run that ends with `parent`, if there is room in it, or a new one."""
        before = self._of.get(BlockKey(parent))
        if (
            before is not None
            and before.keys[-1] == parent
            and before.origin == origin
            and len(before.keys) < RUN_KEYS_MAX
        ):
            return before
        run = _Run(parent, origin)
        self._runs[run] = None
        self._turn.append(run)
        return run

    def _look_in_turn(self, now: float, looked: Sequence[_Run]) -> None:
        """Look at the run whose last look is longest ago, of those that are not looked at for another reason."""
        for _ in range(len(self._turn)):
            run = self._turn.popleft()
            if run not in self._runs:
                continue
            self._turn.append(run)
            if run not in self._young and run not in looked:
                self._look(run, now)
                return

    def _look(self, run: _Run, now: float) -> None:
        """Ask where the blocks of a run are. What lies behind one that is gone cannot be loaded, and is gone too."""
        found = [*self._resident(run.origin.scope, run.keys)]
        self.counts["looks"] += 1
        tiers: list[TierName | None] = [*found, *[None] * (len(run.keys) - len(found))]
        before, run.tiers = run.tiers, tiers
        gone = [was if was is not is_ else None for was, is_ in zip(before, tiers, strict=True)]
        come = [is_ if was is not is_ else None for was, is_ in zip(before, tiers, strict=True)]
        for start, end, tier in _stretches(gone):
            self._said.append(RemovedRun(tuple(run.keys[start:end]), tier))
        for start, end, tier in _stretches(come):
            self._said.append(
                StoredRun(
                    keys=tuple(run.keys[start:end]),
                    parent=run.keys[start - 1] if start else run.parent,
                    tokens=tuple(run.tokens[start * self._size : end * self._size]),
                    tier=tier,
                    origin=run.origin,
                )
            )
        if not run.is_young:
            return
        if now < run.until:
            self._young[run] = None
        else:
            self._cut(run, len(found))

    def _cut(self, run: _Run, keep: int) -> None:
        """Only the first `keep` blocks of a run are looked after any longer: the others are not there."""
        for key in run.keys[keep:]:
            del self._of[key]
        self.counts["blocks_not_found"] += len(run.keys) - keep
        del run.keys[keep:], run.tiers[keep:], run.tokens[keep * self._size :]
        if not keep:
            del self._runs[run]

    def _forget(self, run: _Run) -> None:
        for start, end, tier in _stretches(run.tiers):
            self._said.append(RemovedRun(tuple(run.keys[start:end]), tier))
        for key in run.keys:
            del self._of[key]
        del self._runs[run]
        self._young.pop(run, None)


def _stretches(tiers: Sequence[TierName | None]) -> list[tuple[int, int, TierName]]:
    """Start, end and tier of each stretch of neighbours in one tier."""
    found: list[tuple[int, int, TierName]] = []
    for index, tier in enumerate(tiers):
        if tier is None:
            continue
        if found and found[-1][1] == index and found[-1][2] is tier:
            found[-1] = (found[-1][0], index + 1, tier)
        else:
            found.append((index, index + 1, tier))
    return found
