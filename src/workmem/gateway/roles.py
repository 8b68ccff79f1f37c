"""Changing what a server does while it serves: what it does now runs out first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import get_args

from workmem.core.errors import ClientError
from workmem.core.events import BoundReached, RoleChanged
from workmem.gateway.failures import Refusal
from workmem.gateway.servers import UpstreamServer
from workmem.gateway.upstream_metrics import UpstreamMetrics
from workmem.policy.roles import Role

log = logging.getLogger("workmem.gateway")
_LOOK_S = 0.05
_ROLES: tuple[Role, ...] = get_args(Role)


class Roles:
    """The roles of all servers. `close` when they are not changed any more."""

    def __init__(self, servers: Sequence[UpstreamServer], metrics: UpstreamMetrics) -> None:
        self._servers = servers
        self._metrics = metrics
        self._draining: dict[UpstreamServer, asyncio.Task[None]] = {}

    def change(self, url: str, role: str, drain_s: float, *, by: str) -> UpstreamServer:
        """Begin to give the server at `url` another role; a change under way is replaced.

        Raises ClientError naming the field at fault, or Refusal (409) where no server would be left to answer.
        """
        server = self._named(url)
        if role not in _ROLES:
            raise ClientError(f"role must be one of {', '.join(_ROLES)}, got {role[:64]!r}.", param="role")
        wanted: Role = _ROLES[_ROLES.index(role)]
        if wanted == "prefill":
            self._require_others(server)
        if (task := self._draining.pop(server, None)) is not None:
            task.cancel()
        server.next_role = None
        if server.role == wanted:
            return server
        self._metrics.role_changes.labels(wanted, by).inc()
        self._metrics.events(RoleChanged(server=server.url, role=wanted, by=by))
        if "prefill" not in (server.role, wanted):
            # Both answer whole requests, so nothing that runs has to end.
            server.role = wanted
            return server
        server.next_role = wanted
        log.info("upstream %s: %s, draining for %s", server.url, server.role, wanted)
        self._draining[server] = asyncio.create_task(self._drain(server, wanted, drain_s))
        return server

    async def close(self) -> None:
        """Leave what is draining as it is."""
        tasks = list(self._draining.values())
        self._draining.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, server: UpstreamServer, role: Role, drain_s: float) -> None:
        end = time.monotonic() + drain_s
        # Looked at now and then: whoever ends a request must not have to know of roles.
        while server.in_flight and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        if server.in_flight:
            self._metrics.events(
                BoundReached(name="upstream.drain", limit=round(drain_s), detail=f"{server.in_flight} run on")
            )
            log.warning(
                "upstream %s: %d requests outlast the drain of %g s", server.url, server.in_flight, drain_s
            )
        server.role, server.next_role = role, None
        self._draining.pop(server, None)
        log.info("upstream %s: now %s", server.url, role)

    def _named(self, url: str) -> UpstreamServer:
        wanted = url.rstrip("/").removesuffix("/v1")
        for server in self._servers:
            if server.url == wanted:
                return server
        known = ", ".join(server.url for server in self._servers)
        raise ClientError(
            f"url names no server of this front: {url[:256]!r}; there are {known}.", param="url"
        )

    def _require_others(self, server: UpstreamServer) -> None:
        """Somebody who is up must be left to answer, for each model that `server` has."""
        now = time.monotonic()
        others = [one for one in self._servers if one is not server and one.decodes and one.is_well(now)]
        alone = [name for name in server.models if not any(name in one.models for one in others)]
        if alone or not others:
            what = f" with {', '.join(sorted(alone))[:256]}" if others else ""
            text = (
                f"No other server{what} is up that answers: {server.url} cannot become a prefill server now."
            )
            raise Refusal(409, text, code="no_decode_server")
