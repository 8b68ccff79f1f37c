"""A prompt is computed by a prefill server, and what it is answered with comes from another one.

Both share a store: the first saves what it computed, the second loads it. All that goes between them by way of this
front is how many tokens there are. Whatever fails on the way, the request is served by one server, as if never split.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from workmem.core.events import RequestSplit
from workmem.core.outcomes import COMPUTED
from workmem.gateway.config import UpstreamConfig
from workmem.gateway.expected import Expectations
from workmem.gateway.sending import Failed, Hop, Outgoing, Sender
from workmem.gateway.servers import UpstreamServer
from workmem.gateway.split_bodies import prefill_body, why_whole, with_handoff
from workmem.gateway.upstream_metrics import UpstreamMetrics
from workmem.gateway.usage_peek import UNREPORTED, UsagePeek
from workmem.policy.disaggregation import PrefillSide, Prospect, Terms, Verdict, decide, expected_hop_s

log = logging.getLogger("workmem.gateway")

_PAUSES_MAX = 8
_USELESS_MAX = 3
"""Answers in a row that do not say what was computed."""


class Split(msgspec.Struct, kw_only=True):
    """How a generation was served, and why."""

    is_split: bool
    """Whether a decode server was told that its prompt is on its way to the store."""
    reason: str
    """Why it was to be split, or not."""
    fallback: str = ""
    """What failed, where it was to be split and was not."""
    prefill_server: str = ""
    prefill_request_id: str = ""
    prefill_s: float = 0.0
    prompt_tokens: int = 0
    """Of the prompt as the prefill server counted it; else as expected."""
    hit_tokens: int = 0
    """Expected to be in the decode server's memory before."""
    whole_s: float = 0.0
    """Seconds that it was expected to cost whole, its own and those of the streams beside it."""
    split_s: float = 0.0


class Splitter:
    """Decides for each generation, and has prompts computed."""

    def __init__(
        self,
        config: UpstreamConfig,
        servers: Sequence[UpstreamServer],
        sender: Sender,
        expected: Expectations,
        metrics: UpstreamMetrics,
    ) -> None:
        self._config = config
        self._terms = Terms(mode=config.split, tokens_min=config.split_min_tokens)
        self._servers = servers
        self._sender = sender
        self._expected = expected
        self._metrics = metrics
        self._refused = 0

    async def prepare(
        self,
        request: Outgoing,
        fields: Mapping[str, Any],
        order: Sequence[UpstreamServer],
        *,
        model: str,
        session: str,
    ) -> tuple[Outgoing, Split]:
        """The request for the first of `order`, after its prompt was computed elsewhere where that is better."""
        split, prefill = self._choose(request, fields, order[0], model, session)
        if split.is_split:
            assert prefill is not None
            request = await self._split(request, prefill, split)
        self._metrics.requests.labels("split" if split.is_split else "whole", split.reason).inc()
        if split.fallback:
            self._metrics.one_sided.labels(split.fallback).inc()
        self._metrics.events(
            RequestSplit(
                request_id=request.headers["x-request-id"],
                is_split=split.is_split,
                reason=split.reason,
                fallback=split.fallback,
            )
        )
        return request, split

    def _choose(
        self, request: Outgoing, fields: Mapping[str, Any], decode: UpstreamServer, model: str, session: str
    ) -> tuple[Split, UpstreamServer | None]:
        now = time.monotonic()
        tokens = self._expected.prompt_tokens(model, request.body, fields)
        hit = self._expected.hit_tokens(session, decode, tokens)
        why = why_whole(request.target.partition("?")[0], fields)
        if not why and (decode.role == "prefill" or decode.is_down(now)):
            why = "no_decode_server"
        if why:
            return Split(is_split=False, reason=why, prompt_tokens=tokens, hit_tokens=hit), None
        prefill = self._prefill_server(model, max(0, tokens - hit), now)
        side = (
            None if prefill is None else PrefillSide(costs=prefill.costs.costs(), backlog_s=prefill.backlog_s)
        )
        prospect = Prospect(prompt_tokens=tokens, hit_tokens=hit, running=decode.in_flight)
        verdict = decide(self._terms, prospect, side, decode.costs.costs(), refused=self._refused)
        self._count_refused(verdict)
        return Split(
            is_split=verdict.is_split,
            reason=verdict.reason,
            prompt_tokens=tokens,
            hit_tokens=hit,
            whole_s=verdict.whole_s,
            split_s=verdict.split_s,
        ), prefill

    def _count_refused(self, verdict: Verdict) -> None:
        if verdict.is_split:
            self._refused = 0
        elif verdict.reason == "slower":
            self._refused += 1

    def _prefill_server(self, model: str, missing: int, now: float) -> UpstreamServer | None:
        """The one that would be done first."""
        able = [server for server in self._servers if server.takes_prefill(model, now)]

        def done_s(server: UpstreamServer) -> float:
            return server.backlog_s + expected_hop_s(missing, server.costs.costs())

        return min(able, key=done_s, default=None)

    async def _split(self, request: Outgoing, prefill: UpstreamServer, split: Split) -> Outgoing:
        """`request` with word of what was computed; as it was where that failed, and `split` says why."""
        missing = max(1, split.prompt_tokens - split.hit_tokens)
        expected_s = expected_hop_s(missing, prefill.costs.costs())
        split.prefill_server, split.prefill_request_id = prefill.url, str(uuid.uuid4())
        hop = Outgoing(
            method=request.method,
            target=request.target,
            # An id of its own, and a plain UUID: some servers refuse the same one twice, or any other.
            headers={**request.headers, "x-request-id": split.prefill_request_id},
            body=prefill_body(request.body),
            is_generation=True,
        )
        begun = time.monotonic()
        prefill.backlog_s += expected_s
        try:
            found = await self._ask(prefill, hop)
        finally:
            prefill.backlog_s = max(0.0, prefill.backlog_s - expected_s)
            split.prefill_s = time.monotonic() - begun
        self._metrics.hop_s.labels("prefill").observe(split.prefill_s)
        if isinstance(found, str):
            split.is_split, split.fallback = False, found
            log.warning("prefill at %s failed (%s), serving one-sided", prefill.url, found)
            return request
        usage = found.usage
        assert usage is not None
        computed = None if UNREPORTED in usage.by_source else usage.by_source.get(COMPUTED, 0)
        prefill.costs.learn_computing(missing if computed is None else computed, split.prefill_s)
        split.prompt_tokens = usage.prompt_tokens
        self._metrics.handed.inc(usage.prompt_tokens)
        body = with_handoff(request.body, usage.prompt_tokens, self._config.handoff_wait_s)
        return msgspec.structs.replace(request, body=body)

    async def _ask(self, prefill: UpstreamServer, request: Outgoing) -> UsagePeek | str:
        """What the answer said of itself, with its usage; else what failed."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._config.prefill_timeout_s):
                found = await self._sender.send(prefill, request)
        except TimeoutError:
            # Whoever comes next would wait as long for nothing.
            self._spare(prefill, self._config.prefill_timeout_s, begun)
            return "prefill_slow"
        if isinstance(found, Failed):
            self._spare(prefill, self._config.retry_after_s, begun)
            return f"prefill_{found.kind}"
        return self._read(prefill, found)

    def _read(self, prefill: UpstreamServer, hop: Hop) -> UsagePeek | str:
        try:
            if hop.answer.status >= 500:
                self._spare(prefill, self._config.retry_after_s, hop.sent)
                return "prefill_5xx"
            if hop.answer.status != 200:
                # What is wrong with the request, if anything is, the decode server tells the client.
                self._count_useless(prefill)
                return "prefill_4xx"
            peek = UsagePeek(hop.answer.headers.get("content-type", ""))
            peek.feed(hop.ahead)
            peek.close()
            if not hop.is_whole or peek.usage is None or peek.usage.prompt_tokens <= 0:
                self._count_useless(prefill)
                return "prefill_without_usage"
            prefill.prefill_failures = prefill.prefill_useless = 0
            return peek
        finally:
            hop.close()

    def _count_useless(self, prefill: UpstreamServer) -> None:
        """It computes, and nobody has anything of it."""
        prefill.prefill_useless += 1
        if prefill.prefill_useless >= _USELESS_MAX:
            until = time.monotonic() + self._config.retry_after_s
            prefill.no_prefill_until = max(prefill.no_prefill_until, until)

    def _spare(self, prefill: UpstreamServer, seconds: float, begun: float) -> None:
        """Leave it alone for a while, and each time it fails again for twice as long, `_PAUSES_MAX` times at most.

        Hops that were on their way when it failed are no other time.
        """
        now = time.monotonic()
        if begun >= prefill.spared_at:
            prefill.prefill_failures = min(prefill.prefill_failures + 1, _PAUSES_MAX)
            prefill.spared_at = now
        times = min(_PAUSES_MAX, 2 ** max(0, prefill.prefill_failures - 1))
        pause = max(seconds, self._config.retry_after_s) * times
        prefill.no_prefill_until = max(prefill.no_prefill_until, now + pause)
