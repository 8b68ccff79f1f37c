"""How loads ended, as vLLM wants to hear it. There from the start of a worker to its end, whatever else is not.

What was promised is computed with unless somebody says that it did not come: silence would be a wrong answer.
"""

from __future__ import annotations

import threading

from workmem.engines.vllm.steps import Loaded, Promise, StepPlan, StepReport


class LoadOutcomes:
    """Each load ends once. Told by the engine's thread and by the one that loads aside."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._aside: set[str] = set()
        """Requests whose loads go on behind the engine: those say themselves how they end."""
        self._spoiled: dict[str, str] = {}
        """Of those: what they bring is not wanted any more, and why."""
        self._ended: dict[str, Loaded] = {}
        self._arrived: dict[str, tuple[int, ...]] = {}
        self._failed: set[int] = set()

    def goes_aside(self, op: Promise) -> None:
        """A load was handed to the thread that loads aside."""
        with self._lock:
            self._aside.add(op.request)

    def end(self, op: Promise, pages: int, why_short: str) -> None:
        """`pages` of a load, from the first on, are in place."""
        with self._lock:
            self._aside.discard(op.request)
            spoiled = self._spoiled.pop(op.request, "")
            if spoiled:
                pages, why_short = 0, spoiled
            self._ended[op.request] = Loaded(op.request, pages, why_short)
            self._failed.update(op.blocks[pages:])
            if op.is_async:
                self._arrived[op.request] = op.blocks
                self._lock.notify_all()

    def spoil(self, why: str) -> None:
        """What was loaded aside and is not told yet, and what is still on its way, counts as not there."""
        with self._lock:
            self._spoiled.update(dict.fromkeys(self._aside, why))
            for request, blocks in self._arrived.items():
                self._ended[request] = Loaded(request, 0, why)
                self._failed.update(blocks)

    def fail(self, plan: StepPlan, why: str) -> None:
        """Nobody loads what `plan` promises, but for what has ended or goes on aside."""
        for op in (*plan.broken, *plan.loads):
            with self._lock:
                is_seen = op.request in self._ended or op.request in self._aside
            if not is_seen:
                self.end(op, 0, why)

    def arrived(self, wait_s: float = 0.0, *, anyway: bool = False) -> set[str]:
        """Requests that waited aside whose loads have ended, since the last call.

        Where there are none but some are on their way, or `anyway`, waits up to `wait_s` for the first.
        """
        with self._lock:
            if (self._aside or anyway) and not self._arrived:
                self._lock.wait(wait_s)
            found, self._arrived = set(self._arrived), {}
        return found

    def failed_blocks(self) -> set[int]:
        """Blocks that hold nothing of use though it was promised, since the last call."""
        with self._lock:
            found, self._failed = self._failed, set()
        return found

    def report(self) -> StepReport | None:
        """How loads ended, since the last call."""
        with self._lock:
            found, self._ended = self._ended, {}
        return StepReport(loads=found) if found else None
