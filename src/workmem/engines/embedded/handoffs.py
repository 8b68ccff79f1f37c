"""Requests that wait aside for blocks which were just computed elsewhere. The rule is `policy.handoff`'s."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection

from workmem.core.errors import CapacityError
from workmem.core.outcomes import Lookup, MissReason, TierName
from workmem.engines.embedded.sequence import Sequence
from workmem.policy.handoff import Ending, HandoffWait
from workmem.store.contract import Lease, SteeredStore
from workmem.store.expecting import Expecting, news

LOOKS_MAX = 16
"""Lookups of a step, each perhaps a round trip to the store."""
LEASING_MAX = 16
"""Requests whose pages are brought to dram while they wait."""
_NEVER = {MissReason.UNAVAILABLE, MissReason.DISABLED}


class Handoffs:
    """Owned by the engine thread."""

    def __init__(self, store: SteeredStore | None, longest_s: float) -> None:
        self.counts: Counter[str] = Counter()
        """Waits by how they ended."""
        self.waited_s = 0.0
        self._store = store
        self._expecting = None if store is None else Expecting(store)
        self._longest_s = longest_s
        self._looks = 0
        self._now = 0.0
        """When the last step began."""
        self._leases: dict[str, list[Lease]] = {}
        """Of requests that wait: pages on their way to dram, or there."""

    def arrives(self, seq: Sequence) -> None:
        """A request has joined the queue."""
        handoff = seq.request.handoff
        if handoff is None:
            return
        blocks = min(handoff.tokens // seq.block_tokens, seq.reusable_prompt_blocks)
        seq.wait = HandoffWait(handoff, blocks=blocks, longest_s=self._longest_s, now=seq.arrived)
        if self._store is None or not seq.request.reuse:
            self._end(seq, Ending.UNAVAILABLE, seq.arrived)

    def step_begins(self, now: float) -> None:
        """Another step: whoever waits is asked for again."""
        self._looks, self._now = 0, now

    def waits(self, seq: Sequence, in_vram: Callable[[Sequence], Collection[int]], now: float) -> bool:
        """Whether `seq`, of which `in_vram` has the leading blocks, is to wait on."""
        wait = seq.wait
        if wait is None or wait.is_over or self._store is None:
            return False
        is_late = wait.is_late(now)
        is_looked_out = self._looks >= LOOKS_MAX
        if is_late and is_looked_out:
            # What is loaded is looked up once more in any case.
            self._end(seq, Ending.LATE, now)
            return False
        if is_looked_out or not wait.is_due(now):
            return True
        self._looks += 1
        # What was there stays, mostly: what is loaded in the end is looked up as for all requests.
        first = max(len(in_vram(seq)), wait.most)
        keys = seq.keys[first : wait.blocks]
        store = self._store
        found = news(lambda part: store.lookup(seq.root, part), keys)
        if found.reason in _NEVER and not is_late:
            self._end(seq, Ending.UNAVAILABLE, now)
            return False
        if wait.observe(first + found.blocks, now):
            assert self._expecting is not None
            self._expecting.expect(seq.root, keys[found.blocks : found.blocks + 1], now)
            self._fetch(seq, first, found)
            return True
        self._ended(seq)
        return False

    def forget(self, seq: Sequence) -> None:
        """It has ended, in whatever state."""
        self._end(seq, Ending.LEFT, self._now)

    # -- inside

    def _fetch(self, seq: Sequence, first: int, found: Lookup) -> None:
        """Have what came below dram start its way to there: the wait is for what comes behind it."""
        assert self._store is not None
        mine = self._leases.get(seq.id, [])
        start = max(first, seq.wait_leased)
        end = first + found.blocks
        if all(tier is TierName.DRAM for tier in found.tiers[start - first :]):
            return
        if not mine and len(self._leases) >= LEASING_MAX:
            return
        seq.wait_leased = end
        try:
            lease = self._store.lease(seq.root, seq.keys[start:end], owner=seq.id, ttl_s=math.inf)
        except CapacityError:
            return
        self._leases[seq.id] = [*mine, lease]

    def _end(self, seq: Sequence, ending: Ending, now: float) -> None:
        if seq.wait is not None and not seq.wait.is_over:
            seq.wait.end(ending, now)
            self._ended(seq)

    def _ended(self, seq: Sequence) -> None:
        assert seq.wait is not None
        for lease in self._leases.pop(seq.id, ()):
            lease.release()
        self.counts[str(seq.wait.ending)] += 1
        self.waited_s += seq.wait.waited_s
