"""Who is calling: what the wire says, whose session it continues, and where it stands in the tree of agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from workmem.core.generation import Caller
from workmem.gateway.exchange import Answer, Exchange, state_of
from workmem.gateway.explain import only_operators
from workmem.gateway.failures import json_response
from workmem.gateway.keys import ApiKeys
from workmem.prompt.agent_tree import Agent, AgentTree, Key
from workmem.prompt.identity import identify
from workmem.prompt.sessions import SessionInferrer

AGENTS_SHOWN_MAX = 1000


class Callers:
    """Of one server. Not thread-safe: the event loop calls it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.sessions = SessionInferrer()
        self.tree = AgentTree()
        self._clock = clock

    def who(
        self,
        headers: Mapping[str, str],
        body: Mapping[str, Any],
        *,
        tenant: str,
        model: str,
        history: Sequence[Any],
    ) -> Caller:
        """The caller of a request. `headers` has lower-case names; `history` is what grows from turn to turn."""
        caller = identify(headers, body, tenant=tenant)
        if not caller.session:
            session = self.sessions.infer(f"{caller.tenant}\0{model}", history)
            caller = msgspec.structs.replace(caller, session=session)
        return self.tree.place(caller, self._clock())


async def list_agents(exchange: Exchange) -> Answer:
    """`GET /debug/agents`: the agents seen lately, each with its children below it."""
    only_operators(exchange.request)
    keys: ApiKeys = state_of(exchange.request, "keys")
    callers: Callers = state_of(exchange.request, "callers")
    agents = callers.tree.agents(exchange.tenant if keys.is_required else None)[:AGENTS_SHOWN_MAX]
    shown = {key for key, _ in agents}
    below: dict[Key | None, list[tuple[Key, Agent]]] = {}
    for key, agent in agents:
        below.setdefault(agent.parent if agent.parent in shown else None, []).append((key, agent))
    return json_response({"object": "list", "data": _nodes(below, None)})


def _nodes(below: Mapping[Key | None, list[tuple[Key, Agent]]], parent: Key | None) -> list[dict[str, Any]]:
    return [
        {
            "tenant": key[0],
            "session": agent.session,
            "agent": agent.agent,
            "workflow": agent.workflow,
            "first_seen": agent.first_seen,
            "last_seen": agent.last_seen,
            "requests": agent.requests,
            "children": _nodes(below, key),
        }
        for key, agent in below.get(parent, ())
    ]
