"""Passing requests on: to which server, as what, and what is remembered of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from workmem.core.errors import ClientError, ConfigError
from workmem.core.events import RequestMoved
from workmem.core.generation import Caller
from workmem.gateway.callers import Callers
from workmem.gateway.canonical_bodies import Said, canonical_body
from workmem.gateway.chat_as_message import ChatAsMessage
from workmem.gateway.config import ServerConfig, UpstreamConfig
from workmem.gateway.exchange import Answer, Exchange, header_map
from workmem.gateway.expected import Ended, Expectations
from workmem.gateway.explain import RequestLog, explain_in_header
from workmem.gateway.explainer import Explainer
from workmem.gateway.failures import Refusal
from workmem.gateway.key_file import key_to_send
from workmem.gateway.metrics import Metrics
from workmem.gateway.pass_through import NOT_FORWARDED, PassThrough
from workmem.gateway.passed import PassedRequest
from workmem.gateway.recent_requests import Kept, Outcome, recent_requests
from workmem.gateway.resuming import SteadyStream
from workmem.gateway.role_keeping import RoleKeeper
from workmem.gateway.roles import Roles
from workmem.gateway.sending import Hop, Outgoing, Sender
from workmem.gateway.sent import Sent
from workmem.gateway.servers import UpstreamServer, merged_models, rank, refresh_models
from workmem.gateway.split_bodies import GENERATIONS, exact_tokens, is_repeatable
from workmem.gateway.splitting import Split, Splitter
from workmem.gateway.tries import Tries
from workmem.gateway.upstream_metrics import UpstreamMetrics
from workmem.gateway.usage_peek import UsagePeek, reused_tokens
from workmem.prompt.canonical.choice import RuleChoice
from workmem.prompt.decode import decode_json
from workmem.prompt.dialects.chat import CHAT
from workmem.prompt.dialects.known import dialect_of_path
from workmem.prompt.dialects.messages import MESSAGES
from workmem.prompt.messages_to_chat import chat_of_messages
from workmem.prompt.sessions import history_of

_UNKNOWN = (404, 405)
"""What a server answers that does not know a path."""


class Upstream:
    """Picks a server for each request and passes it on. `open` before use, `close` after."""

    def __init__(
        self,
        config: UpstreamConfig,
        front: ServerConfig,
        servers: list[UpstreamServer],
        metrics: Metrics,
        rules: RuleChoice,
    ) -> None:
        if not servers:
            raise ConfigError("$.upstream.urls: upstream mode needs at least one URL.")
        self.servers = servers
        self.callers = Callers()
        self.request_log = RequestLog(front.explain_prompts_max)
        self.explainer = Explainer(
            recent_requests(front), None, metrics.miss_tokens, gives_header=front.explain_header
        )
        counted = UpstreamMetrics(metrics)
        self.roles = Roles(servers, counted)
        self._config = config
        self._request_timeout_s = front.request_timeout_s
        self._asks_for_keys = bool(front.api_key_file)
        self._key = key_to_send(config.api_key_file, "$.upstream.api_key_file") if config.api_key_file else ""
        self._metrics = metrics
        self._rules = rules
        self._counted = counted
        self._sender = Sender(config)
        self._expected = Expectations()
        self._splitter = Splitter(config, servers, self._sender, self._expected, counted)
        self._keeper = RoleKeeper(config, servers, self.roles)
        self._running: list[asyncio.Task[None]] = []
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")

    async def open(self) -> None:
        """Start the client and learn what is served; servers may still be down."""
        await self._sender.open()
        self._running = [asyncio.create_task(self._keep_fresh())]
        if self._config.elastic:
            self._running.append(asyncio.create_task(self._keeper.keep()))

    async def close(self) -> None:
        """Close all connections."""
        tasks = [*self._running, *([] if self._asking is None else [self._asking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.roles.close()
        await self._sender.close()

    async def models(self) -> dict[str, dict[str, Any]]:
        """All models by id, asked now."""
        await self._refresh()
        return merged_models(self.servers)

    async def forward(self, exchange: Exchange) -> Answer:
        """Pass the request on to the best server that takes it."""
        said = canonical_body(exchange, self._rules, self._metrics)
        return await self._forward(exchange, said, None)

    async def _as_chat(self, exchange: Exchange, said: Said, lacking: UpstreamServer | None) -> ChatAsMessage:
        """Ask a message as the chat that it means; `lacking` has just shown that it knows no messages."""
        chat = chat_of_messages(said.object()).body
        if chat.get("stream"):
            chat["stream_options"] = {"include_usage": True}
        answer = await self._forward(exchange, said, msgspec.json.encode(chat))
        # Otherwise it was the model that it does not know.
        if lacking is not None and answer.status_code not in _UNKNOWN:
            lacking.lacks_messages = True
        return ChatAsMessage(answer)

    async def _forward(
        self, exchange: Exchange, said: Said, chat: bytes | None
    ) -> PassThrough | ChatAsMessage:
        """Pass it on as it came, or as `chat`."""
        arrived, created = time.monotonic(), int(time.time())
        raw = said.fields if chat is None else _object_in(chat)
        is_message = chat is None and exchange.request.method == "POST" and exchange.path == MESSAGES.path
        model = raw["model"] if isinstance(raw.get("model"), str) else ""
        headers = header_map(exchange.request)
        caller = self.callers.who(
            headers, said.fields, tenant=exchange.tenant, model=model, history=history_of(said.fields)
        )
        session = f"{caller.tenant}\0{caller.session}" if caller.session else ""

        def order() -> list[UpstreamServer]:
            return rank(self.servers, model=model, affinity=session, now=time.monotonic())

        best = order()
        if model and not (best and model in best[0].models):
            await self._refresh(unless_asked_s=1.0)
            best = order()
        if not best:
            raise no_such_model(model, merged_models(self.servers))
        if is_message and best[0].lacks_messages:
            return await self._as_chat(exchange, said, None)
        request = self._outgoing(exchange, headers, caller, said.body)
        if chat is not None:
            request = _asking_chat(request, chat)
        split: Split | None = None
        if request.is_generation:
            request, split = await self._splitter.prepare(request, raw, best, model=model, session=session)
        tries = Tries(
            self._sender, order, request, exchange.held.callback, self._config.tries_max, self._counted.events
        )
        hop = await tries.next()
        if repeats := tries.broke_off - (hop is None and tries.broke_off > 0):
            self._counted.repeated.inc(repeats)
            self._counted.events(RequestMoved(request_id=exchange.request_id, outcome="repeated"))
        if hop is None:
            raise tries.refusal()
        if is_message and hop.answer.status in _UNKNOWN:
            hop.close()
            return await self._as_chat(exchange, said, hop.server)
        kept = self._keep(exchange, request, said.fields, caller)
        steady = self._steady(hop, tries, raw)
        passing = _Passing(
            exchange, caller, model, session, raw, split, tries, steady, arrived, created, kept
        )
        chunks: AsyncIterator[bytes] | None = None if steady is None else steady.chunks()
        on_end = partial(self._end, passing)
        return PassThrough(hop, chunks, self._metrics, arrived, self._request_timeout_s, on_end)

    def _steady(self, hop: Hop, tries: Tries, raw: Mapping[str, Any]) -> SteadyStream | None:
        """The stream of a generation, which may go on elsewhere; None for anything else."""
        if not tries.request.is_generation or not hop.is_stream or hop.answer.status != 200:
            return None

        async def again() -> Hop | None:
            while (found := await tries.next()) is not None:
                if found.is_stream and found.answer.status == 200:
                    return found
                found.close()
            return None

        sent = Sent(is_exact=is_repeatable(raw), is_single=raw.get("n") in (None, 1))
        request_id = tries.request.headers["x-request-id"]
        return SteadyStream(hop, again, sent, self._counted, request_id)

    def _end(self, passing: _Passing, seen: UsagePeek, *, is_whole: bool, first: float | None) -> None:
        """An answer has passed, whole or in part: remember it, and learn from it."""
        hops, split = passing.tries.hops, passing.split
        hop = hops[-1]
        self.request_log.add(
            PassedRequest(
                id=seen.id or passing.exchange.request_id,
                request_id=passing.exchange.request_id,
                prompts=(),
                caller=passing.caller,
                created=passing.created,
                server=hop.server.url,
                status=hop.answer.status,
                is_whole=is_whole,
                usage=seen.usage,
                split=split,
                resumed_on=() if passing.steady is None else tuple(passing.steady.resumed_on),
            )
        )
        self._learn_cost(passing, seen, first)
        # What was asked of several servers, or answered with an error, says nothing of what one takes.
        if split is None or not is_whole or seen.has_failed or hop.answer.status != 200 or len(hops) > 1:
            return
        first_s = None if first is None else first - hop.sent
        if first_s is not None:
            self._counted.hop_s.labels("answer").observe(first_s)
        missing = max(1, split.prompt_tokens - split.hit_tokens)
        ended = Ended(
            server=hop.server,
            model=passing.model,
            session=passing.session,
            body_bytes=len(passing.exchange.body),
            has_ids=exact_tokens(passing.raw) is not None,
            handed_tokens=missing if split.is_split else 0,
            first_token_s=first_s,
        )
        self._expected.learn(ended, seen)
        usage, now = seen.usage, time.monotonic()
        itl_s = None
        if first is not None and usage is not None and usage.completion_tokens > 1:
            itl_s = (now - first) / (usage.completion_tokens - 1)
        self._keeper.observe(None if first is None else first - passing.arrived, itl_s)

    def _keep(
        self, exchange: Exchange, request: Outgoing, raw: dict[str, Any], caller: Caller
    ) -> Kept | None:
        """Remember a request that has a prompt, so that it can be explained."""
        path = exchange.request.url.path
        dialect = dialect_of_path(path)
        if request.method != "POST" or not raw or (dialect is None and path != "/v1/completions"):
            return None
        kept = self.explainer.recent.add(
            exchange.body,
            raw,
            dialect,
            space=exchange.tenant,
            session=caller.session,
            rules=self._rules.of(exchange.tenant, raw) if dialect is not None else frozenset(),
        )
        explain_in_header(exchange, self.explainer, kept)
        return kept

    def _learn_cost(self, passing: _Passing, seen: UsagePeek, first: float | None) -> None:
        if passing.kept is not None:
            self.explainer.recent.name(passing.kept, seen.id or passing.exchange.request_id)
        if seen.usage is None:
            return
        outcome = Outcome(
            prompt_tokens=seen.usage.prompt_tokens,
            completion_tokens=seen.usage.completion_tokens,
            cached_tokens=reused_tokens(seen.usage),
        )
        first_token_s = None if first is None else first - passing.arrived
        self.explainer.finished(passing.kept, outcome, first_token_s=first_token_s)

    def _outgoing(
        self, exchange: Exchange, headers: Mapping[str, str], caller: Caller, body: bytes
    ) -> Outgoing:
        named = {
            part.strip().lower() for part in headers.get("connection", "").split(",")
        }  # Headers that the client declared to be of its connection.
        out = {name: value for name, value in headers.items() if name not in NOT_FORWARDED | named}
        # Compressed bytes would pass just as well, but could not be looked into.
        out["accept-encoding"] = "identity"
        out["x-request-id"] = exchange.request_id
        if caller.session:
            out.setdefault("x-workmem-session", caller.session)
        if self._asks_for_keys:
            # The client's key is ours, and its tenant is what the key says.
            out.pop("authorization", None)
            out.pop("x-api-key", None)
            out["x-workmem-tenant"] = exchange.tenant
        if self._key:
            out["authorization"] = f"Bearer {self._key}"
        request = exchange.request
        query = f"?{request.url.query}" if request.url.query else ""
        path = request.scope["raw_path"].decode("ascii")
        return Outgoing(
            method=request.method,
            target=f"{path}{query}",
            headers=out,
            body=body,
            is_generation=request.method == "POST" and path in GENERATIONS,
        )

    async def _refresh(self, unless_asked_s: float = 0.0) -> None:
        """Learn what is served, unless that was asked and answered a moment ago.

        Everyone waits for the same answers: the first requests come while the first ones are on their way.
        """
        if self._asking is None or self._asking.done():
            if time.monotonic() - self._asked_at < unless_asked_s:
                return
            self._asked_at = time.monotonic()
            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            self._asking = asyncio.create_task(
                refresh_models(self.servers, self._sender.client, self._config, headers)
            )
        await asyncio.shield(self._asking)

    async def _keep_fresh(self) -> None:
        while True:
            await self._refresh()
            await asyncio.sleep(self._config.models_ttl_s)


class _Passing(msgspec.Struct):
    """A request that is being answered."""

    exchange: Exchange
    caller: Caller
    model: str
    session: str
    raw: dict[str, Any]
    split: Split | None
    tries: Tries
    steady: SteadyStream | None
    arrived: float
    created: int
    kept: Kept | None


def _asking_chat(request: Outgoing, chat: bytes) -> Outgoing:
    """`request` with a chat in the place of its message."""
    headers = dict(request.headers)
    # The header that Anthropic's clients send their key in.
    if key := headers.get("x-api-key"):
        headers.setdefault("authorization", f"Bearer {key}")
    return msgspec.structs.replace(request, target=CHAT.path, headers=headers, body=chat, is_generation=True)


def no_such_model(name: str, models: Iterable[str]) -> Refusal:
    """404 for a model that no server lists."""
    text = f"The model {name[:256]!r} does not exist here; served: {sorted(models)}."
    return Refusal(404, text, code="model_not_found")


def _object_in(body: bytes) -> dict[str, Any]:
    """The body as an object if it is one: whether it must be is the upstream server's affair."""
    try:
        return decode_json(body)
    except ClientError:
        return {}
