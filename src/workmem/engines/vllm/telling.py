"""What the two sides count, as vLLM's own metrics show it: `vllm:workmem_...`.

Told as changes since the last time, so what several workers and steps say adds up, levels too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from workmem.core.hints import Kind
from workmem.engines.vllm.guard import Guard
from workmem.engines.vllm.scheduler import LOAD_OUTCOMES, SchedulerSide
from workmem.engines.vllm.worker import WorkerSide
from workmem.policy.handoff import Ending
from workmem.store.contract import SaveState

PREFIX = "vllm:workmem_"


class Metric(msgspec.Struct, frozen=True):
    """A metric, and where its series are counted."""

    about: str
    label: str = ""
    series: Mapping[str, str] = {}
    """Value of the label to the name of its count. Empty: one series, counted under the metric's own name."""
    is_level: bool = False
    """It goes down as well."""
    scale: float = 1.0
    """What is shown of one that was counted."""

    def names(self, name: str) -> dict[str, str]:
        """Value of the label, empty without one, to the name of its count."""
        return dict(self.series) or {"": name}


METRICS: dict[str, Metric] = {
    "loads": Metric(
        "Loads from the store, by how they ended: whole, or why pages were computed instead.",
        "outcome",
        {outcome.replace(" ", "_"): f"loads_{outcome}" for outcome in LOAD_OUTCOMES},
    ),
    "pages_loaded": Metric("Pages from the store that are in place, of all workers together."),
    "pages_offered": Metric("Pages given to the workers to save."),
    "pages_saved": Metric(
        "Pages of each worker by how their save ended.",
        "outcome",
        {state.value: f"pages_{state.value}" for state in SaveState},
    ),
    "bytes": Metric(
        "Bytes between vLLM's blocks and the store.",
        "direction",
        {"loaded": "bytes_loaded", "saved": "bytes_saved"},
    ),
    "save_waits": Metric("Steps that waited for the copy of a block which they were about to write to."),
    "prefetches": Metric(
        "Contexts brought to dram ahead of their turn, or not for want of room.",
        "outcome",
        {"held": "prefetches", "refused": "prefetches_refused"},
    ),
    "handoffs": Metric(
        "Requests whose prompt was just computed elsewhere, by how the wait for its blocks ended.",
        "outcome",
        {ending.value: f"handoffs_{ending.value}" for ending in Ending},
    ),
    "handoff_wait_seconds": Metric(
        "Seconds that requests were held back for a handoff.", series={"": "handoff_waited_ms"}, scale=1e-3
    ),
    "levers": Metric(
        "Actions of hints that were looked at.", "action", {kind: f"lever_{kind}" for kind in Kind}
    ),
    "hints": Metric(
        "What became of actions of hints.",
        "outcome",
        {outcome: f"hints_{outcome}" for outcome in ("accepted", "clipped", "missing", "rejected")},
    ),
    "pins": Metric(
        "Pins in vLLM's own memory by what happened to them.",
        "event",
        {
            "made": "pins",
            "released": "pins_ended",
            "expired": "pins_expired",
            "gave_way": "pins_gave_way",
            "outranked": "pins_outranked",
        },
    ),
    "pins_held": Metric("Pins that there are.", is_level=True),
    "pinned_blocks": Metric("Blocks of vLLM's that pins hold.", is_level=True),
    "preemptions_spared": Metric("Times that pins gave way where vLLM was about to preempt."),
    "admissions": Metric(
        "Steps that our scheduler class put in another order, and times that it held a request back.",
        "event",
        {"reordered": "reordered", "held_back": "held_back"},
    ),
    "bugs": Metric(
        "Bugs of workmem's own that vLLM did not notice.",
        "side",
        {"scheduler": "bugs_scheduler", "worker": "bugs_worker"},
    ),
    "off": Metric(
        "1 for each side that does nothing any more, see vLLM's log.",
        "side",
        {"scheduler": "off_scheduler", "worker": "off_worker"},
        is_level=True,
    ),
}

_COUNTS = frozenset(count for name, metric in METRICS.items() for count in metric.names(name).values())


def scheduler_totals(side: SchedulerSide, *more: Counter[str]) -> Counter[str]:
    """All that the scheduler's side has counted; `more`: what others count beside it."""
    totals: Counter[str] = Counter()
    pins = side.levers.pins
    for counts in (side.counts, side.levers.counts, *more, *(() if pins is None else (pins.counts,))):
        totals.update(counts)
    totals["pins_held"] = 0 if pins is None else len(pins)
    totals["pinned_blocks"] = 0 if pins is None else pins.held
    return totals


def worker_totals(side: WorkerSide) -> Counter[str]:
    """All that a worker's side has counted. Other threads go on counting: read by name."""
    totals = Counter({f"pages_{state.value}": side.counts[f"pages_{state.value}"] for state in SaveState})
    totals["bytes_loaded"] = side.counts["pages_loaded"] * side.page_bytes
    totals["bytes_saved"] = totals[f"pages_{SaveState.STORED.value}"] * side.page_bytes
    totals["save_waits"] = side.save_waits
    return totals


def guard_totals(side: str, guard: Guard) -> Counter[str]:
    """Of the `scheduler` or a `worker`."""
    return Counter({f"bugs_{side}": guard.errors, f"off_{side}": int(bool(guard.off))})


class Changes:
    """What was told, so that the next time only what is new is."""

    def __init__(self) -> None:
        self._told: Counter[str] = Counter()

    def of(self, totals: Counter[str]) -> dict[str, int]:
        """By name of the count; none that is as it was."""
        told = self._told
        changed = {
            count: total - told[count]
            for count, total in totals.items()
            if total != told[count] and count in _COUNTS
        }
        told.update(changed)
        return changed


def added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The changes of both."""
    total = dict(one)
    for count, change in other.items():
        total[count] = total.get(count, 0) + change
    return total


def summary(changes: Mapping[str, int]) -> dict[str, int]:
    """The few of them that are worth a line of vLLM's log."""
    wanted = (
        "pages_loaded",
        "pages_stored",
        "bytes_loaded",
        "bytes_saved",
        "loads_corrupt",
        "pins",
        "pins_gave_way",
    )
    return {count: changes[count] for count in wanted if changes.get(count)}
