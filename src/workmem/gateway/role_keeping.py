"""Watching a fleet and changing roles by it, where that was asked for."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence

from workmem.core.errors import ClientError
from workmem.gateway.config import UpstreamConfig
from workmem.gateway.failures import Refusal
from workmem.gateway.roles import Roles
from workmem.gateway.servers import UpstreamServer
from workmem.policy.roles import RoleController, RoleTerms, SeenFleet, SeenServer

log = logging.getLogger("workmem.gateway")

_VALUES_MAX = 512
_SHARE = 0.9


class Recent:
    """The values of the last `window_s` seconds, a bounded number of them."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._values: deque[tuple[float, float]] = deque(maxlen=_VALUES_MAX)

    def add(self, value: float, now: float) -> None:
        """Remember `value`."""
        self._values.append((now, value))

    def high(self, now: float) -> float:
        """What 90 of 100 stay below; 0 where there were none."""
        values = sorted(value for when, value in self._values if now - when <= self._window_s)
        return values[math.ceil(_SHARE * len(values)) - 1] if values else 0.0


class RoleKeeper:
    """Looks every `elastic_every_s`, and does what the controller decides."""

    def __init__(self, config: UpstreamConfig, servers: Sequence[UpstreamServer], roles: Roles) -> None:
        self._config = config
        self._servers = servers
        self._roles = roles
        window_s = config.elastic_every_s * config.elastic_patience
        self._ttft = Recent(window_s)
        self._itl = Recent(window_s)
        self._controller = RoleController(
            RoleTerms(
                slo_ttft_s=config.slo_ttft_s,
                slo_itl_s=config.slo_itl_s,
                queue_max=config.slo_queue,
                streams_max=config.slo_streams,
                patience=config.elastic_patience,
                dwell_s=config.elastic_dwell_s,
            )
        )

    def observe(self, ttft_s: float | None, itl_s: float | None) -> None:
        """A generation has ended."""
        now = time.monotonic()
        if ttft_s is not None:
            self._ttft.add(ttft_s, now)
        if itl_s is not None:
            self._itl.add(itl_s, now)

    async def keep(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(self._config.elastic_every_s)
            self.look()

    def look(self) -> None:
        """Once."""
        now = time.monotonic()
        seen = SeenFleet(
            servers=[_seen(server, now) for server in self._servers],
            ttft_s=self._ttft.high(now),
            itl_s=self._itl.high(now),
        )
        change = self._controller.decide(seen, now)
        if change is None:
            return
        log.info("upstream %s becomes %s: %s", change.url, change.role, change.reason)
        try:
            self._roles.change(change.url, change.role, self._config.drain_s, by="controller")
        except (Refusal, ClientError) as error:
            # The last server of a model, which the controller does not look at.
            log.warning("upstream %s stays as it is: %s", change.url, error)


def _seen(server: UpstreamServer, now: float) -> SeenServer:
    return SeenServer(
        url=server.url,
        role=server.role,
        running=server.in_flight,
        is_up=server.is_well(now),
        is_changeable=server.is_changeable,
        is_draining=server.next_role is not None,
    )
