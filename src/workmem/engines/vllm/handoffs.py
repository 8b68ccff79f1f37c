"""Requests that are held back for blocks which were just computed elsewhere. The rule is `policy.handoff`'s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from workmem.core.keys import BlockKey
from workmem.core.outcomes import Lookup, MissReason
from workmem.engines.vllm.requests import PEER, Tracked
from workmem.policy.handoff import Ending, HandoffWait

LOOKS_MAX = 16
"""Lookups of a step, each a round trip to the store: whoever waits on is asked for again in the next one."""
_NEVER = {MissReason.UNAVAILABLE, MissReason.DISABLED}
"""Of a block that is missing for such a reason none is on its way."""


class Handoffs:
    """Of one engine. Called by its scheduler's thread alone.

    `look`: the leading ones of a request's keys that can be loaded; None where a load of one failed before.
    `expect` tells the store that somebody waits for keys.
    """

    def __init__(
        self,
        look: Callable[[Tracked, Sequence[BlockKey]], Lookup | None],
        expect: Callable[[Tracked, Sequence[BlockKey], float], None],
        block_tokens: int,
        counts: Counter[str],
        clock: Callable[[], float],
        *,
        longest_s: float,
        load_min_blocks: int,
    ) -> None:
        self._look = look
        self._expect = expect
        self._size = block_tokens
        self._counts = counts
        self._clock = clock
        self._longest_s = longest_s
        self._load_min_blocks = load_min_blocks
        self._held: set[str] = set()
        self._looks = 0

    @property
    def holds_back(self) -> bool:
        """Somebody waits."""
        return bool(self._held)

    def arrives(self, tracked: Tracked, *, may_come: bool) -> None:
        """A request has joined the queue. Not `may_come`: nothing of others is ever loaded for it."""
        handoff = tracked.hints.handoff
        if handoff is None:
            return
        now = self._clock()
        # The last token is computed in any case: a block that ends with it is of no use.
        blocks = min(handoff.tokens, tracked.request.num_prompt_tokens - 1) // self._size
        tracked.wait = HandoffWait(handoff, blocks=blocks, longest_s=self._longest_s, now=now)
        if not may_come:
            self._end(tracked, Ending.UNAVAILABLE)

    def step_begins(self) -> None:
        """Another step: requests are asked for again."""
        self._looks = 0

    def waits(self, tracked: Tracked, local: int, seen: Callable[[int, Lookup], None]) -> bool:
        """Whether a request, of which the engine has `local` blocks itself, is held back.

        `seen` hears what is there from a block on.
        """
        wait = tracked.wait
        if wait is None or wait.is_over:
            return False
        now = self._clock()
        is_late = wait.is_late(now)
        is_looked_out = self._looks >= LOOKS_MAX
        if is_late and is_looked_out:
            # What is loaded is looked up once more in any case.
            self._end(tracked, Ending.LATE)
            return False
        if is_looked_out or not wait.is_due(now):
            self._held.add(tracked.request.request_id)
            return True
        self._looks += 1
        # What was there stays, mostly: what is loaded in the end is looked up as for all requests.
        first = max(local, wait.most)
        keys = tracked.keys(first, wait.blocks)
        found = self._look(tracked, keys)
        if found is None or (found.reason in _NEVER and not is_late):
            self._end(tracked, Ending.UNAVAILABLE)
            return False
        there = first + found.blocks
        # What is less than may be loaded at all would be computed: it is not waited for.
        if wait.blocks - local < self._load_min_blocks:
            there = max(there, wait.blocks)
        if wait.observe(there, now):
            self._held.add(tracked.request.request_id)
            self._expect(tracked, keys[found.blocks : found.blocks + 1], now)
            seen(first, found)
            return True
        self._count(tracked)
        return False

    def finished(self, tracked: Tracked) -> dict[str, Any] | None:
        """A request has ended, in whatever state. What its response says."""
        wait = tracked.wait
        if wait is None:
            return None
        self._end(tracked, Ending.LEFT)
        loaded = tracked.sources.total() - tracked.sources[PEER]
        return msgspec.to_builtins(wait.report(loaded))

    def end_all(self, tracked: Sequence[Tracked]) -> None:
        """Nothing of others is a hit any more."""
        for one in tracked:
            if one.wait is not None:
                self._end(one, Ending.UNAVAILABLE)

    def _end(self, tracked: Tracked, ending: Ending) -> None:
        wait = tracked.wait
        if wait is not None and not wait.is_over:
            wait.end(ending, self._clock())
            self._count(tracked)

    def _count(self, tracked: Tracked) -> None:
        assert tracked.wait is not None
        self._held.discard(tracked.request.request_id)
        self._counts[f"handoffs_{tracked.wait.ending}"] += 1
        self._counts["handoff_waited_ms"] += round(1000 * tracked.wait.waited_s)
