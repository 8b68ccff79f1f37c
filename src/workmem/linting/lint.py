"""Replays recorded requests, one after the other, through simulated caches: as they came, and after the rules."""

from __future__ import annotations

import copy
from array import array
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from workmem.core.errors import ClientError
from workmem.core.generation import Span
from workmem.index.prefixes import common_prefix
from workmem.index.simulation import CacheSimulation
from workmem.linting.files import Recorded
from workmem.linting.kinship import Family, Kin, Seen, lines_of
from workmem.linting.rendering import Renderer
from workmem.linting.report import Loss, Report, RuleTotal, totals
from workmem.prompt.canonical.canonicalise import canonicalise
from workmem.prompt.canonical.rule import Canonical
from workmem.prompt.causes.cause import KINDS, Cause
from workmem.prompt.causes.diagnose import compare
from workmem.prompt.dialects.places import Dialect
from workmem.prompt.identity import identify
from workmem.prompt.sessions import SessionInferrer, history_of

_LOOSE_TOKENS = 16
"""What templates write behind the last message, and anew with each request."""


class Cache(NamedTuple):
    """The cache that is simulated."""

    engine: str
    block: int
    tokens_max: int | None = None

    def fresh(self) -> CacheSimulation:
        """An empty one."""
        return CacheSimulation(self.block, self.tokens_max)


class Linter:
    """`take` each request in its order, then `report`. Holds the latest requests of some sessions, not the file."""

    def __init__(self, cache: Cache, renderer: Renderer, rules: Collection[str]) -> None:
        self._cache = cache
        self._renderer = renderer
        self._rules = frozenset(rules)
        self._plain = cache.fresh()
        self._canonical = cache.fresh()
        self._single = {rule: cache.fresh() for rule in sorted(rules)}
        self._family = Family()
        self._sessions = SessionInferrer()
        self._losses: list[Loss] = []
        self._count: Counter[str] = Counter()
        self._changed: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()
        self._found: Counter[str] = Counter()

    def take(self, recorded: Recorded) -> Canonical | None:
        """Replay a request; what comes back is its body after the rules, None where it has no body."""
        entry = recorded.entry
        self._count["requests"] += 1
        if entry.dialect is None:
            ids = array("I", entry.token_ids)
            cached = self._ask_all(ids, "")
            self._judge(recorded, "", ids, (Span("prompt", 0, len(ids)),), cached)
            return None
        try:
            rendered = self._renderer.render(entry.body, entry.dialect)
        except ClientError as error:
            raise ClientError(f"{recorded.file}:{recorded.line}: {error}", param=error.param) from error
        ids = array("I", rendered.token_ids)
        space = _space(entry.body)
        canonical = canonicalise(copy.deepcopy(entry.body), entry.dialect, self._rules)
        cached = self._ask_all(ids, space, entry.body, entry.dialect, canonical)
        session = identify(entry.headers, entry.body, tenant="").session or self._sessions.infer(
            space, history_of(entry.body)
        )
        self._judge(recorded, session, ids, rendered.spans, cached)
        return canonical

    def report(self, skipped_lines: int = 0) -> Report:
        """What it came to."""
        rules = [
            RuleTotal(
                rule=rule,
                requests=self._changed[rule],
                prompt_tokens=self._asked[rule],
                cached_tokens=self._found[rule],
            )
            for rule in self._single
            if self._changed[rule]
        ]
        return Report(
            engine=self._cache.engine,
            block=self._cache.block,
            cache_tokens=self._cache.tokens_max,
            tokens_by=self._renderer.name,
            is_exact=self._renderer.is_exact,
            requests=self._count["requests"],
            sessions=self._family.sessions,
            skipped_lines=skipped_lines,
            prompt_tokens=self._count["prompt"],
            cached_tokens=self._count["cached"],
            canonical_prompt_tokens=self._count["canonical prompt"],
            canonical_cached_tokens=self._count["canonical cached"],
            rules=sorted(rules, key=lambda one: one.prompt_tokens - one.cached_tokens),
            causes=totals(self._losses),
            lost_tokens=sum(loss.tokens for loss in self._losses),
            losses=self._losses,
            notes=self._renderer.notes(),
        )

    def _ask_all(
        self,
        ids: array[int],
        space: str,
        body: dict[str, Any] | None = None,
        dialect: Dialect | None = None,
        canonical: Canonical | None = None,
    ) -> int:
        """Ask the cache as it is, whose answer comes back, the one behind all rules, and one behind each rule."""
        cached = self._plain.ask(ids, space)
        self._count["prompt"] += len(ids)
        self._count["cached"] += cached
        applied = {one.rule for one in canonical.applied} if canonical is not None else set[str]()
        tidy = ids
        if canonical is not None and dialect is not None and applied:
            tidy = array("I", self._renderer.render(canonical.body, dialect).token_ids)
        self._count["canonical prompt"] += len(tidy)
        self._count["canonical cached"] += self._canonical.ask(tidy, space)
        for rule, cache in self._single.items():
            alone = ids
            if rule in applied and body is not None and dialect is not None:
                self._changed[rule] += 1
                alone = tidy
                if len(applied) > 1:
                    one = canonicalise(copy.deepcopy(body), dialect, {rule})
                    alone = array("I", self._renderer.render(one.body, dialect).token_ids)
            self._asked[rule] += len(alone)
            self._found[rule] += cache.ask(alone, space)
        return cached

    def _judge(
        self, recorded: Recorded, session: str, ids: array[int], spans: tuple[Span, ...], cached: int
    ) -> None:
        entry = recorded.entry
        lines = lines_of(entry.body, entry.dialect) if entry.dialect is not None else Counter(map(str, ids))
        seen = Seen(recorded, session, ids, spans, lines)
        kin = self._family.nearest(seen)
        self._family.add(seen)
        if kin is not None and (loss := self._loss(seen, kin, cached)) is not None:
            self._losses.append(loss)

    def _loss(self, seen: Seen, kin: Kin, cached: int) -> Loss | None:
        before, entry = kin.seen, seen.recorded.entry
        common = common_prefix(
            seen.token_ids, before.token_ids, 0, min(len(seen.token_ids), len(before.token_ids))
        )
        causes: list[Cause] = []
        continues = entry.dialect is None
        if entry.dialect is not None:
            comparison = compare(
                before.recorded.entry.body,
                entry.body,
                entry.dialect,
                tools_first=_has_tools_first(seen.spans),
            )
            causes = [one for one in comparison.causes if KINDS[one.name].is_loss]
            continues = comparison.shared_turns > 0
        reach = min(len(before.token_ids), len(seen.token_ids) - 1)
        if not continues:
            reach = min(reach, int(kin.shared * len(seen.token_ids)))
        if not causes:
            causes = self._of_cache(seen, before, common, cached, continues=continues)
            reach = common if causes and causes[0].name == "evicted" else reach
        lost = reach // self._cache.block * self._cache.block - cached
        if not causes or lost <= 0:
            return None
        first = causes[0]
        return Loss(
            file=seen.recorded.file,
            line=seen.recorded.line,
            cause=first.name,
            path=first.path,
            what=first.what,
            fix=first.fix,
            rule=first.rule,
            tokens=lost,
            compared_with=f"{before.recorded.file}:{before.recorded.line}",
            also=tuple(dict.fromkeys(one.name for one in causes[1:] if one.name != first.name)),
        )

    def _of_cache(
        self, seen: Seen, before: Seen, common: int, cached: int, *, continues: bool
    ) -> list[Cause]:
        """Why tokens are lost where the bodies continue each other."""
        if common - cached > self._cache.block:
            text = f"{common} tokens are the same, and {cached} were still held"
            return [_cause("evicted", "", text)]
        if not continues or common + _LOOSE_TOKENS >= len(before.token_ids) or common >= len(seen.token_ids):
            return []
        path = next((span.path for span in seen.spans if span.end > common), "")
        text = f"the bodies continue each other, the prompts only up to token {common}"
        return [_cause("rendering_changed", path, text)]


def _cause(name: str, path: str, what: str) -> Cause:
    return Cause(name, path, path, what, KINDS[name].fix, KINDS[name].rule)


def _space(body: dict[str, Any]) -> str:
    return f"{body.get('model')}\0{body.get('cache_salt') or ''}"


def _has_tools_first(spans: tuple[Span, ...]) -> bool:
    """Whether the template writes tools before the instructions."""
    first = next((span.path for span in spans if span.path != "template"), "")
    return first.startswith("tools")
