"""Threads that work behind an engine, and not in its way."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_NICE = 10
"""Against an engine's thread that computes without a pause: a tenth of a core. Where a core is idle, all of it."""


def step_aside() -> None:
    """Let this thread run where its process's others leave room, on any core that one of them may use.

    An engine on CPUs binds a thread to each core, and who is started by the first of them inherits its core: the one
    that all others wait for at the end of every layer.
    """
    cores: set[int] = set()
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            cores |= os.sched_getaffinity(int(task.name))
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.sched_setaffinity(thread, cores)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)
