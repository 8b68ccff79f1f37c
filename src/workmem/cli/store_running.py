"""The tiers of a running store as `workmem store stat` shows them."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from workmem.core.units import format_bytes
from workmem.store.tools.running_stat import RunningStat, TierStat


def show_running(console: Console, found: RunningStat) -> None:
    """Print tiers, then quotas and pins where there are any."""
    console.print(_tiers(found.tiers))
    if any(tier.quotas for tier in found.tiers):
        console.print(_quotas(found.tiers))
    if found.pins:
        console.print(
            f"pins: {found.pins} of {found.owners} owners, naming {format_bytes(found.pinned_bytes)}"
        )
        table = Table("owner", "pins", "bytes", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for owner in found.largest_owners:
            table.add_row(escape(owner.owner), str(owner.pins), format_bytes(owner.bytes))
        console.print(table)


def _tiers(tiers: list[TierStat]) -> Table:
    percents = sorted({percent for tier in tiers for percent in tier.would_hit})
    table = Table(
        "tier", "state", "eviction", "used", "of", "pages", "pinned", "missed", box=None, pad_edge=False
    )
    for percent in percents:
        table.add_column(f"hit at {percent}%")
    for column in table.columns[3:]:
        column.justify = "right"
    for tier in tiers:
        table.add_row(
            tier.tier,
            tier.state,
            escape(tier.eviction),
            format_bytes(tier.used_bytes),
            format_bytes(tier.capacity_bytes),
            str(tier.pages),
            str(tier.pinned_pages),
            str(tier.missed_blocks),
            *(str(tier.would_hit.get(percent, "-")) for percent in percents),
        )
    return table


def _quotas(tiers: list[TierStat]) -> Table:
    table = Table("quota", "tier", "used", "floor", "ceiling", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for tier in tiers:
        for quota in tier.quotas:
            ceiling = "-" if quota.ceiling_bytes is None else format_bytes(quota.ceiling_bytes)
            table.add_row(
                escape(quota.group),
                tier.tier,
                format_bytes(quota.used_bytes),
                format_bytes(quota.floor_bytes),
                ceiling,
            )
    return table
