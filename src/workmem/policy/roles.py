"""Which server changes between prefill and decode, from what a fleet shows. Pure: time is given, no clock is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Role = Literal["both", "prefill", "decode"]


class RoleTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a person sets. Seconds; a side is at its limit when what it shows reaches one of these."""

    slo_ttft_s: float
    slo_itl_s: float
    queue_max: float
    """Requests under way per prefill server."""
    streams_max: float
    """Requests under way per server that decodes."""
    patience: int
    """So many observations in a row must say the same."""
    dwell_s: float
    """So long nothing is changed after a change."""
    slack: float = 0.7
    """A side gives a server away only below this share of its limits: between them nothing happens."""


class SeenServer(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one moment."""

    url: str
    role: Role
    running: int
    is_up: bool = True
    is_changeable: bool = False
    is_draining: bool = False


class SeenFleet(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment. Times are those of the latest requests, 0 where there were none."""

    servers: Sequence[SeenServer]
    ttft_s: float = 0.0
    itl_s: float = 0.0


class RoleChange(msgspec.Struct, frozen=True, kw_only=True):
    """One server to change, and why."""

    url: str
    role: Role
    reason: str


class RoleController:
    """Moves one server at a time to the side that is at its limit, from one that has slack. Keeps one of each kind."""

    def __init__(self, terms: RoleTerms) -> None:
        self._terms = terms
        self._wanted: Role | None = None
        self._times = 0
        self._changed_s: float | None = None

    def decide(self, fleet: SeenFleet, now_s: float) -> RoleChange | None:
        """What to change now; None for nothing. A change that is returned counts as made."""
        wanted, reason = self._pressure(fleet)
        self._times = (
            self._times + 1 if wanted is not None and wanted == self._wanted else int(wanted is not None)
        )
        self._wanted = wanted
        if wanted is None or self._times < self._terms.patience:
            return None
        if self._changed_s is not None and now_s - self._changed_s < self._terms.dwell_s:
            return None
        if any(server.is_draining for server in fleet.servers):
            return None
        server = _donor(fleet.servers, wanted)
        if server is None:
            return None
        self._changed_s, self._times = now_s, 0
        return RoleChange(url=server.url, role=wanted, reason=reason)

    def _pressure(self, fleet: SeenFleet) -> tuple[Role | None, str]:
        """The side that needs a server, where the other one can spare it."""
        terms = self._terms
        up = [server for server in fleet.servers if server.is_up]
        queue = _per_server([server.running for server in up if server.role == "prefill"])
        streams = _per_server([server.running for server in up if server.role != "prefill"])
        prefill = max(fleet.ttft_s / terms.slo_ttft_s, queue / terms.queue_max)
        decode = max(fleet.itl_s / terms.slo_itl_s, streams / terms.streams_max)
        if prefill >= 1 and decode < terms.slack:
            return "prefill", f"prefill at {prefill:.2f} of its limits, decode at {decode:.2f}"
        if decode >= 1 and prefill < terms.slack:
            return "decode", f"decode at {decode:.2f} of its limits, prefill at {prefill:.2f}"
        return None, ""


def _donor(servers: Sequence[SeenServer], wanted: Role) -> SeenServer | None:
    """The least busy server that may change; None where its side would be left with nobody who is up."""
    side = [
        server for server in servers if server.is_up and (server.role == "prefill") != (wanted == "prefill")
    ]
    able = [server for server in side if server.is_changeable]
    if len(side) < 2 or not able:
        return None
    return min(able, key=lambda server: (server.running, server.url))


def _per_server(running: Sequence[int]) -> float:
    return sum(running) / len(running) if running else 0.0
