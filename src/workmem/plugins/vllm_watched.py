# pyright: reportMissingImports=false, reportUnknownParameterType=false
"""What vLLM does to its workers that no hook tells: it writes to their weights, and takes their memory away."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from vllm.v1.worker.worker_base import WorkerBase

MODEL_WRITERS = ("load_weights",)
"""Of a model: whatever comes in the form of a checkpoint, from files or from whoever trains."""
WORKER_WRITERS = ("reload_weights", "update_weights", "reset_weights")
"""Of a worker: also what is written to the model's tensors as they are."""
SLEEPERS = ("sleep", "discard")
"""Of a worker: the memory of its blocks is gone afterwards."""


class WritesCounted:
    """Counts calls of the methods through which a worker's weights are written to, from now on."""

    def __init__(self, worker: Any) -> None:
        self._count = 0
        for owner, names in ((worker.get_model(), MODEL_WRITERS), (worker, WORKER_WRITERS)):
            for name in names:
                around(owner, name, self._more)

    def __call__(self) -> int:
        """Twice the calls so far."""
        return self._count

    def _more(self) -> None:
        self._count += 1


def around(owner: Any, name: str, act: Callable[[], object]) -> None:
    """Have `act` called before and behind each call of a method of one object, whichever way it ends."""
    whole = getattr(owner, name, None)
    if whole is None:
        return

    @functools.wraps(whole)
    def called(*given: Any, **named: Any) -> Any:
        act()
        try:
            return whole(*given, **named)
        finally:
            act()

    setattr(owner, name, called)


def worker_above() -> Any:
    """The worker that is just making its KV tensors known: no hook is given it. Raises LookupError where there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, WorkerBase):
            return found
        frame = frame.f_back
    raise LookupError("no worker of vLLM's is above: whether its weights change cannot be seen")
