"""The servers behind the gateway: what each serves and does, how busy it is, and which is asked first."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
import msgspec

from workmem.gateway.config import UpstreamConfig
from workmem.policy.learned_costs import LearnedCosts
from workmem.policy.roles import Role


class UpstreamServer:
    """One server. `models` maps ids to their entries in `/v1/models`, once it `has_listed` them."""

    def __init__(
        self,
        url: str,
        role: Role = "both",
        *,
        is_changeable: bool = False,
        fleet_costs: LearnedCosts | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.role: Role = role
        self.next_role: Role | None = None
        """What it becomes once what runs has ended; it gets nothing new until then."""
        self.is_changeable = is_changeable
        """Whether the controller may change its role."""
        self.costs = LearnedCosts(fleet_costs)
        self.backlog_s = 0.0
        """Expected seconds of the prompts that it computes for others."""
        self.no_prefill_until = 0.0
        """It failed in a prefill a moment ago."""
        self.prefill_failures = 0
        """In a row."""
        self.spared_at = 0.0
        """When it was last found to fail there, on the monotonic clock."""
        self.prefill_useless = 0
        """Answers in a row that did not say what was computed."""
        self.lacks_messages = False
        """It has shown that it knows no `/v1/messages`, so it is asked by chats."""
        self.in_flight = 0
        self.down_until = 0.0
        self.models: dict[str, dict[str, Any]] = {}
        self.has_listed = False
        self.last_error = ""

    @property
    def place(self) -> int:
        """Lower gets whole requests first: prefill servers, and those that change, only where nobody else is up."""
        if self.next_role is not None:
            return 2
        return {"decode": 0, "both": 1, "prefill": 3}[self.role]

    @property
    def decodes(self) -> bool:
        """Whether it will still get whole requests when what changes has changed."""
        return (self.next_role or self.role) != "prefill"

    def takes_prefill(self, model: str, now: float) -> bool:
        """Whether prompts may be computed there for others."""
        is_prefill = self.role == "prefill" and self.next_role is None
        is_up = not self.is_down(now) and now >= self.no_prefill_until
        return is_prefill and is_up and (not model or model in self.models)

    @property
    def is_unknown(self) -> bool:
        """Whether its first list is still on its way."""
        return not self.has_listed and not self.last_error

    def is_down(self, now: float) -> bool:
        """Whether it refused a connection a moment ago."""
        return now < self.down_until

    def is_well(self, now: float) -> bool:
        """Whether it answered when it was last asked: one that is not down any more may still not be up."""
        return not self.is_down(now) and not self.last_error

    def weight(self, affinity: str) -> int:
        """Rendezvous weight: each key ranks the servers its own way, and keeps the ranking of those left."""
        if not affinity:
            return 0
        digest = hashlib.blake2b(f"{affinity}\0{self.url}".encode("utf-8", "surrogatepass"), digest_size=8)
        return int.from_bytes(digest.digest(), "big")


def rank(servers: Iterable[UpstreamServer], *, model: str, affinity: str, now: float) -> list[UpstreamServer]:
    """The servers to try, best first: those of the model, the session's own, least busy without one.

    Servers that were just unreachable come last instead of never: all may be. One whose list is still on its way
    counts, or its sessions would move elsewhere: wait for the list where it is first. A model that no list names is
    asked of the servers that could not give one. With none of those it is asked of a lone server, and of several
    of none: some answer to any name, with a model that was not asked for. After the first come the decode servers, those
    that do both, those that change, and the prefill servers.
    """
    everyone = list(servers)
    serving = [server for server in everyone if not model or model in server.models or server.is_unknown]
    if not serving:
        serving = [server for server in everyone if not server.has_listed or len(everyone) == 1]
    liked = sorted(
        serving,
        key=lambda one: (
            one.is_down(now),
            max(1, one.place),
            -one.weight(affinity),
            one.is_unknown,
            one.in_flight,
        ),
    )
    return liked[:1] + sorted(liked[1:], key=lambda one: (one.is_down(now), one.place))


def merged_models(servers: Iterable[UpstreamServer]) -> dict[str, dict[str, Any]]:
    """All models by id; of two servers with the same id the first speaks."""
    models: dict[str, dict[str, Any]] = {}
    for server in servers:
        for name, entry in server.models.items():
            models.setdefault(name, entry)
    return models


async def refresh_models(
    servers: Iterable[UpstreamServer],
    session: aiohttp.ClientSession,
    config: UpstreamConfig,
    headers: Mapping[str, str],
) -> None:
    """Ask every server for its models, at the same time. One that does not answer keeps its old list."""

    async def ask(server: UpstreamServer) -> None:
        timeout = aiohttp.ClientTimeout(total=2 * config.connect_timeout_s)
        try:
            async with session.get(f"{server.url}/v1/models", headers=headers, timeout=timeout) as answer:
                body = msgspec.json.decode(await answer.read(), type=_ModelList)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError) as error:
            server.last_error = f"{type(error).__name__}: {error}"
            # What comes back may be another version.
            server.lacks_messages = False
            if isinstance(error, aiohttp.ClientConnectorError):
                server.down_until = time.monotonic() + config.retry_after_s
            return
        server.models = {name: entry for entry in body.data if isinstance(name := entry.get("id"), str)}
        server.has_listed = True
        server.last_error, server.down_until = "", 0.0

    await asyncio.gather(*(ask(server) for server in servers))


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]
