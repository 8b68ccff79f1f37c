"""What a store tells of itself in numbers, under the names that `/metrics` puts `workmem_` before."""

from __future__ import annotations

import msgspec

from workmem.core.outcomes import TierName
from workmem.store.breaker import Breaker
from workmem.store.frames import FrameState
from workmem.store.pool import Pool
from workmem.store.scrubber import ScrubCounts
from workmem.store.steering import ghost_gauges, order_gauges
from workmem.store.tiers.attached import AttachedTier
from workmem.store.tiers.ssd import SsdTier

_COUNTERS = (
    "saves",
    "saved_bytes",
    "saves_dropped",
    "leases",
    "leases_expired",
    "leases_refused",
    "dram_evictions",
    "dram_moved_bytes",
    "ssd_evictions",
    "quarantines",
    "promoted",
    "promoted_bytes",
    "ssd_written_bytes",
    "ssd_plain_bytes",
    "ssd_moved_bytes",
    "ssd_unreadable",
    "ssd_writes_failed",
    "writes_given_up",
    "pins_demoted",
    "pins_expired",
)


def readings(
    pool: Pool,
    tier: SsdTier | AttachedTier | None,
    breaker: Breaker,
    queued: int,
    scrubbed: ScrubCounts | None,
) -> dict[str, float]:
    """All of them at about one moment: no lock is taken. `queued` is pages that wait to be copied."""
    state, frames = pool.state, pool.state.frames
    found: dict[str, float] = {
        "store_dram_capacity_bytes": frames.capacity_bytes,
        "store_dram_used_bytes": frames.used_bytes,
        "store_dram_fragmented_bytes": frames.fragmented_bytes,
        "store_dram_pages": len(state.order),
        "store_dram_resident_bytes": frames.ledger[FrameState.RESIDENT],
        "store_dram_quarantined_bytes": frames.ledger[FrameState.QUARANTINED],
        "store_dram_held_skips_total": state.order.held_skips,
        "store_save_queue_pages": queued,
        "store_unwritten_pages": len(state.unwritten),
        "store_life_groups": state.care.group_count,
    }
    found |= ghost_gauges(TierName.DRAM, state.ghosts) | order_gauges(TierName.DRAM, state)
    found |= {f"store_{name}_total": state.counts[name] for name in _COUNTERS}
    if isinstance(tier, AttachedTier):
        found |= _of_attached(tier, breaker)
    elif tier is not None:
        found |= _of_ssd(tier, breaker)
    if scrubbed is not None:
        counts = msgspec.structs.asdict(scrubbed)
        found |= {f"store_scrubbed_{name}_total": count for name, count in counts.items()}
    return found


def _of_attached(tier: AttachedTier, breaker: Breaker) -> dict[str, float]:
    usage = tier.tier.usage()
    return (
        {
            "store_below_capacity_bytes": usage.capacity_bytes,
            "store_below_used_bytes": usage.used_bytes,
            "store_below_pages": tier.index.page_count,
            "store_below_error": float(breaker.writes_open or breaker.reads_open),
            "store_below_read_errors_total": breaker.read_errors,
            "store_below_write_errors_total": breaker.write_errors,
        }
        | ghost_gauges("below", tier.index.ghosts)
        | order_gauges("below", tier.index)
    )


def _of_ssd(tier: SsdTier, breaker: Breaker) -> dict[str, float]:
    return (
        {
            "store_ssd_capacity_bytes": tier.capacity_bytes,
            "store_ssd_used_bytes": tier.index.file_bytes,
            "store_ssd_live_bytes": tier.index.live_bytes,
            "store_ssd_pages": tier.index.page_count,
            "store_ssd_approximate": float(tier.forms.is_approximate),
            "store_ssd_sealed": float(tier.forms.seals),
            "store_ssd_error": float(breaker.writes_open or breaker.reads_open),
            "store_ssd_read_errors_total": breaker.read_errors,
            "store_ssd_write_errors_total": breaker.write_errors,
        }
        | ghost_gauges(TierName.SSD, tier.index.ghosts)
        | order_gauges(TierName.SSD, tier.index)
    )
