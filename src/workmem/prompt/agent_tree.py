"""Who started whom: the agents of a fleet as a tree, from what is on the wire. Pure: the caller brings the time.

An agent is known by its tenant, session and name. Its parent is, first match wins, whom the client names; the
session's own agent, where a named agent shares its session; or the first agent of the same trace.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from workmem.core.generation import Caller

AGENTS_MAX = 4096
DEPTH_MAX = 16
"""A chain of parents that is longer, or bites its tail, is cut: clients may send anything."""

Key = tuple[str, str, str]
"""Tenant, session, agent."""


class Agent(msgspec.Struct):
    """An agent as seen so far. Times are in Unix seconds."""

    session: str
    agent: str
    workflow: str
    parent: Key | None
    first_seen: float
    last_seen: float
    requests: int = 0
    children: set[Key] = msgspec.field(default_factory=set)


class AgentTree:
    """The latest agents, at most `agents_max`; the one that was silent for longest leaves first."""

    def __init__(self, agents_max: int = AGENTS_MAX) -> None:
        self._agents_max = agents_max
        self._agents: OrderedDict[Key, Agent] = OrderedDict()
        self._by_name: dict[tuple[str, str], Key] = {}
        """(tenant, session or agent name) to who had it last."""
        self._by_trace: OrderedDict[tuple[str, str], Key] = OrderedDict()
        """(tenant, trace) to its first agent."""

    def __len__(self) -> int:
        return len(self._agents)

    def place(self, caller: Caller, now: float) -> Caller:
        """Count a request, and return its caller with the workflow that its place in the tree gives it.

        That is the workflow of the root, or the root's session where it has children and says none.
        """
        if not caller.session:
            return caller
        key: Key = (caller.tenant, caller.session, caller.agent)
        known = self._agents.get(key)
        if known is None:
            known = self._join(key, caller, now)
        elif known.parent is None and (parent := self._parent_of(key, caller)) is not None:
            self._adopt(key, known, parent)
        self._agents.move_to_end(key)
        known.last_seen, known.requests = now, known.requests + 1
        if not caller.workflow or caller.workflow == caller.trace:
            root_key, root = self._root(key, known)
            known.workflow = root.workflow or (root_key[1] if root.children else "") or caller.workflow
        else:
            known.workflow = caller.workflow
        return msgspec.structs.replace(caller, workflow=known.workflow)

    def agents(self, tenant: str | None = None) -> list[tuple[Key, Agent]]:
        """All agents, of one tenant where one is named, the latest first."""
        return [
            (key, agent)
            for key, agent in reversed(self._agents.items())
            if tenant is None or key[0] == tenant
        ]

    def _join(self, key: Key, caller: Caller, now: float) -> Agent:
        parent = self._parent_of(key, caller)
        agent = Agent(caller.session, caller.agent, "", None, now, now)
        self._agents[key] = agent
        if parent is not None:
            self._adopt(key, agent, parent)
        for name in (caller.session, caller.agent):
            # A session is known by its own agent, not by the children that share it.
            if name and not (name == caller.session and caller.agent and (key[0], name) in self._by_name):
                self._by_name[key[0], name] = key
        if caller.trace:
            self._by_trace.setdefault((key[0], caller.trace), key)
            while len(self._by_trace) > self._agents_max:
                self._by_trace.popitem(last=False)
        while len(self._agents) > self._agents_max:
            self._forget(*self._agents.popitem(last=False))
        return agent

    def _parent_of(self, key: Key, caller: Caller) -> Key | None:
        tenant = key[0]
        if caller.parent:
            named = self._by_name.get((tenant, caller.parent))
            return named if named != key else None
        if caller.agent and (main := (tenant, caller.session, "")) in self._agents:
            return main
        if caller.trace:
            first = self._by_trace.get((tenant, caller.trace))
            return first if first != key and first in self._agents else None
        return None

    def _adopt(self, key: Key, agent: Agent, parent: Key) -> None:
        """Make `parent` the parent, unless it descends from the agent."""
        above: Key | None = parent
        for _ in range(DEPTH_MAX):
            if above is None:
                break
            if above == key:
                return
            node = self._agents.get(above)
            above = node.parent if node else None
        else:
            return
        if (node := self._agents.get(parent)) is not None:
            agent.parent = parent
            node.children.add(key)

    def _root(self, key: Key, agent: Agent) -> tuple[Key, Agent]:
        for _ in range(DEPTH_MAX):
            above = agent.parent
            node = self._agents.get(above) if above else None
            if above is None or node is None:
                break
            key, agent = above, node
        return key, agent

    def _forget(self, key: Key, agent: Agent) -> None:
        for name in (agent.session, agent.agent):
            if name and self._by_name.get((key[0], name)) == key:
                del self._by_name[key[0], name]
        if agent.parent is not None and (node := self._agents.get(agent.parent)) is not None:
            node.children.discard(key)
        # They are roots of their own: should it come back, it is another.
        for child in agent.children:
            self._agents[child].parent = None
