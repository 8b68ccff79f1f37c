"""The HTTP front, flat: which path runs which endpoint."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workmem.core.generation import Engine
from workmem.core.units import parse_bytes
from workmem.gateway.callers import Callers, list_agents
from workmem.gateway.chat import chat_completions
from workmem.gateway.completions import completions
from workmem.gateway.config import ServerConfig
from workmem.gateway.debug import drop_vram, purge_store
from workmem.gateway.exchange import Answer, Boundary, Endpoint, Exchange, state_of
from workmem.gateway.explain import RequestLog, explain_request, list_requests
from workmem.gateway.explainer import Explainer
from workmem.gateway.failures import Refusal, error_response, json_response
from workmem.gateway.generation import Service
from workmem.gateway.keys import ApiKeys
from workmem.gateway.messages import count_tokens, messages
from workmem.gateway.metrics import Metrics
from workmem.gateway.models import get_model, list_models
from workmem.gateway.recent_requests import recent_requests
from workmem.gateway.response_store import ResponseStore
from workmem.gateway.responses import (
    count_input_tokens,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from workmem.gateway.transcripts import TURN_TOKENS_MAX, TURNS_MAX, TurnMemory
from workmem.index.history import PromptHistory
from workmem.prompt.canonical.choice import RuleChoice
from workmem.prompt.config import PromptConfig
from workmem.store.selector import Purged, PurgeSelector

_OF_CLIENTS = re.compile(r"^/(?:v1/v1/.*|models|completions|chat/completions|responses|messages|v1/?)$")
_ENDPOINTS: tuple[tuple[str, str, Endpoint], ...] = (
    ("/v1/models", "GET", list_models),
    ("/v1/models/{id:path}", "GET", get_model),
    ("/v1/chat/completions", "POST", chat_completions),
    ("/v1/completions", "POST", completions),
    ("/v1/responses", "POST", create_response),
    ("/v1/responses/input_tokens", "POST", count_input_tokens),
    ("/v1/responses/{id}", "GET", get_response),
    ("/v1/responses/{id}", "DELETE", delete_response),
    ("/v1/responses/{id}/input_items", "GET", list_input_items),
    ("/v1/messages", "POST", messages),
    ("/v1/messages/count_tokens", "POST", count_tokens),
    ("/debug/agents", "GET", list_agents),
    ("/debug/requests", "GET", list_requests),
    ("/debug/requests/{id}", "GET", explain_request),
    ("/debug/drop_vram", "POST", drop_vram),
    ("/debug/store/purge", "POST", purge_store),
)
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def build_app(
    engine: Engine,
    config: ServerConfig | None = None,
    *,
    history: PromptHistory | None = None,
    metrics: Metrics | None = None,
    purge: Callable[[PurgeSelector], Purged] | None = None,
    prompt: PromptConfig | None = None,
) -> Starlette:
    """The OpenAI-compatible server of `engine`, which it closes when it stops.

    The caller who wants events counted makes `metrics` (with the engine's gauges) and hands
    `metrics.events` to the emitters. `purge` is that of the engine's store; it may block.
    """
    config = config or ServerConfig()
    history = history or PromptHistory(prompts_max=config.explain_prompts_max)
    metrics = metrics or Metrics(engine.gauges)
    request_log = RequestLog(config.explain_prompts_max)
    responses = ResponseStore(
        responses_max=config.responses_max,
        bytes_max=parse_bytes(config.responses_bytes_max, "$.server.responses_bytes_max"),
        events=metrics.events,
    )
    metrics.add_readings(responses.gauges)
    callers = Callers()

    app = assemble(
        _ENDPOINTS,
        config=config,
        metrics=metrics,
        health=_engine_health,
        lifespan=_closes(engine),
    )
    app.state.purge = purge
    app.state.history = history
    app.state.request_log = request_log
    app.state.responses = responses
    app.state.callers = callers
    explainer = Explainer(
        recent_requests(config), history, metrics.miss_tokens, gives_header=config.explain_header
    )
    app.state.explainer = explainer
    app.state.service = Service(
        engine=engine,
        history=history,
        request_log=request_log,
        explainer=explainer,
        metrics=metrics,
        callers=callers,
        transcripts=TurnMemory(metrics, turns_max=TURNS_MAX, tokens_max=TURN_TOKENS_MAX),
        keepalive_s=config.keepalive_s,
        request_timeout_s=config.request_timeout_s,
        rules=RuleChoice(prompt or PromptConfig()),
    )
    return app


def _closes(engine: Engine) -> Lifespan:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        del app
        try:
            yield
        finally:
            await engine.close()

    return lifespan


def assemble(
    endpoints: Sequence[tuple[str, str, Endpoint]],
    *,
    config: ServerConfig,
    metrics: Metrics,
    health: Endpoint,
    lifespan: Lifespan,
) -> Starlette:
    """An application of (path, method, endpoint), with health and metrics, which ask for no key."""
    keys = ApiKeys.load(config.api_key_file)
    everyone = ApiKeys({})
    routes = [_route(path, method, Boundary(end, config, keys), metrics) for path, method, end in endpoints]
    routes += [
        _route("/health", "GET", Boundary(health, config, everyone), metrics),
        _route("/metrics", "GET", Boundary(_metrics_page, config, everyone), metrics),
    ]
    app = Starlette(
        routes=routes, exception_handlers={404: _no_such_path, 405: _no_such_path}, lifespan=lifespan
    )
    app.state.keys = keys
    app.state.metrics = metrics
    return app


def _route(path: str, method: str, boundary: ASGIApp, metrics: Metrics) -> Route:
    return Route(path, _Counted(path, boundary, metrics), methods=[method])


class _Counted:
    """Counts requests by route, so that labels stay few."""

    def __init__(self, path: str, app: ASGIApp, metrics: Metrics) -> None:
        self._path = path
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve and count."""
        is_answered = False

        async def watched(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                self._metrics.http.labels(self._path, str(message["status"])).inc()
            await send(message)

        with self._metrics.http_running.track_inprogress():
            try:
                await self._app(scope, receive, watched)
            finally:
                if not is_answered:
                    self._metrics.http.labels(self._path, "dropped").inc()


async def _engine_health(exchange: Exchange) -> Answer:
    engine: Engine = state_of(exchange.request, "service").engine
    body = {"status": "ok", "model": engine.info.name, "time": time.time(), "gauges": engine.gauges()}
    return json_response(body)


async def _metrics_page(exchange: Exchange) -> Answer:
    metrics: Metrics = state_of(exchange.request, "metrics")
    return Response(metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:256]} is not served here"
    code = "unknown_url" if error.status_code == 404 else "method_not_allowed"
    # What remains when a client's base_url lacks its end, or has it twice.
    if code == "unknown_url" and _OF_CLIENTS.search(request.url.path):
        # Anthropic's clients add the version themselves.
        version = "" if request.url.path.endswith("/messages") else "v1"
        text += f"; a client's base_url is {request.base_url}{version}"
    elif allowed := (error.headers or {}).get("allow"):
        text += f", but {allowed} is"
    text += "."
    refusal = Refusal(error.status_code, text, code=code, headers=dict(error.headers or {}))
    return error_response(refusal, request.url.path)
