"""`/debug/servers`: what each server does, and having it do something else."""

from __future__ import annotations

import time
from typing import Any

from workmem.core.errors import ClientError
from workmem.gateway.config import UpstreamConfig
from workmem.gateway.exchange import Answer, Exchange, state_of
from workmem.gateway.explain import only_operators
from workmem.gateway.failures import Refusal, json_response
from workmem.gateway.keys import ApiKeys
from workmem.gateway.roles import Roles
from workmem.gateway.servers import UpstreamServer
from workmem.prompt.decode import decode_json

_FIELDS = ("url", "role", "drain_s")
_DRAIN_MAX_S = 24 * 3600.0


async def list_servers(exchange: Exchange) -> Answer:
    """`GET /debug/servers`: roles, load and learned costs."""
    _require_operator(exchange, "Servers are shown to")
    servers: list[UpstreamServer] = state_of(exchange.request, "servers")
    return json_response({"object": "list", "data": [_told(server) for server in servers]})


async def change_server(exchange: Exchange) -> Answer:
    """`POST /debug/servers {"url", "role", "drain_s"}`: begins the change, and says how things stand."""
    _require_operator(exchange, "Roles are changed with")
    body = decode_json(exchange.body)
    for name in body:
        if name not in _FIELDS:
            text = f"{name[:64]!r} is no field here; known: {', '.join(_FIELDS)}."
            raise ClientError(text, param=name[:64])
    config: UpstreamConfig = state_of(exchange.request, "upstream_config")
    roles: Roles = state_of(exchange.request, "roles")
    drain_s = _seconds(body.get("drain_s", config.drain_s))
    server = roles.change(_text(body, "url"), _text(body, "role"), drain_s, by="operator")
    return json_response(_told(server))


def state_told(server: UpstreamServer, now: float) -> dict[str, Any]:
    """What anybody may know of a server."""
    return {
        "url": server.url,
        "is_up": not server.is_down(now),
        "role": server.role,
        "next_role": server.next_role,
        "running": server.in_flight,
        "models": sorted(server.models),
    }


def _require_operator(exchange: Exchange, what: str) -> None:
    """With keys, those that have a tenant may not: what serves everybody is nobody's own. Raises Refusal (403)."""
    only_operators(exchange.request)
    keys: ApiKeys = state_of(exchange.request, "keys")
    if keys.is_required and exchange.tenant:
        raise Refusal(403, f"{what} a key that has no tenant.", code="forbidden")


def _told(server: UpstreamServer) -> dict[str, Any]:
    now = time.monotonic()
    costs = server.costs.costs()
    return state_told(server, now) | {
        "is_changeable": server.is_changeable,
        "backlog_s": server.backlog_s,
        "last_error": server.last_error,
        "costs": {
            "computed_token_s": costs.computed_token_s,
            "hop_s": costs.hop_s,
            "handed_token_s": costs.handed_token_s,
            "recomputed_share": costs.recomputed_share,
            "samples": costs.samples,
        },
    }


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise ClientError(f"{name} is missing, or no text.", param=name)
    return value


def _seconds(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _DRAIN_MAX_S:
        raise ClientError(f"drain_s must be seconds from 0 to {_DRAIN_MAX_S:g}.", param="drain_s")
    return float(value)
