"""What vLLM hears of loads, whatever fails in that: where nobody can say what came, none of it did.

It computes with what was promised unless it hears otherwise, and waits for ever for a load aside whose end it is not told.
"""

from __future__ import annotations

from collections.abc import Callable

from workmem.engines.vllm.guard import Guard
from workmem.engines.vllm.outcomes import LoadOutcomes
from workmem.engines.vllm.steps import StepPlan, StepReport


class Hearing:
    """Of one worker. `end_loads`: see `WorkerSide.end_loads`. On the engine's thread."""

    def __init__(self, outcomes: LoadOutcomes, guard: Guard, end_loads: Callable[[], bool]) -> None:
        self._outcomes = outcomes
        self._guard = guard
        self._end_loads = end_loads
        self._blocks: set[int] = set()
        """Of which vLLM hears in this step whether they came."""
        self._aside: dict[str, tuple[int, ...]] = {}
        self._is_blind = False
        """How loads aside end is not known any more."""

    def begins(self, plan: StepPlan) -> None:
        """A step: of what it computes with vLLM hears at its end."""
        self._blocks = set()
        for op in (*plan.broken, *plan.loads):
            if op.is_async:
                self._aside[op.request] = op.blocks
            else:
                self._blocks.update(op.blocks)

    def fail(self, plan: StepPlan, why: str) -> None:
        """See `LoadOutcomes.fail`."""
        if not self._guard.always(lambda: self._failed(plan, why), otherwise=False):
            self._is_blind = True

    def arrived(self, wait_s: float, *, anyway: bool = False) -> set[str]:
        """See `LoadOutcomes.arrived`."""
        found: set[str] | None = None
        if not self._is_blind:
            found = self._guard.always(lambda: self._outcomes.arrived(wait_s, anyway=anyway), None)
        if found is None:
            self._is_blind = True
            # They may be written to until then, and would be by the time that they are somebody else's.
            found = set(self._aside) if self._end_loads() else set[str]()
        for request in found:
            self._blocks.update(self._aside.pop(request, ()))
        return found

    def failed_blocks(self) -> set[int]:
        """See `LoadOutcomes.failed_blocks`. Called after `arrived`, in each step."""
        failed = self._guard.always(self._outcomes.failed_blocks, set[int]())
        # What a side that is off has loaded may be right, and may be not.
        return failed | self._blocks if self._guard.off else failed

    def report(self) -> StepReport | None:
        """See `LoadOutcomes.report`."""
        return self._guard.always(self._outcomes.report, None)

    def _failed(self, plan: StepPlan, why: str) -> bool:
        self._outcomes.fail(plan, why)
        return True
