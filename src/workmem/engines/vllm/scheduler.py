"""The side of the connector that runs beside vLLM's scheduler: what is loaded, what is saved, and what is said of it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workmem.core.keys import BlockKey
from workmem.core.outcomes import COMPUTED, Lookup, MissReason, TierName
from workmem.engines.vllm.announcing import Announcement, Announcer, RunOrigin
from workmem.engines.vllm.config import VllmConfig
from workmem.engines.vllm.denied import AWAY_S, Denied
from workmem.engines.vllm.facts import SALT_MAX, EngineFacts, Namespaces, Scope
from workmem.engines.vllm.handoffs import Handoffs
from workmem.engines.vllm.last_saves import LastSaves
from workmem.engines.vllm.levers import Levers
from workmem.engines.vllm.pins import BlockPool
from workmem.engines.vllm.prefetching import Prefetching
from workmem.engines.vllm.requests import EngineRequest, Tracked
from workmem.engines.vllm.steps import (
    DAMAGED,
    LATE,
    NO_ROOM,
    OTHER_WEIGHTS,
    Loaded,
    LoadOp,
    Promise,
    SaveOp,
    StepPlan,
    StepReport,
)
from workmem.store.contract import SteeredStore
from workmem.store.expecting import Expecting, news

log = logging.getLogger("vllm.workmem")

ANSWER = "workmem"
"""Under this name a response's `kv_transfer_params` say where its tokens came from."""
LOAD_OUTCOMES = (
    "whole",
    LATE,
    NO_ROOM,
    OTHER_WEIGHTS,
    "off",
    *(reason.value for reason in MissReason),
    "other",
)
"""Whole, or why it fell short."""
_PREFETCH_TTL_S = 60.0


class SchedulerSide:
    """Of one engine. Called by its scheduler's thread alone.

    `may_load`, `may_save`: what the engine's role lets it do with the store; answers and hints are the same.
    """

    def __init__(
        self,
        facts: EngineFacts,
        fingerprint: str,
        store: SteeredStore,
        settings: VllmConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        announces: bool = False,
        may_load: bool = True,
        may_save: bool = True,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._may_load = may_load
        self._may_save = may_save
        self._store = store
        self._settings = settings
        self._size = facts.block_tokens
        self._namespaces = Namespaces(facts, fingerprint, store)
        self._denied = Denied(settings.deny_s, clock)
        self._away = Denied(min(settings.deny_s, AWAY_S), clock)
        """Blocks of which nothing is known but that their store, or its disk, did not answer."""
        self._requests: dict[str, Tracked] = {}
        self._loads: list[LoadOp] = []
        self._broken: list[Promise] = []
        self._unheard: dict[str, frozenset[int]] = {}
        """Blocks of loads inside a step whose end was not heard of yet, by request."""
        self._is_mixed = False
        """The engine may hold blocks of an epoch before this one."""
        self._resets = 0
        self._prefetching = Prefetching(
            store,
            self._namespaces,
            self.counts,
            share=settings.prefetch_share,
            page_bytes=facts.layout(0).page_bytes,
        )
        self._announcer = Announcer(self._tiers_of, self._size, clock) if announces else None
        self.levers = Levers(
            store,
            settings,
            facts.block_tokens,
            roots=lambda scope: self._namespaces.of(scope)[1],
            lease=self._prefetching.lease,
            give_back=self._prefetching.give_back,
            clock=clock,
        )
        self._expecting = Expecting(store)
        self._handoffs = Handoffs(
            self._look,
            self._expect,
            facts.block_tokens,
            self.counts,
            clock,
            longest_s=settings.handoff_wait_max_s,
            load_min_blocks=settings.load_min_blocks,
        )
        self._is_apart = False
        """Its blocks are of an epoch of its own: no other engine's are hits."""
        self._last_saves = LastSaves()

    def bind(
        self, pool: BlockPool, *, longest_tokens: int, step_tokens: int, watermark_blocks: int = 0
    ) -> None:
        """The engine's pool is there. See `Levers.bind`."""
        self._last_saves.bind(pool)
        self.levers.bind(
            pool, longest_tokens=longest_tokens, step_tokens=step_tokens, watermark_blocks=watermark_blocks
        )

    # -- what a request can have

    def arrives(self, request: EngineRequest, adapter: str | None = "") -> None:
        """A request joins the queue: pages that it will want start their way to dram at once.

        With an `adapter` that nobody can tell apart (None) nothing is loaded for it, nor kept; nor with a salt that is
        longer than any that tells tenants apart.
        """
        if adapter is None or len(request.cache_salt or "") > SALT_MAX:
            return
        tracked = Tracked(request, Scope.of(adapter, request.cache_salt))
        self._requests[request.request_id] = tracked
        self.levers.arrives(tracked)
        self._handoffs.arrives(tracked, may_come=self._may_load and not self._is_apart)
        keys = tracked.keys(0, request.num_tokens // self._size)
        if not keys:
            return
        found = self._lookup(tracked, keys)
        tracked.saved = found.blocks
        self._announce(tracked, 0, keys[: found.blocks])
        self._prefetch(tracked, 0, found)

    def match(self, request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        """How many tokens behind the first `computed`, which the engine has, can be loaded; and whether aside.

        None: it is to be asked for again in the next step, as more is on its way.
        """
        tracked = self._requests.get(request.request_id)
        local = computed // self._size
        if tracked is not None and self._handoffs.waits(
            tracked, local, lambda first, found: self._prefetch(tracked, first, found)
        ):
            return None, False
        self.levers.asks(request, computed // self._size, tracked, self._requests)
        if tracked is None:
            return 0, False
        tracked.asks(computed // self._size)
        keys = tracked.keys(tracked.local, request.num_tokens // self._size)
        keys = keys[: min(self._denied.allowed(keys), self._away.allowed(keys))]
        if tracked.limit >= 0:
            keys = keys[: max(0, tracked.limit - tracked.local)]
        if not keys or not self._may_load:
            return 0, False
        found = self._lookup(tracked, keys)
        tiers = found.tiers
        if tracked.saved >= tracked.local:
            tracked.saved = max(tracked.saved, tracked.local + len(tiers))
        tracked.is_async = any(tier is not TierName.DRAM for tier in tiers)
        if not tracked.is_async:
            # The step that loads them computes at least one token.
            tiers = tiers[: (request.num_tokens - 1) // self._size - tracked.local]
        if len(tiers) < self._settings.load_min_blocks:
            tracked.is_async = False
            return 0, False
        tracked.promised = tuple(tier.value for tier in tiers)
        return len(tiers) * self._size, tracked.is_async

    def allocated(self, request: EngineRequest, blocks: Sequence[int], tokens: int) -> None:
        """The engine made room: `tokens` are to be loaded into `blocks`, its whole table."""
        tracked = self._requests[request.request_id]
        count, first = tokens // self._size, tracked.local
        tracked.promised = tracked.promised[:count]
        tracked.load_from, tracked.is_ours = first, True
        space, _ = self._namespaces.of(tracked.scope)
        into = tuple(blocks[first : first + count])
        if not tracked.is_async:
            self._unheard[request.request_id] = frozenset(into)
        self._loads.append(
            LoadOp(
                request=request.request_id,
                namespace=space,
                keys=tracked.keys(first, first + count),
                blocks=into,
                is_async=tracked.is_async,
            )
        )

    def not_allocated(self, request: str, blocks: Sequence[int]) -> None:
        """As `allocated`, where that failed or is not asked any more: what was promised is to be told as not there.

        All of the table is, for where the promise began is not known; what the engine had itself is computed again.
        """
        tracked = self._requests.get(request)
        is_async = tracked is not None and tracked.is_async
        self._broken.append(Promise(request=request, blocks=tuple(blocks), is_async=is_async))

    def plan_off(self) -> StepPlan:
        """The next step where `plan` failed or is not asked any more: nothing is loaded, and whoever waits hears it."""
        broken = [*self._broken, *self._loads]
        self._broken, self._loads = [], []
        return StepPlan(broken=broken, is_off=True)

    def hit_sources(self, request: EngineRequest) -> Counter[str]:
        """Tokens of what was promised last, by tier."""
        return Counter(
            {t: n * self._size for t, n in Counter(self._requests[request.request_id].promised).items()}
        )

    # -- steps

    def plan(
        self, scheduled: Mapping[str, tuple[int, int]], table: Callable[[str], Sequence[int] | None]
    ) -> StepPlan:
        """The next step. `scheduled`: request to the tokens it has and those it computes now; `table`: its blocks.

        Where steps overlap, `has` counts tokens of steps under way: some are not known yet, and drafts among them may
        be turned down, and computed again.
        """
        plan = StepPlan(
            loads=self._loads,
            is_idle=not scheduled,
            holds_back=self._handoffs.holds_back,
            epoch=self._namespaces.epoch,
            resets=self._resets,
        )
        self._handoffs.step_begins()
        running: list[tuple[Tracked, int]] = []
        unheard = frozenset[int]().union(*self._unheard.values())
        for name, (has, adds) in scheduled.items():
            tracked, blocks = self._requests.get(name), table(name)
            if blocks is None:
                continue
            first = has if tracked is None else min(has, max(0, tracked.request.num_tokens - 1))
            # To the end of the table: drafts are written behind what is counted.
            plan.written += blocks[first // self._size :]
            if tracked is None:
                continue
            if not tracked.runs:
                unheard |= self._starts(plan, tracked, blocks, has)
            running.append((tracked, has + adds))
            # What is computed on a block that did not arrive is worth nothing, and only all workers together know.
            if self._may_save and not self._is_mixed and unheard.isdisjoint(blocks):
                self._plan_save(plan, tracked, blocks, has + adds)
        self.levers.steps(running)
        plan.saves += self._last_saves.take()
        # Last: where something failed before, the loads are still there to be told as failed.
        self._loads = []
        return plan

    def heard(self, report: StepReport) -> None:
        """What the workers say of loads that have ended."""
        for name, load in report.loads.items():
            self._unheard.pop(name, None)
            outcome = load.why_short or "whole"
            self.counts[f"loads_{outcome if outcome in LOAD_OUTCOMES else 'other'}"] += 1
            self.counts["pages_loaded"] += load.pages
            tracked = self._requests.get(name)
            if tracked is None:
                continue
            self._release(tracked)
            key = tracked.loaded(load, self._size)
            if key is not None:
                if load.why_short in DAMAGED:
                    self._denied.add(key)
                elif load.why_short == MissReason.UNAVAILABLE:
                    self._away.add(key)
                # What is computed in its place is worth keeping.
                tracked.saved = min(tracked.saved, tracked.limit)
            tracked.promised = ()
        stale = report.stale
        if stale is not None and stale.epoch == self._namespaces.epoch:
            log.warning("workmem: the model's weights were changed; no context of before is used or kept")
            self.counts["new_weights"] += 1
            self.start_epoch(time.time_ns(), is_empty=stale.is_empty)

    def finished(self, request: EngineRequest, blocks: Sequence[int] = ()) -> dict[str, Any] | None:
        """A request has ended; `blocks`: its table, where it was not cut off.

        Returns what its response says of where its prompt's tokens came from, and of its hints.
        """
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return None
        self._release(tracked)
        if blocks:
            self._settle(tracked, blocks)
        handoff = self._handoffs.finished(tracked)
        tokens = dict(tracked.sources)
        engine = min(tracked.own * self._size, request.num_prompt_tokens - 1)
        if engine > 0:
            tokens[TierName.VRAM.value] = engine
        tokens[COMPUTED] = max(0, request.num_prompt_tokens - sum(tokens.values()))
        answer: dict[str, Any] = {"prompt_tokens": request.num_prompt_tokens, "tokens": tokens}
        if tracked.miss:
            answer["miss"] = tracked.miss
        if handoff is not None:
            answer["handoff"] = handoff
        if hints := self.levers.finished(tracked, blocks):
            answer["hints"] = hints
        return {ANSWER: answer}

    def start_epoch(self, epoch: int, *, is_empty: bool) -> None:
        """The weights are others, or somebody wants nothing of before: no block of before is a hit from now on.

        `is_empty`: the engine has dropped its own blocks too. Where it has not, nothing is saved until `emptied`: a
        context may begin with blocks of before.
        """
        self._is_mixed = not is_empty
        self._namespaces.start_epoch(epoch)
        if self._announcer is not None:
            self._announcer.forget_all()
        self.levers.close()
        self._last_saves.drop()
        self._is_apart = True
        self._handoffs.end_all(list(self._requests.values()))
        for tracked in self._requests.values():
            self._release(tracked)
            tracked.saved = 0

    def emptied(self) -> None:
        """The engine has dropped all of its own blocks."""
        self._is_mixed = False
        self._resets += 1

    def is_short(self) -> bool:
        """The engine is about to preempt. Whether blocks come free by its next step."""
        return self._last_saves.holds or self.levers.is_short()

    def release(self) -> None:
        """Nobody may hold a block of the engine."""
        self._last_saves.drop()
        self.levers.release()

    def take_announcements(self) -> list[Announcement]:
        """Blocks that came to be in the store, or went, since the last call; empty unless it was made to announce."""
        return [] if self._announcer is None else self._announcer.take()

    def close(self) -> None:
        """Give back what is held for requests that wait."""
        for tracked in self._requests.values():
            self._release(tracked)
        self._last_saves.drop()
        self.levers.close()

    # -- inside

    def _look(self, tracked: Tracked, keys: Sequence[BlockKey]) -> Lookup | None:
        """See `Handoffs`."""
        if tracked.limit >= 0 or min(self._denied.allowed(keys), self._away.allowed(keys)) < len(keys):
            return None
        return news(lambda part: self._lookup(tracked, part), keys)

    def _expect(self, tracked: Tracked, keys: Sequence[BlockKey], now: float) -> None:
        """See `Handoffs`. What one worker's part is put with, the others' are."""
        self._expecting.expect(self._namespaces.of(tracked.scope)[1][0], keys, now)

    def _prefetch(self, tracked: Tracked, first: int, found: Lookup) -> None:
        """Have pages from block `first` on, as far as they were found, start their way to dram."""
        end, start = first + found.blocks, max(first, tracked.prefetched_to)
        if not self._may_load or all(tier is TierName.DRAM for tier in found.tiers[start - first :]):
            return
        tracked.prefetched_to = end
        name = tracked.request.request_id
        lease = self._prefetching.lease(tracked.scope, tracked.keys(start, end), name, _PREFETCH_TTL_S)
        if lease is not None:
            tracked.prefetched.append(lease)

    def _lookup(self, tracked: Tracked, keys: Sequence[BlockKey]) -> Lookup:
        found = self._lookup_in(tracked.scope, keys)
        tracked.miss = found.reason.value if found.reason else ""
        return found

    def _lookup_in(self, scope: Scope, keys: Sequence[BlockKey]) -> Lookup:
        """What all workers can load: a block is there when each has its part."""
        _, roots = self._namespaces.of(scope)
        shortest: Lookup | None = None
        for root in roots:
            found = self._store.lookup(root, keys)
            if shortest is None or found.blocks < shortest.blocks:
                shortest = found
            keys = keys[: found.blocks]
            if not keys:
                break
        assert shortest is not None
        return shortest

    def _tiers_of(self, scope: Scope, keys: Sequence[BlockKey]) -> tuple[TierName, ...]:
        return self._lookup_in(scope, keys).tiers

    def _announce(self, tracked: Tracked, first: int, keys: Sequence[BlockKey]) -> None:
        """Say of blocks from number `first` on that they are in the store, as soon as they are."""
        if self._announcer is None or not keys:
            return
        request, size = tracked.request, self._size
        before = tracked.keys(first - 1, first) if first else ()
        self._announcer.seen(
            keys,
            before[0] if before else b"",
            request.all_token_ids[first * size : (first + len(keys)) * size],
            RunOrigin(tracked.scope, getattr(request, "session_id", None) or ""),
        )

    def _release(self, tracked: Tracked) -> None:
        leases, tracked.prefetched = tracked.prefetched, []
        for lease in leases:
            self._prefetching.give_back(lease)

    def _starts(self, plan: StepPlan, tracked: Tracked, blocks: Sequence[int], has: int) -> frozenset[int]:
        """A request has its turn. Returns the blocks that another connector fills, perhaps in this step.

        Whether they came only the step's end tells: a load of nothing is heard of then.
        """
        first, end = tracked.starts(has, self._size)
        if first == end:
            return frozenset()
        request = tracked.request.request_id
        space, _ = self._namespaces.of(tracked.scope)
        plan.loads.append(LoadOp(request=request, namespace=space, keys=(), blocks=(), is_async=False))
        self._unheard[request] = self._unheard.get(request, frozenset()) | frozenset(blocks[first:end])
        return self._unheard[request]

    def _plan_save(self, plan: StepPlan, tracked: Tracked, blocks: Sequence[int], computed: int) -> None:
        """Save the blocks that are full after this step and that the store was not seen to have.

        Only of known tokens are there keys: what was sampled in a step under way is saved with a later one.
        """
        if (op := self._save_op(tracked, blocks, computed // self._size)) is not None:
            plan.saves.append(op)

    def _settle(self, tracked: Tracked, blocks: Sequence[int]) -> None:
        """A request has its answer, so what was promised to it did come: the engine hears of failed loads before that.

        We hear of them after it. So its full blocks are saved now that were not before, as loads of their step were not
        heard of, or their tokens not known.
        """
        request = tracked.request
        if tracked.promised and tracked.is_ours and tracked.runs:
            tracked.loaded(Loaded(request.request_id, len(tracked.promised)), self._size)
        if not self._may_save or self._is_mixed or not self._last_saves.is_bound:
            return
        # The last token has no KV, and of steps under way none is of use.
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        if (op := self._save_op(tracked, blocks, computed // self._size)) is not None:
            self._last_saves.add(op)

    def _save_op(self, tracked: Tracked, blocks: Sequence[int], end: int) -> SaveOp | None:
        """Blocks before number `end` that the store was not seen to have; None where there are none."""
        first = tracked.saved
        keys = tracked.keys(first, end)
        if not keys:
            return None
        end = tracked.saved = first + len(keys)
        space, _ = self._namespaces.of(tracked.scope)
        before = tracked.keys(first - 1, first) if first else ()
        self._announce(tracked, first, keys)
        self.counts["pages_offered"] += len(keys)
        return SaveOp(
            namespace=space,
            keys=keys,
            parent=before[0] if before else b"",
            depth=first,
            tokens=tuple(tracked.request.all_token_ids[first * self._size : end * self._size]),
            blocks=tuple(blocks[first:end]),
        )
