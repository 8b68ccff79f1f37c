"""What a check says."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from workmem.cluster.config import ClusterConfig
from workmem.cluster.here import Here, Program
from workmem.cluster.view import ClusterView
from workmem.store.tiers.mooncake.options import MooncakeOptions
from workmem.transfer.transports import Transport


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Not wrong here; to be known."""
    WRONG = "wrong"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check's result."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""
    """What to do; empty where nothing is to be done."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """All that checks look at. They ask nobody themselves."""

    config: ClusterConfig
    store: MooncakeOptions | None
    """`[store.below]`, where that is a pool; None elsewhere."""
    view: ClusterView
    here: Here
    host_addresses: tuple[str, ...]
    """What `cluster.host` stands for, none where it has no address."""
    host_is_own: bool
    is_master_reached: bool
    """Something takes connections where `cluster.master` says; False where that says nothing of one."""
    transports: tuple[Transport, ...]
    """Ways for bytes that are known, those that are there first."""
    offload_paths: dict[str, str]
    """Folders of Mooncake's disk tier that are named here, and what is wrong with each; empty where nothing is."""

    @property
    def masters(self) -> tuple[Program, ...]:
        """Those of this pool that run on this host. One of another pool may be told what it likes."""
        asked = {view.url.rpartition(":")[2] for view in self.view.masters}
        joined = {str(self.config.port), self.config.master.rpartition(":")[2]}
        return tuple(
            one
            for one in self.here.programs
            if one.name == "mooncake_master"
            and (one.flags.get("metrics_port", "9003") in asked or _rpc_port(one) in joined)
        )

    @property
    def clients(self) -> tuple[Program, ...]:
        """Mooncake's own store processes on this host."""
        return tuple(one for one in self.here.programs if one.name == "mooncake_client")

    @property
    def has_others(self) -> bool:
        """More hosts than this one take part, as far as is known."""
        hosts = {segment.host for segment in self.view.segments}
        master = self.config.master.rpartition(":")[0].removeprefix("etcd://")
        return bool(hosts - {self.config.host}) or (bool(master) and not is_loopback(master))


def _rpc_port(master: Program) -> str:
    """As Mooncake reads it: `port` is the older name of `rpc_port`."""
    said = master.flags.get("rpc_port", "0")
    return master.flags.get("port", "50051") if said == "0" else said


def is_loopback(host: str) -> bool:
    """Whether `host`, as it is written, means the host that reads it."""
    return host in {"localhost", "::1", "[::1]"} or host.startswith("127.")


def ok(check: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(check=check, verdict=Verdict.OK, found=found)


def note(check: str, found: str, advice: str) -> Finding:
    """To be known."""
    return Finding(check=check, verdict=Verdict.NOTE, found=found, advice=advice)


def wrong(check: str, found: str, advice: str) -> Finding:
    """To be mended."""
    return Finding(check=check, verdict=Verdict.WRONG, found=found, advice=advice)
