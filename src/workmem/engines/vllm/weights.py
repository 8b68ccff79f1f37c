"""Weights that change under a running engine: what it has of before is of another model, whatever its name says.

VLLM tells a connector nothing of that. Each worker sees it for itself before its next step, uses and keeps nothing of
the epoch in which it happened, and tells the scheduler, which begins another one. An epoch that was begun meanwhile
(`reset_prefix_cache` with `reset_connector`, sleep) is of the new weights already.
"""

from __future__ import annotations

from collections.abc import Callable

from workmem.engines.vllm.steps import StaleEpoch, StepPlan


class WeightsWatch:
    """Of one worker. `written`: how often something has written to its weights. On the engine's thread."""

    def __init__(self, written: Callable[[], int]) -> None:
        self._written = written
        self._seen = written()
        self._epoch = 0
        """Of the last step."""
        self._resets = 0
        """Of vLLM's own cache, up to the last step."""
        self.stale: StaleEpoch | None = None
        """Of this step. Nothing of its plan is to be done."""
        self._last: StaleEpoch | None = None

    def begins(self, plan: StepPlan) -> None:
        """A step is about to begin; nothing of it was done."""
        seen = self._written()
        if seen != self._seen and plan.epoch == self._epoch:
            self._last = StaleEpoch(plan.epoch, is_empty=plan.resets != self._resets)
        self._seen, self._epoch, self._resets = seen, plan.epoch, plan.resets
        # Steps may overlap: the scheduler has planned another one before it hears of it.
        self.stale = self._last if self._last is not None and self._last.epoch == plan.epoch else None
