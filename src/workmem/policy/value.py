"""What is worth least leaves first: value = P(reuse) x cost to recompute / bytes. Rules E11-E17: docs/internals/eviction.md.

A block lives for a time that is proportional to its value, measured in turnovers of the tier (greedy-dual).
Values are whole steps on a wheel of rings: a pick takes the oldest leaf of the ring under the hand, and the
hand goes on when that ring is empty. So a pick costs O(1), and a block 25 bytes.

There are two wheels: blocks that were never used again have one of their own, and room that is bounded. Past
it they make room for each other only, so that a scan recycles its own frames (R8, E17).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from workmem.policy.order import NO_ROW, Loss, Prospect
from workmem.policy.rings import PARKED, PINNED, REUSED, Rings

EVEN_DEPTH = 2048
"""Depth, in blocks of 16 tokens, at which attention over the prefix costs as much as a block's own layers.

Per token a model of 8e9 parameters does 1.6e10 operations in its layers and 5e5 per token of context, so
they are even at 32 thousand tokens. Larger models have it further out, smaller ones nearer.
"""
RELOAD_COST = 0.25
"""Of recomputing, where another tier holds the block: a 2 MiB page is read from NVMe in 0.5 ms, and computed
in 2 ms by a GPU that prefills 8,000 tokens a second."""
STEPS = 64
"""Steps of the wheel that a block lives which is certain to be used again and costs 1."""
DEPTH_FACTOR_MAX = 6.0
"""Past it a deeper block is not worth more: a single context of a million tokens must not own the tier."""
USES_MAX = 7
"""Further uses are not told apart: each class needs enough blocks to learn from."""
PRIOR_ENDINGS = 64.0
"""Before anything is seen each class counts as if so many blocks had ended, half of them by being used again."""
HALF_LIFE = 1 << 14
"""Endings of a class after which what was learned before counts half: workloads change."""
UNPROVEN_LEAST = 0.2
"""Of the bytes here that blocks which were never used again may fill at the least: what segmented LRU leaves them."""
SCAN_TURNOVERS = 16.0
"""So often may blocks that were never used again turn the tier over at their own cost before reused ones make room as
well; a use of all that is here buys it anew. Far more than one scan, and an end: what was used once must not stay for
ever. A block that is certain to be used again and costs 1 grows as old as it gets in that time."""

_RINGS = 512
"""Of a wheel: more than the longest life, STEPS x DEPTH_FACTOR_MAX, so that no block laps the hand."""
_PROSPECT, _LOSS = 3, 4
"""Bits of the advice column."""


class ReuseOdds:
    """How likely a block is used again, by how often it was: learned from how blocks in each class ended."""

    def __init__(self) -> None:
        self._used = [PRIOR_ENDINGS / 2] * (USES_MAX + 1)
        self._ended = [PRIOR_ENDINGS] * (USES_MAX + 1)
        self.odds = [0.5] * (USES_MAX + 1)

    def count(self, uses: int, *, again: int, left: int) -> None:
        """`again` blocks that had been used `uses` times were used once more, `left` were evicted instead."""
        used, ended = self._used[uses] + again, self._ended[uses] + (again + left)
        if ended > 2 * HALF_LIFE:
            used, ended = used / 2, ended / 2
        self._used[uses], self._ended[uses] = used, ended
        self.odds[uses] = used / ended if used < ended else 1.0


class ValueOrder(Rings):
    """See `EvictionOrder`. Takes all advice: pins, announced uses, sessions that are done, copies elsewhere."""

    def __init__(self, *, even_depth: int = EVEN_DEPTH) -> None:
        super().__init__(ends=2 * _RINGS)
        self._even_depth = even_depth
        self._hand = 0
        self._unproven_hand = 0
        """In the second wheel, which follows the first."""
        self._bytes = 0
        self._unproven_bytes = 0
        self._unproven_share = UNPROVEN_LEAST
        self._credit = SCAN_TURNOVERS
        """Turnovers of unproven blocks for which reused ones are still kept out of it."""
        self._owed_steps = 0.0
        """Of the first hand, for the time that a scan took."""
        self._all_wait = False
        """No unproven block can leave: the last pick went all the way round, and none has come since."""
        self._depth = array("H")
        self._uses = bytearray()
        self._advice = bytearray()
        self._reuse = ReuseOdds()

    def advise(
        self, rows: Sequence[int], *, prospect: Prospect | None = None, loss: Loss | None = None
    ) -> None:
        """See `EvictionOrder.advise`."""
        self._hear(rows, prospect)
        super().advise(rows, prospect=prospect, loss=loss)
        for row in rows:
            if not self._flags[row]:
                continue
            advice = self._advice[row]
            if prospect is not None:
                advice = (advice & ~_PROSPECT) | prospect
            if loss is not None:
                advice = (advice & ~_LOSS) | (loss * _LOSS)
            if advice == self._advice[row]:
                continue
            self._advice[row] = advice
            if prospect != Prospect.DONE and not self._flags[row] & (PARKED | PINNED):
                self._renew((row,), self._ring(row))
        self._last = NO_ROW

    def _hear(self, rows: Sequence[int], prospect: Prospect | None) -> None:
        for row in rows:
            if not self._flags[row]:
                continue
            if prospect in {Prospect.PINNED, Prospect.EXPECTED}:
                self._vouch(row)
            elif prospect == Prospect.UNKNOWN and not self._uses[row]:
                self._done(row)  # A pin that is over is no use.

    def _note_restored(self, runs: Sequence[tuple[int, int, int]], parents: Sequence[int]) -> None:
        depth, parent_of = self._depth, self._parent
        for row, index, count in runs:
            parent = parents[index]
            if parent == NO_ROW:
                first = 0
            elif depth[parent] or parent_of[parent] == NO_ROW:
                first = min(depth[parent] + 1, 65535)
            else:
                # It is in a later run.
                self._find_depth(row)
                first = depth[row]
            rising = range(first, min(first + count, 65536))
            depth[row : row + count] = array("H", rising) + array("H", (65535,)) * (count - len(rising))

    def _find_depth(self, row: int) -> None:
        path = []
        while self._parent[row] != NO_ROW and not self._depth[row]:
            path.append(row)
            row = self._parent[row]
        depth = self._depth[row]
        for below in reversed(path):
            depth = min(depth + 1, 65535)
            self._depth[below] = depth

    def _ring_of_new(self, row: int, parent: int, *, is_back: bool) -> int:
        if parent != NO_ROW:
            self._depth[row] = min(self._depth[parent] + 1, 65535)
        size = self._size[row]
        self._bytes += size
        self._unproven_bytes += size
        if is_back:
            # It had not ended when it left. Without this, what leaves too early could never prove itself.
            self._uses[row] = 1
            self._reuse.count(0, again=1, left=-1)
            self._vouch(row)
        return self._ring(row)

    def _ring_of_restored(self, rows: Sequence[int], sizes: Sequence[int]) -> int:  # noqa: ARG002 - a hook
        added = sum(sizes)
        self._bytes += added
        self._unproven_bytes += added
        self._all_wait = False
        return _RINGS + (self._unproven_hand + int(self._reuse.odds[0] * STEPS)) % _RINGS

    def _ring_of(self, row: int) -> int:
        if self._flags[row] & REUSED:
            return self._hand
        self._all_wait = False
        return _RINGS + self._unproven_hand

    def _vouch(self, row: int) -> None:
        """Something speaks for a block now: a use, a pin, an announced use."""
        if not self._flags[row] & REUSED:
            self._flags[row] |= REUSED
            self._unproven_bytes -= self._size[row]

    def regret(self, size: int, *, was_used: bool) -> None:
        """See `EvictionOrder.regret`. The kind of block that is missed gets so much more of the room."""
        step = size / max(size, self._bytes)
        share = self._unproven_share + (-step if was_used else step)
        self._unproven_share = min(1.0, max(UNPROVEN_LEAST, share))

    def _ring(self, row: int) -> int:
        """Where a block belongs that is used, or looked at anew, now."""
        odds = self._reuse.odds[self._uses[row]]
        cost = min(1 + self._depth[row] / self._even_depth, DEPTH_FACTOR_MAX)
        advice = self._advice[row]
        if advice:
            if advice & _PROSPECT == Prospect.EXPECTED:
                odds = 1.0
            if advice & _LOSS:
                cost *= RELOAD_COST
        life = int(odds * cost * STEPS) or 1
        if self._flags[row] & REUSED:
            return (self._hand + life) % _RINGS
        self._all_wait = False
        return _RINGS + (self._unproven_hand + life) % _RINGS

    def _victim_rings(self) -> Iterable[int]:
        if self._is_scanned() and not self._all_wait:
            for _ in range(_RINGS):
                yield _RINGS + self._unproven_hand
                self._unproven_hand = (self._unproven_hand + 1) % _RINGS
            self._all_wait = True
        for _ in range(_RINGS):
            yield _RINGS + self._unproven_hand
            yield self._hand
            self._hand = (self._hand + 1) % _RINGS
            self._unproven_hand = (self._unproven_hand + 1) % _RINGS
        yield self._pinned_end

    def _is_scanned(self) -> bool:
        """Whether unproven blocks have what room they may, and make room for each other (E17)."""
        return self._credit > 0 and self._unproven_bytes >= self._unproven_share * self._bytes

    def _scan_on(self, turnovers: float) -> None:
        """Reused blocks grow older in a scan too, they only do not leave yet."""
        self._credit -= turnovers
        self._owed_steps += turnovers * STEPS / SCAN_TURNOVERS
        while self._owed_steps >= 1:
            self._owed_steps -= 1
            if self._newer[self._hand] == self._hand:
                self._hand = (self._hand + 1) % _RINGS

    def _use(self, rows: Sequence[int]) -> None:
        if rows:
            self._credit = min(SCAN_TURNOVERS, self._credit + SCAN_TURNOVERS * len(rows) / self._count)
        seen = [0] * (USES_MAX + 1)
        steps = [odds * STEPS for odds in self._reuse.odds]
        uses_of, advice_of, depth, per_block = self._uses, self._advice, self._depth, 1 / self._even_depth
        hand, run, run_end = self._hand, list[int](), NO_ROW
        for row in rows:
            if not self._flags[row] & REUSED:
                self._vouch(row)
            uses = uses_of[row]
            seen[uses] += 1
            if uses < USES_MAX:
                uses_of[row] = uses = uses + 1
            if advice_of[row]:
                if advice_of[row] & _PROSPECT in {Prospect.EXPECTED, Prospect.DONE}:
                    advice_of[row] &= ~_PROSPECT
                end = self._ring(row)
            else:
                # As `_ring` has it, without a call per block.
                life = int(steps[uses] * min(1 + depth[row] * per_block, DEPTH_FACTOR_MAX))
                end = (hand + (life or 1)) % _RINGS
            if end != run_end:  # Neighbours in a chain mostly share a ring.
                self._renew(run, run_end)
                run, run_end = [], end
            run.append(row)
        self._renew(run, run_end)
        for uses, again in enumerate(seen):
            if again:
                self._reuse.count(uses, again=again, left=0)

    def _done(self, row: int) -> None:
        if self._flags[row] & REUSED:
            self._flags[row] &= ~REUSED
            self._unproven_bytes += self._size[row]

    def _forget(self, row: int) -> None:
        size, filled, uses = self._size[row], self._bytes, self._uses
        if not self._flags[row] & REUSED:
            # Where all that is here is unproven nothing is kept out.
            if self._unproven_bytes < filled and self._is_scanned():
                self._scan_on(size / filled)
            self._unproven_bytes -= size
        self._bytes = filled - size
        self._reuse.count(uses[row], again=0, left=1)
        uses[row] = self._advice[row] = self._depth[row] = 0

    def _reach(self, row: int) -> None:
        super()._reach(row)
        missing = len(self._flags) - len(self._uses)
        self._depth.frombytes(bytes(2 * missing))
        self._uses.extend(bytes(missing))
        self._advice.extend(bytes(missing))
