"""A pool at one moment: its masters, its segments, what they hold."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from workmem.cluster.admin import Admin, AdminError, PoolSegment
from workmem.cluster.config import ClusterConfig


class MasterView(msgspec.Struct, frozen=True, kw_only=True):
    """A master, or the want of one."""

    url: str
    answers: bool
    role: str = ""
    state: str = ""
    serves: bool = False
    problem: str = ""


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes; counts since the master started."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    keys: int = 0
    clients: int = 0
    refused_puts: int = 0
    evicted_keys: int = 0
    came_back: int = 0
    """Times that a process was taken for dead, or lost its master, and joined again."""


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """What `workmem cluster status` shows."""

    masters: tuple[MasterView, ...]
    segments: tuple[PoolSegment, ...] = ()
    pool: PoolView | None = None
    """None where no master serves."""


def admin_urls(config: ClusterConfig) -> tuple[str, ...]:
    """Where masters are asked."""
    if config.admin_urls:
        return config.admin_urls
    host = config.admin_host
    if config.master and not config.master.startswith("etcd://"):
        host = config.master.rpartition(":")[0].strip("[]")
    if host in {"", "0.0.0.0", "::"}:  # noqa: S104  where to ask, not where to listen
        host = "127.0.0.1"
    return (f"http://[{host}]:{config.admin_port}" if ":" in host else f"http://{host}:{config.admin_port}",)


def look(urls: Sequence[str]) -> ClusterView:
    """Ask each master, and the one that serves for the rest. Blocks for seconds where some do not answer."""
    masters: list[MasterView] = []
    segments: tuple[PoolSegment, ...] = ()
    pool: PoolView | None = None
    for url in urls:
        admin = Admin(url)
        try:
            health = admin.health()
            if health.service_ready and pool is None:
                segments, pool = admin.segments(), _pool(admin.metrics())
        except AdminError as error:
            masters.append(MasterView(url=url, answers=False, problem=str(error)))
            continue
        masters.append(
            MasterView(
                url=url, answers=True, role=health.role, state=health.ha_state, serves=health.service_ready
            )
        )
    return ClusterView(masters=tuple(masters), segments=segments, pool=pool)


def _pool(metrics: dict[str, float]) -> PoolView:
    def count(name: str) -> int:
        return int(metrics.get(f"master_{name}", 0))

    # Every process mounts its segment and then once more, by the master's count.
    came_back = count("remount_segment_requests_total") - count("mount_segment_requests_total")
    return PoolView(
        capacity_bytes=count("total_capacity_bytes"),
        used_bytes=count("allocated_bytes"),
        keys=count("key_count"),
        clients=count("active_clients"),
        refused_puts=count("put_start_alloc_failures_total"),
        evicted_keys=count("evicted_key_count"),
        came_back=max(0, came_back),
    )
