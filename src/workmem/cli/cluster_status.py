"""`workmem cluster status`: a pool as its masters see it."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from workmem.cli.options import ConfigFile, Settings
from workmem.cli.store_folder import console_out
from workmem.cluster.view import ClusterView, StoreView, admin_urls, look, store_view
from workmem.config import load
from workmem.core.errors import TransferError
from workmem.core.units import format_bytes
from workmem.store.tiers.mooncake.options import parse_options

AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON, with plain bytes.")]


def status(*, json: AsJson = False, config: ConfigFile = None, sets: Settings = ()) -> None:
    """Show masters, segments, and what they hold. Exit code 1 where no master serves."""
    settings = load(config, sets=sets).config
    below = settings.store.below
    store = store_view(parse_options(below.options)) if below.tier == "mooncake" else None
    found = msgspec.structs.replace(look(admin_urls(settings.cluster)), store=store)
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    else:
        _show(console_out(), found)
    if found.pool is None:
        whys = "; ".join(master.problem or f"{master.url} is {master.state}" for master in found.masters)
        raise TransferError(
            f"no master serves: {whys}. `workmem cluster up` starts one; cluster.admin_urls says where others answer"
        )


def _show(console: Console, found: ClusterView) -> None:
    masters = Table("master", "role", "state", box=None, pad_edge=False)
    for master in found.masters:
        state = master.state if master.answers else "does not answer"
        masters.add_row(escape(master.url), escape(master.role) or "-", escape(state))
    console.print(masters)
    if found.store is not None:
        console.print(escape(_of_store(found.store)))
    if found.pool is None:
        return
    segments = Table("segment", "state", "protocol", "used", "of", "data at", box=None, pad_edge=False)
    for column in segments.columns[3:5]:
        column.justify = "right"
    for segment in found.segments:
        segments.add_row(
            escape(segment.segment_name),
            escape(segment.status),
            escape(segment.protocol),
            format_bytes(segment.allocator_used_bytes),
            format_bytes(segment.size_bytes),
            escape(segment.te_endpoint),
        )
    console.print(segments)
    pool = found.pool
    share = f", {pool.used_bytes / pool.capacity_bytes:.0%}" if pool.capacity_bytes else ""
    console.print(
        f"pool: {format_bytes(pool.used_bytes)} of {format_bytes(pool.capacity_bytes)}{share}; "
        f"{pool.keys} keys, {pool.clients} clients"
    )
    console.print(
        f"since the master started: {pool.refused_puts} puts refused for want of room, {pool.evicted_keys} keys evicted, "
        f"{pool.came_back} processes came back"
    )


def _of_store(store: StoreView) -> str:
    sealed = f"sealed under key {store.key_id}" if store.is_sealed else "in the clear"
    return f"this host's store: pool {store.pool!r} of {store.master}, {store.problem or sealed}"
