"""Upstream mode: the same front before OpenAI-compatible servers. Streams pass byte for byte, and bodies where no rule changes them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette

from workmem.gateway.app import assemble
from workmem.gateway.callers import list_agents
from workmem.gateway.config import ServerConfig, UpstreamConfig
from workmem.gateway.exchange import Answer, Exchange, state_of
from workmem.gateway.explain import list_requests
from workmem.gateway.failures import json_response
from workmem.gateway.forwarding import Upstream, no_such_model
from workmem.gateway.metrics import Metrics
from workmem.gateway.passed import explain_passed
from workmem.gateway.role_admin import change_server, list_servers, state_told
from workmem.gateway.servers import UpstreamServer
from workmem.policy.learned_costs import LearnedCosts
from workmem.prompt.canonical.choice import RuleChoice
from workmem.prompt.config import PromptConfig


def servers_of(config: UpstreamConfig) -> list[UpstreamServer]:
    """The servers as configured."""
    fleet = LearnedCosts()
    roles = config.roles or ("both",) * len(config.urls)
    return [
        UpstreamServer(
            url,
            "both" if role == "elastic" else role,
            is_changeable=role == "elastic",
            fleet_costs=fleet,
        )
        for url, role in zip(config.urls, roles, strict=True)
    ]


def build_upstream_app(
    upstream: UpstreamConfig, config: ServerConfig | None = None, *, prompt: PromptConfig | None = None
) -> Starlette:
    """The front of the servers in `upstream.urls`."""
    config = config or ServerConfig()
    servers = servers_of(upstream)
    metrics = Metrics(partial(_gauges, servers))
    front = Upstream(upstream, config, servers, metrics, RuleChoice(prompt or PromptConfig()))

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
            ("/debug/agents", "GET", list_agents),
            ("/debug/requests", "GET", list_requests),
            ("/debug/requests/{id}", "GET", explain_passed),
            ("/debug/servers", "GET", list_servers),
            ("/debug/servers", "POST", change_server),
        ],
        config=config,
        metrics=metrics,
        health=_health,
        lifespan=lifespan,
    )
    app.state.upstream = front
    app.state.explainer = front.explainer
    app.state.request_log = front.request_log
    app.state.callers = front.callers
    app.state.upstream_config = upstream
    app.state.servers = servers
    app.state.roles = front.roles
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
        raise no_such_model(name, models)
    return json_response(models[name])


async def _health(exchange: Exchange) -> Answer:
    upstream: Upstream = state_of(exchange.request, "upstream")
    now = time.monotonic()
    servers = [state_told(one, now) for one in upstream.servers]
    return json_response({"status": "ok", "servers": servers})


def _gauges(servers: list[UpstreamServer]) -> dict[str, float]:
    now = time.monotonic()
    return {
        "upstream_requests_running": float(sum(server.in_flight for server in servers)),
        "upstream_servers_up": float(sum(not server.is_down(now) for server in servers)),
        "upstream_servers_draining": float(sum(server.next_role is not None for server in servers)),
        "upstream_prefill_backlog_seconds": sum(server.backlog_s for server in servers),
    } | {
        f"upstream_servers_{role}": float(sum(server.role == role for server in servers))
        for role in ("both", "decode", "prefill")
    }
