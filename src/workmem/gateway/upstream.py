"""Upstream mode: the same front before OpenAI-compatible servers. Bodies and streams pass byte for byte."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import yarl
from starlette.applications import Starlette

from workmem.core.errors import ClientError, ConfigError
from workmem.core.generation import Caller
from workmem.gateway.app import assemble
from workmem.gateway.config import ServerConfig, UpstreamConfig
from workmem.gateway.exchange import Answer, Exchange, header_map, state_of
from workmem.gateway.explain import RequestLog, list_requests
from workmem.gateway.failures import Refusal, json_response
from workmem.gateway.key_file import key_to_send
from workmem.gateway.metrics import Metrics
from workmem.gateway.pass_through import NOT_FORWARDED, PassThrough
from workmem.gateway.passed import PassedRequest, explain_passed
from workmem.gateway.servers import UpstreamServer, merged_models, rank, refresh_models
from workmem.gateway.usage_peek import UsagePeek
from workmem.prompt.decode import decode_json
from workmem.prompt.identity import SessionInferrer, history_of, identify, with_session

log = logging.getLogger("workmem.gateway")


class Upstream:
    """Picks a server for each request and passes it on. `open` before use, `close` after."""

    def __init__(
        self, config: UpstreamConfig, front: ServerConfig, servers: list[UpstreamServer], metrics: Metrics
    ) -> None:
        if not servers:
            raise ConfigError("$.upstream.urls: upstream mode needs at least one URL.")
        self.servers = servers
        self.sessions = SessionInferrer()
        self.request_log = RequestLog(front.explain_prompts_max)
        self._config = config
        self._request_timeout_s = front.request_timeout_s
        self._asks_for_keys = bool(front.api_key_file)
        self._key = key_to_send(config.api_key_file, "$.upstream.api_key_file") if config.api_key_file else ""
        self._metrics = metrics
        self._session: aiohttp.ClientSession | None = None
        self._keeping_fresh: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")

    async def open(self) -> None:
        """Start the client and learn what is served; servers may still be down."""
        # A connection per request: a kept one may die just as it is used, and only then can it not
        # be told whether the server has begun. Beside a generation a connect costs nothing.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._config.connect_timeout_s, sock_read=self._config.read_timeout_s
        )
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        self._keeping_fresh = asyncio.create_task(self._keep_fresh())

    async def close(self) -> None:
        """Close all connections."""
        tasks = [task for task in (self._keeping_fresh, self._asking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def models(self) -> dict[str, dict[str, Any]]:
        """All models by id, asked now."""
        await self._refresh()
        return merged_models(self.servers)

    async def forward(self, exchange: Exchange) -> Answer:
        """Pass the request on to the best server that takes it."""
        raw = _object_in(exchange.body)
        model = raw.get("model") if isinstance(raw.get("model"), str) else ""
        headers = header_map(exchange.request)
        caller = with_session(
            identify(headers, raw, tenant=exchange.tenant), self.sessions, str(model), history_of(raw)
        )
        affinity = f"{caller.tenant}\0{caller.session}" if caller.session else ""
        order = rank(self.servers, model=str(model), affinity=affinity, now=time.monotonic())
        if model and not (order and model in order[0].models):
            await self._refresh(unless_asked_s=1.0)
            order = rank(self.servers, model=str(model), affinity=affinity, now=time.monotonic())
        if not order:
            raise _no_such_model(str(model), merged_models(self.servers))
        outgoing = self._outgoing_headers(exchange, headers, caller)
        for server in order:
            answer = await self._try(server, exchange, outgoing, caller)
            if answer is not None:
                return answer
        text = f"None of the {len(order)} upstream servers accepts connections: {order[0].last_error}."
        raise Refusal(502, text, code="upstream_unreachable")

    async def _try(
        self, server: UpstreamServer, exchange: Exchange, headers: Mapping[str, str], caller: Caller
    ) -> Answer | None:
        """The answer of `server` once its headers are here; None if it could not be connected to."""
        request = exchange.request
        query = f"?{request.url.query}" if request.url.query else ""
        url = yarl.URL(f"{server.url}{request.scope['raw_path'].decode('ascii')}{query}", encoded=True)
        arrived, created = time.monotonic(), int(time.time())
        server.in_flight += 1
        try:
            answer = await self._client.request(
                request.method, url, headers=headers, data=exchange.body or None, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            # No byte was sent, so another server may have the request.
            server.in_flight -= 1
            server.down_until = time.monotonic() + self._config.retry_after_s
            server.last_error = f"{type(error).__name__}: {error}"
            log.warning("upstream %s unreachable: %s", server.url, error)
            return None
        except TimeoutError as error:
            server.in_flight -= 1
            text = f"The upstream server was silent for {self._config.read_timeout_s:g} s."
            raise Refusal(504, text, code="upstream_timeout") from error
        except aiohttp.ClientError as error:
            server.in_flight -= 1
            text = f"The upstream server broke off before it answered ({type(error).__name__})."
            raise Refusal(502, text, code="upstream_error") from error
        except BaseException:
            server.in_flight -= 1
            raise

        def let_go() -> None:
            server.in_flight -= 1
            answer.close()

        exchange.held.callback(let_go)
        server.down_until, server.last_error = 0.0, ""

        def remember(seen: UsagePeek, *, is_whole: bool) -> None:
            self.request_log.add(
                PassedRequest(
                    id=seen.id or exchange.request_id,
                    request_id=exchange.request_id,
                    prompts=(),
                    caller=caller,
                    created=created,
                    server=server.url,
                    status=answer.status,
                    is_whole=is_whole,
                    usage=seen.usage,
                )
            )

        return PassThrough(answer, self._metrics, arrived, self._request_timeout_s, remember)

    def _outgoing_headers(
        self, exchange: Exchange, headers: Mapping[str, str], caller: Caller
    ) -> dict[str, str]:
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
        return out

    @property
    def _client(self) -> aiohttp.ClientSession:
        assert self._session is not None, "open() comes first"
        return self._session

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
                refresh_models(self.servers, self._client, self._config, headers)
            )
        await asyncio.shield(self._asking)

    async def _keep_fresh(self) -> None:
        while True:
            await self._refresh()
            await asyncio.sleep(self._config.models_ttl_s)


def build_upstream_app(upstream: UpstreamConfig, config: ServerConfig | None = None) -> Starlette:
    """The front of the servers in `upstream.urls`."""
    config = config or ServerConfig()
    servers = [UpstreamServer(url) for url in upstream.urls]
    metrics = Metrics(partial(_gauges, servers))
    front = Upstream(upstream, config, servers, metrics)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        del app
        await front.open()
        try:
            yield
        finally:
            await front.close()

    app = assemble(
        [
            ("/v1/models", "GET", _models),
            ("/v1/models/{id:path}", "GET", _model),
            ("/v1/{path:path}", "POST", _forward),
            ("/v1/{path:path}", "GET", _forward),
            ("/v1/{path:path}", "DELETE", _forward),
            ("/debug/requests", "GET", list_requests),
            ("/debug/requests/{id}", "GET", explain_passed),
        ],
        config=config,
        metrics=metrics,
        health=_health,
        lifespan=lifespan,
    )
    app.state.upstream = front
    app.state.request_log = front.request_log
    return app


async def _forward(exchange: Exchange) -> Answer:
    upstream: Upstream = state_of(exchange.request, "upstream")
    return await upstream.forward(exchange)


async def _models(exchange: Exchange) -> Answer:
    upstream: Upstream = state_of(exchange.request, "upstream")
    return json_response({"object": "list", "data": list((await upstream.models()).values())})


async def _model(exchange: Exchange) -> Answer:
    upstream: Upstream = state_of(exchange.request, "upstream")
    models, name = await upstream.models(), exchange.request.path_params["id"]
    if name not in models:
        raise _no_such_model(name, models)
    return json_response(models[name])


async def _health(exchange: Exchange) -> Answer:
    upstream: Upstream = state_of(exchange.request, "upstream")
    now = time.monotonic()
    servers = [
        {
            "url": one.url,
            "is_up": not one.is_down(now),
            "running": one.in_flight,
            "models": sorted(one.models),
        }
        for one in upstream.servers
    ]
    return json_response({"status": "ok", "servers": servers})


def _gauges(servers: list[UpstreamServer]) -> dict[str, float]:
    now = time.monotonic()
    return {
        "upstream_requests_running": float(sum(server.in_flight for server in servers)),
        "upstream_servers_up": float(sum(not server.is_down(now) for server in servers)),
    }


def _no_such_model(name: str, models: Iterable[str]) -> Refusal:
    text = f"The model {name[:256]!r} does not exist here; served: {sorted(models)}."
    return Refusal(404, text, code="model_not_found")


def _object_in(body: bytes) -> dict[str, Any]:
    """The body as an object if it is one: whether it must be is the upstream server's affair."""
    try:
        return decode_json(body)
    except ClientError:
        return {}
