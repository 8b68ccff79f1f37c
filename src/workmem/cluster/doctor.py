"""Finds what operators get wrong about a pool: looks once, then checks, each thing by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workmem.cluster import checks_host, checks_pool
from workmem.cluster.addresses import is_own, is_reached, resolve
from workmem.cluster.config import ClusterConfig
from workmem.cluster.findings import Case, Finding
from workmem.cluster.here import Here, look_here
from workmem.cluster.view import admin_urls, look
from workmem.store.config import BelowConfig
from workmem.store.tiers.mooncake.options import parse_options
from workmem.transfer.transports import known_transports

_OFFLOAD_PATH = "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"

CHECKS: tuple[Callable[[Case], Finding], ...] = (
    checks_host.libraries,
    checks_host.build,
    checks_pool.master,
    checks_pool.store,
    checks_pool.sealing,
    checks_host.address,
    checks_host.bind,
    checks_host.admin,
    checks_pool.client_ttl,
    checks_pool.lease,
    checks_pool.watermark,
    checks_pool.snapshots,
    checks_pool.oplog,
    checks_pool.disk,
    checks_pool.disk_cap,
    checks_host.names,
    checks_pool.hard_pins,
    checks_host.transports,
    checks_host.rdma,
    checks_pool.wheel,
)


def examine(case: Case) -> list[Finding]:
    """All checks, in the order in which a person mends things."""
    return [check(case) for check in CHECKS]


def case_of(config: ClusterConfig, below: BelowConfig) -> Case:
    """Look at everything. Takes seconds. Raises ConfigError where `[store.below]` is a pool and cannot be read."""
    here = look_here()
    addresses = resolve(config.host)
    return Case(
        config=config,
        store=parse_options(below.options) if below.tier == "mooncake" else None,
        view=look(admin_urls(config)),
        here=here,
        host_addresses=tuple(map(str, addresses)),
        host_is_own=any(is_own(address) for address in addresses),
        is_master_reached=is_reached(config.master),
        transports=tuple(known_transports()),
        offload_paths=_offload_paths(here),
    )


def _offload_paths(here: Here) -> dict[str, str]:
    paths = {one.variables[_OFFLOAD_PATH] for one in here.programs if _OFFLOAD_PATH in one.variables}
    return {path: _why_not(Path(path)) for path in sorted(paths)}


def _why_not(path: Path) -> str:
    if path.is_symlink():
        return "is a link"
    return "" if path.is_dir() else "is no folder"
