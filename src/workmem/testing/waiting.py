"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0, *, step_s: float = 0.01) -> None:
    """Return once `condition` holds. Raises TimeoutError when it does not in time."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {timeout_s} s: {condition}")
        time.sleep(step_s)
