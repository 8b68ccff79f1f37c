"""Who computes what in the next step. No tensors, no threads: sequences, blocks and a token budget.

Admission commits a request's whole growth (prompt plus `max_tokens`) against the pool before it starts,
so a running request never has to stop for memory. A request that does not fit lets others past, but only
BYPASS_MAX times, so it neither stalls the line nor starves. Preemption exists for priority alone and
loses nothing: the victim's full blocks stay cached and it resumes from them.
"""

from __future__ import annotations

import bisect
import dataclasses
from enum import StrEnum
from typing import Protocol

from workmem.core.errors import EngineError
from workmem.core.events import BoundReached, EventSink, RequestAdmitted, RequestPreempted
from workmem.core.keys import BlockKey
from workmem.core.outcomes import MissReason, TierName
from workmem.engines.embedded.block_pool import BlockPool
from workmem.engines.embedded.handoffs import Handoffs
from workmem.engines.embedded.sequence import Phase, Sequence

BYPASS_MAX = 64
LEASES_WAITING_MAX = 16
"""Requests that may hold a lease on dram at a time before they are computed."""


class Verdict(StrEnum):
    """Why a waiting request was or was not admitted."""

    ADMITTED = "admitted"
    FETCHING = "fetching"
    """Its blocks, to be read there in place, are on their way to dram; or others hold the leases there may be."""
    PENDING = "pending"
    """Another request is computing the very blocks it needs next: compute once."""
    NO_ROOM = "no_room"


class Fetcher(Protocol):
    """The engine's side of admission: blocks below vram. Implemented by `restore.Restorer`."""

    def fetch(self, seq: Sequence, vram_blocks: int, *, in_place: bool) -> bool:
        """See that `seq` holds a lease on what the store has behind its first `vram_blocks` blocks.

        False while pages that are to be read `in_place` in dram are still on their way.
        """
        ...

    def fetched(self, seq: Sequence, vram_blocks: int) -> int:
        """Blocks the lease offers behind the first `vram_blocks`, those on their way included."""
        ...

    def restore(self, seq: Sequence, vram_blocks: int, blocks: list[int]) -> None:
        """Start moving leased pages into `blocks`, the sequence's blocks from `vram_blocks` on.

        The sequence has a `gate` from then on and is computed when that is open.
        """
        ...

    def attach(self, seq: Sequence) -> int:
        """Read leased pages in place from dram instead; returns how many (they become `spilled`)."""
        ...

    def spill(self, seq: Sequence, count: int) -> bool:
        """Let the first `count` vram blocks go, reading them from dram from now on. False: not saved yet."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Give back every lease of `seq`; ends a load under way."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Tokens [start, start + count) of a sequence, to be computed in this step."""

    seq: Sequence
    start: int
    count: int

    @property
    def is_decode(self) -> bool:
        """One token, and it is the last one known."""
        return self.count == 1 and self.start + 1 == len(self.seq.tokens) and self.seq.output_len > 0

    @property
    def samples(self) -> bool:
        """The step ends at the last known token: its logits choose the next."""
        return self.start + self.count == len(self.seq.tokens)


class Scheduler:
    """Owned by the engine thread."""

    def __init__(
        self,
        pool: BlockPool,
        fetcher: Fetcher,
        *,
        block_tokens: int,
        batch_tokens: int,
        running_max: int,
        dram_blocks: int,
        sink: EventSink,
        handoffs: Handoffs | None = None,
    ) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preempted_count = 0
        self.pending_count = 0
        self.failed: list[tuple[Sequence, EngineError]] = []
        """Running sequences that cannot go on; whoever called `plan` finishes them."""
        self._pool = pool
        self._fetcher = fetcher
        self._block_tokens = block_tokens
        self._batch_tokens = batch_tokens
        self._running_max = running_max
        self._dram_blocks = dram_blocks
        self._sink = sink
        self._handoffs = handoffs or Handoffs(None, 0.0)
        self._computing: dict[BlockKey, Sequence] = {}

    # --- queue ---

    def add(self, seq: Sequence) -> None:
        """Queue a request in order of (priority, arrival)."""
        if seq.admitted_at is None and seq.wait is None:
            self._handoffs.arrives(seq)
        bisect.insort(self.waiting, seq, key=lambda s: s.order)

    @property
    def holds_back(self) -> bool:
        """Somebody waits for blocks that are computed elsewhere."""
        return any(seq.wait is not None and not seq.wait.is_over for seq in self.waiting)

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it stands; its named blocks stay cached."""
        self._handoffs.forget(seq)
        if seq.phase is Phase.RUNNING:
            self.running.remove(seq)
            self._give_back(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
            self._fetcher.forget(seq)
        seq.phase = Phase.DONE

    # --- one step ---

    def plan(self, now: float) -> list[Work]:
        """Admit what fits, then share the token budget: one token per decoding request, the rest prefill."""
        self._handoffs.step_begins(now)
        self._admit(now)
        decodes: list[Work] = []
        prefills: list[Sequence] = []
        for seq in self.running:
            if seq.is_loading:
                continue
            left = len(seq.tokens) - seq.computed
            if left == 1 and seq.output_len > 0:
                if self._grow(seq, seq.computed + 1):
                    decodes.append(Work(seq, seq.computed, 1))
            else:
                prefills.append(seq)
        budget = self._batch_tokens - len(decodes)
        if decodes:
            # Those who wait for their next token should not wait for a whole batch of somebody's prompt.
            budget = min(budget, max(self._batch_tokens // 2, 1))
        work: list[Work] = []
        for seq in sorted(prefills, key=lambda s: s.order):
            count = min(len(seq.tokens) - seq.computed, budget)
            if seq.window:
                count = min(count, seq.window * self._block_tokens // 2)
            if count > 0 and self._grow(seq, seq.computed + count):
                work.append(Work(seq, seq.computed, count))
                budget -= count
        return work + decodes

    def computed(self, seq: Sequence, upto: int) -> None:
        """Tokens before `upto` now have their KV; nobody needs to wait for those blocks any more."""
        for key in seq.keys[seq.computed // self._block_tokens : upto // self._block_tokens]:
            if self._computing.get(key) is seq:
                del self._computing[key]
        seq.computed = upto

    def lost(self, seq: Sequence, blocks: int) -> None:
        """Blocks of `seq` from `blocks` on are not what was to be loaded into them: it computes them."""
        seq.computed = blocks * self._block_tokens
        seq.restored = min(seq.restored, blocks)
        self._claim(seq, blocks)

    def preempt(self, victim: Sequence, *, by: str, reason: str) -> None:
        """Back to the queue with everything it has generated; its cached blocks wait for it."""
        self.running.remove(victim)
        if victim.gate is not None:
            # Nothing of what was on its way has been used: what it finds the next time is what counts.
            victim.admitted_at = None
        self._give_back(victim)
        victim.phase = Phase.WAITING
        victim.computed = victim.named = 0
        self.preempted_count += 1
        self._sink(RequestPreempted(request_id=victim.id, by=by, reason=reason))
        self.add(victim)

    # --- admission ---

    def _admit(self, now: float) -> None:
        passed: list[Sequence] = []
        leases = sum(1 for seq in self.waiting if seq.lease is not None)
        leases += sum(1 for seq in self.running if seq.is_loading)
        # For one that waits no room is made: it cannot use it yet.
        for seq in [seq for seq in self.waiting if not self._handoffs.waits(seq, self._hits, now)]:
            if len(self.running) >= self._running_max and not self._preempt_for(seq, places=1):
                break
            had_lease = seq.lease is not None
            verdict = self._try_admit(seq, now, may_lease=had_lease or leases < LEASES_WAITING_MAX)
            if verdict is Verdict.NO_ROOM and self._preempt_for(seq, places=0):
                verdict = self._try_admit(seq, now, may_lease=True)
            leases += (seq.is_loading or (seq.phase is Phase.WAITING and seq.lease is not None)) - had_lease
            if verdict is Verdict.ADMITTED:
                for other in passed:
                    other.bypassed += 1
            elif verdict is Verdict.NO_ROOM:
                if any(running.window for running in self.running):
                    # Whoever is larger than the pool needs dram to go on; whoever waits can ask again.
                    self._fetcher.forget(seq)
                if seq.bypassed >= BYPASS_MAX:
                    if seq.bypassed == BYPASS_MAX:
                        seq.bypassed += 1
                        self._sink(BoundReached(name="engine.bypass", limit=BYPASS_MAX, detail=seq.id))
                    break
                passed.append(seq)

    def _try_admit(self, seq: Sequence, now: float, *, may_lease: bool) -> Verdict:
        oversize = self._is_oversize(seq)
        hits = self._hits(seq)
        committed = self._commitment(seq)
        need = committed - len(hits) + self._pool.idle_among(hits)
        if need > self._pool.idle_count - self.outstanding():
            return Verdict.NO_ROOM
        if oversize and seq.total_blocks + self._spilling_blocks() > self._dram_blocks:
            return Verdict.NO_ROOM
        if not may_lease or not self._fetcher.fetch(seq, len(hits), in_place=oversize):
            return Verdict.FETCHING
        reusable = self._reusable(seq)
        covered = len(hits) + self._fetcher.fetched(seq, len(hits))
        if covered < len(reusable) and reusable[covered] in self._computing:
            self.pending_count += 1
            return Verdict.PENDING
        self._start(seq, hits, committed=committed, oversize=oversize, now=now)
        return Verdict.ADMITTED

    def _reusable(self, seq: Sequence) -> list[BlockKey]:
        return seq.keys[: seq.reusable_blocks] if seq.request.reuse else []

    def _hits(self, seq: Sequence) -> list[int]:
        """Its leading blocks that are in vram. One larger than the pool reads its own from dram."""
        return [] if self._is_oversize(seq) else self._pool.match(self._reusable(seq))

    def _is_oversize(self, seq: Sequence) -> bool:
        return seq.total_blocks > self._pool.block_count

    def _commitment(self, seq: Sequence) -> int:
        """Vram blocks to promise: the whole growth, or of a context larger than the pool half the pool."""
        return max(self._pool.block_count // 2, 2) if self._is_oversize(seq) else seq.total_blocks

    def _spilling_blocks(self) -> int:
        """Dram blocks promised to running sequences larger than the pool: their whole growth as well."""
        return sum(seq.total_blocks for seq in self.running if seq.window)

    def _start(self, seq: Sequence, hits: list[int], *, committed: int, oversize: bool, now: float) -> None:
        for block in hits:
            self._pool.hold(block)
        seq.table = list(hits)
        seq.committed = committed
        seq.phase = Phase.RUNNING
        tiers = [str(TierName.VRAM)] * len(hits)
        lease_tiers, skip = seq.lease_tiers, len(hits) - seq.lease_start
        if oversize:
            seq.window = committed
            offered = self._fetcher.attach(seq)
        else:
            offered = self._fetcher.fetched(seq, len(hits))
            if offered:
                fresh = self._pool.take(offered)
                seq.table += fresh
                self._fetcher.restore(seq, len(hits), fresh)
            else:
                self._fetcher.forget(seq)
        tiers += lease_tiers[skip : skip + offered]
        seq.computed = (len(hits) + offered) * self._block_tokens
        seq.named = len(hits)
        seq.restored = len(hits) + offered
        if seq.admitted_at is None:
            reason = seq.lookup_reason if seq.request.reuse else MissReason.DISABLED
            seq.note_sources(tiers, reason)
            seq.admitted_at = now
            self._sink(
                RequestAdmitted(
                    request_id=seq.id,
                    prompt_tokens=seq.prompt_len,
                    committed_blocks=committed,
                    queued_s=now - seq.arrived,
                )
            )
        self._claim(seq, len(hits) + offered)
        self.waiting.remove(seq)
        self.running.append(seq)

    def _claim(self, seq: Sequence, first: int) -> None:
        """Who needs blocks of `seq` from `first` on, which it computes, may wait for them."""
        if seq.request.reuse:
            for key in seq.keys[first:]:
                self._computing.setdefault(key, seq)

    def outstanding(self) -> int:
        """Blocks promised to running sequences and not yet taken."""
        return sum(seq.committed - len(seq.table) for seq in self.running)

    def _preempt_for(self, seq: Sequence, *, places: int) -> bool:
        """Make room, and so many `places`, for a more urgent request, last come first to go, if that is enough."""
        victims = sorted(
            (r for r in self.running if r.request.priority > seq.request.priority), key=lambda r: r.order
        )
        needed = self._commitment(seq)
        gain = sum(self._gain(victim) for victim in victims)
        if not victims or needed > self._pool.idle_count - self.outstanding() + gain:
            return False
        freed = 0
        while victims and (freed < places or needed > self._pool.idle_count - self.outstanding()):
            self.preempt(victims.pop(), by=seq.id, reason="priority")
            freed += 1
        return True

    def _gain(self, victim: Sequence) -> int:
        """Blocks that go idle or unpromised when `victim` gives way; shared ones and those being saved do not."""
        alone = sum(1 for block in victim.table if self._pool.holds(block) == 1)
        return alone + victim.committed - len(victim.table)

    # --- blocks ---

    def _grow(self, seq: Sequence, upto: int) -> bool:
        """See that tokens before `upto` have a block. False only while a spill waits for its save."""
        needed = -(-upto // self._block_tokens) - seq.blocks_held
        if needed <= 0:
            return True
        if seq.window and len(seq.table) + needed > seq.window:
            complete = seq.computed // self._block_tokens - len(seq.spilled)
            excess = len(seq.table) + needed - seq.window
            # In runs, not one by one: each spill is a lease.
            count = min(complete, max(excess, seq.window // 4))
            try:
                if count < excess or not self._fetcher.spill(seq, count):
                    return False
            except EngineError as error:
                self.failed.append((seq, error))
                return False
        if seq.window:
            # A spilled block goes idle only when its save has let go of it too.
            others = self.outstanding() - (seq.committed - len(seq.table))
            if needed > self._pool.idle_count - others:
                return False
        seq.table += self._pool.take(needed)
        return True

    def _give_back(self, seq: Sequence) -> None:
        self._fetcher.forget(seq)
        self._pool.let_go(seq.table)
        seq.table = []
        seq.committed = seq.window = 0
        for key in seq.keys:
            if self._computing.get(key) is seq:
                del self._computing[key]
