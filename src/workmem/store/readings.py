"""What a store tells of itself in numbers, under the names that `/metrics` puts `workmem_` before."""

from __future__ import annotations

import msgspec

from workmem.core.outcomes import TierName
from workmem.store.below import Below
from workmem.store.frames import FrameState
from workmem.store.pool import Pool
from workmem.store.ssd_index import SsdIndex
from workmem.store.steering import ghost_gauges, order_gauges

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


def readings(pool: Pool, below: Below, queued: int) -> dict[str, float]:
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
    found |= {f"store_{name}_total": state.counts.get(name, 0) for name in _COUNTERS}
    index = below.opening.index
    if index is not None:
        found |= _of_ssd(below, index) if below.opening.is_ssd else _of_attached(below, index)
    if below.scrubber is not None:
        counts = msgspec.structs.asdict(below.scrubber.counts)
        found |= {f"store_scrubbed_{name}_total": count for name, count in counts.items()}
    return found


def _of_attached(below: Below, index: SsdIndex) -> dict[str, float]:
    usage = below.life.usage()
    return (
        {
            "store_below_capacity_bytes": usage.capacity_bytes,
            "store_below_used_bytes": usage.used_bytes,
            "store_below_pages": index.page_count,
        }
        | _of_health("below", below)
        | ghost_gauges("below", index.ghosts)
        | order_gauges("below", index)
    )


def _of_ssd(below: Below, index: SsdIndex) -> dict[str, float]:
    forms = below.opening.forms
    return (
        {
            "store_ssd_capacity_bytes": below.opening.capacity_bytes,
            "store_ssd_used_bytes": index.file_bytes,
            "store_ssd_live_bytes": index.live_bytes,
            "store_ssd_pages": index.page_count,
            "store_ssd_approximate": float(forms.is_approximate),
            "store_ssd_sealed": float(forms.seals),
        }
        | _of_health(TierName.SSD, below)
        | ghost_gauges(TierName.SSD, index.ghosts)
        | order_gauges(TierName.SSD, index)
    )


def _of_health(tier: str, below: Below) -> dict[str, float]:
    breaker, life = below.breaker, below.life
    return {
        f"store_{tier}_error": float(breaker.writes_open or breaker.reads_open),
        f"store_{tier}_away": float(life.is_away),
        f"store_{tier}_rebuilds_total": life.rebuilds,
        f"store_{tier}_read_errors_total": breaker.read_errors,
        f"store_{tier}_write_errors_total": breaker.write_errors,
    }
