"""A pool at one moment: its masters, its segments, what they hold."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from workmem.cluster.admin import Admin, AdminError, PoolSegment
from workmem.cluster.config import ClusterConfig
from workmem.core.errors import ConfigError
from workmem.store.codecs.pool_sealing import open_pool_cipher
from workmem.store.tiers.mooncake.options import KEY_FILE, MooncakeOptions


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


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    """What this configuration's store is to the pool."""

    pool: str
    master: str
    is_sealed: bool
    """All that it puts is encrypted, and only stores with the same key share it."""
    key_id: str = ""
    """Tells keys apart, and nothing about them; the same on every host whose key is the same. Empty where `problem` is not."""
    problem: str = ""
    """Why its key file cannot be used."""


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """What `workmem cluster status` shows."""

    masters: tuple[MasterView, ...]
    segments: tuple[PoolSegment, ...] = ()
    pool: PoolView | None = None
    """None where no master serves."""
    store: StoreView | None = None
    """None where this configuration's store uses no pool."""


def store_view(options: MooncakeOptions) -> StoreView:
    """Reads the key file, where there is one."""
    key_id, problem = "", ""
    if options.key_file:
        try:
            key_id = open_pool_cipher(options.key_file, KEY_FILE).key_id.hex()
        except ConfigError as error:
            problem = str(error)
    return StoreView(
        pool=options.pool,
        master=options.master,
        is_sealed=bool(options.key_file),
        key_id=key_id,
        problem=problem,
    )


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
