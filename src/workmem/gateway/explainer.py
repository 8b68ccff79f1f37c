"""Why requests missed: gathers what is known of one, has it judged on another thread, and adds up what was lost."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
from prometheus_client import Counter

from workmem.core.layout import BLOCK_TOKENS
from workmem.gateway.judging import Candidate, Facts, Verdict, engine_losses, judge, lost_to
from workmem.gateway.prefill_speed import PrefillSpeed
from workmem.gateway.recent_requests import Kept, Outcome, RecentRequests
from workmem.index.history import PromptHistory

_PATH_CHARS_MAX = 512
"""Of a path in a header; names of fields are the client's."""
_WAITING_MAX = 64
"""Requests that wait to be judged; more are counted as not judged."""
NOT_JUDGED = "not_judged"
"""In the metric: more requests missed at once than are looked at."""


class Explainer:
    """One for a server. Called on the event loop; what computes runs elsewhere, one request at a time."""

    def __init__(
        self,
        recent: RecentRequests,
        history: PromptHistory | None,
        miss_tokens: Counter,
        *,
        gives_header: bool = False,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.recent = recent
        self.speed = PrefillSpeed()
        self.gives_header = gives_header
        self._history = history
        self._miss_tokens = miss_tokens
        self._block_tokens = block_tokens
        self._verdicts: OrderedDict[int, Verdict] = OrderedDict()
        self._judging = asyncio.Semaphore(1)
        self._tasks: set[asyncio.Task[None]] = set()

    def finished(self, kept: Kept | None, outcome: Outcome, *, first_token_s: float | None) -> None:
        """A request has been answered."""
        if outcome.cached_tokens is not None and first_token_s is not None:
            self.speed.observe(outcome.prompt_tokens - outcome.cached_tokens, first_token_s)
        if kept is None:
            return
        kept.outcome = outcome
        self._count_later(kept)

    async def verdict(self, kept: Kept) -> Verdict:
        """What is to be said of `kept`, judged once it has ended and remembered then."""
        if (known := self._verdicts.get(kept.number)) is not None:
            return known
        facts = self._facts(kept)
        async with self._judging:
            verdict = await asyncio.to_thread(judge, facts)
        if facts.is_finished:
            self._verdicts[kept.number] = verdict
            while len(self._verdicts) > len(self.recent) + 1:
                self._verdicts.popitem(last=False)
        return verdict

    async def told(self, kept: Kept | None) -> dict[str, Any]:
        """The fields that an explanation gains."""
        if kept is None:
            return {"causes": [], "cost": None, "fix": "", "causes_against": None, "canonical": None}
        verdict = await self.verdict(kept)
        earlier = None if verdict.against is None else self.recent.numbered(verdict.against)
        return {
            "causes": msgspec.to_builtins(verdict.causes),
            "cost": None if verdict.lost_tokens is None else self._cost(verdict.lost_tokens),
            "fix": verdict.causes[0].fix if verdict.causes else "",
            "causes_against": None if earlier is None else earlier.name or None,
            "canonical": {"applied": verdict.canonical, "repaired": verdict.repaired},
        }

    async def in_a_line(self, kept: Kept) -> str:
        """The verdict as short JSON in ASCII. A stream's headers go out before what it cost is known."""
        verdict = await self.verdict(kept)
        said: dict[str, Any] = {}
        if verdict.causes:
            said |= {"cause": verdict.causes[0].name, "path": verdict.causes[0].path[:_PATH_CHARS_MAX]}
        if verdict.lost_tokens is not None:
            said["lost"] = verdict.lost_tokens
            if kept.outcome is not None and kept.outcome.cached_tokens is not None:
                cached = kept.outcome.cached_tokens
                said |= {"cached": cached, "computed": kept.outcome.prompt_tokens - cached}
        return json.dumps(said)

    async def worst(self, held: Iterable[Kept], n: int) -> dict[str, Any]:
        """The `n` of `held` that lost most to named causes, and what each cause lost in them."""
        rows: list[tuple[int, Kept, Verdict]] = []
        for kept in held:
            if kept.number in self._verdicts or self._may_have_lost(self._facts(kept)):
                verdict = await self.verdict(kept)
                if lost := sum(verdict.tokens_by_cause.values()):
                    rows.append((lost, kept, verdict))
        rows.sort(key=lambda row: (-row[0], -row[1].number))
        rows = rows[:n]
        return {
            "object": "list",
            "data": [self._row(lost, kept, verdict) for lost, kept, verdict in rows],
            "by_cause": self._by_cause(rows),
        }

    def _row(self, lost: int, kept: Kept, verdict: Verdict) -> dict[str, Any]:
        first = verdict.causes[0]
        prompt_tokens = 0 if kept.outcome is None else kept.outcome.prompt_tokens
        return {
            "id": kept.name,
            "session": kept.session,
            "cause": first.name,
            "path": first.path,
            "what": first.what,
            "prompt_tokens": prompt_tokens,
            "cost": self._cost(lost),
        }

    def _by_cause(self, rows: list[tuple[int, Kept, Verdict]]) -> list[dict[str, Any]]:
        tokens: dict[str, int] = {}
        found: dict[str, list[tuple[str, str, str]]] = {}
        for _, kept, verdict in rows:
            named = {one.name: one for one in verdict.causes}
            for name, lost in verdict.tokens_by_cause.items():
                tokens[name] = tokens.get(name, 0) + lost
                one = named.get(name)
                path, fix = ("", "") if one is None else (one.path, one.fix)
                found.setdefault(name, []).append((kept.name, path, fix))
        return [
            {
                "cause": name,
                "requests": len(found[name]),
                "cost": self._cost(lost),
                "path": found[name][0][1],
                "fix": found[name][0][2],
                "example": found[name][0][0],
            }
            for name, lost in sorted(tokens.items(), key=lambda item: -item[1])
        ]

    def _cost(self, tokens: int) -> dict[str, Any]:
        milliseconds = self.speed.milliseconds(tokens)
        return {"tokens": tokens} | ({} if milliseconds is None else {"milliseconds": milliseconds})

    def _facts(self, kept: Kept) -> Facts:
        history = self._history
        explanation = history.explain(kept.name) if history is not None and kept.name else None
        nearest = None
        if explanation is not None and explanation.compared_with is not None:
            nearest = self.recent.named(explanation.compared_with)
        earlier = [nearest, *(self.recent.numbered(number) for number in kept.earlier)]
        found: dict[int, Candidate] = {}
        for one in earlier:
            # Others' requests are in none of these lists; that they are never shown is too important to rest on it.
            if one is None or one.space != kept.space or one.number >= kept.number or one.number in found:
                continue
            overlap = None if history is None else history.overlap(kept.name, one.name)
            found[one.number] = Candidate(kept=one, overlap=overlap)
        return Facts(
            kept=kept,
            candidates=list(found.values()),
            explanation=explanation,
            nearest=None if nearest is None else nearest.number,
            block_tokens=self._block_tokens,
            is_finished=kept.outcome is not None,
        )

    def _may_have_lost(self, facts: Facts) -> bool:
        """By counts alone: most requests lose nothing, and need not be looked into."""
        if not facts.is_finished:
            return False
        losses = (lost_to(facts, candidate) or 0 for candidate in facts.candidates)
        return max(losses, default=0) >= self._block_tokens or bool(engine_losses(facts.explanation))

    def _count_later(self, kept: Kept) -> None:
        facts = self._facts(kept)
        if not self._may_have_lost(facts):
            return
        if len(self._tasks) >= _WAITING_MAX:
            lost = max((lost_to(facts, candidate) or 0 for candidate in facts.candidates), default=0)
            self._miss_tokens.labels(NOT_JUDGED).inc(lost)
            return
        task = asyncio.get_running_loop().create_task(self._count(kept))
        self._tasks.add(task)
        task.add_done_callback(partial(_forget, self._tasks))

    async def _count(self, kept: Kept) -> None:
        verdict = await self.verdict(kept)
        for name, tokens in verdict.tokens_by_cause.items():
            self._miss_tokens.labels(name).inc(tokens)


def _forget(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    tasks.discard(task)
    if not task.cancelled():
        task.result()
