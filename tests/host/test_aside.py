"""A saver runs on whatever core is idle, and never instead of the engine."""

from __future__ import annotations

import os
import threading

from workmem.store.aside import step_aside
from workmem.testing.waiting import wait_until


def test_who_steps_aside_may_run_on_all_cores_of_its_process_and_waits_for_its_others():
    found: list[tuple[set[int], int]] = []

    def bound() -> None:
        # As an engine's first thread, from which the others are started.
        os.sched_setaffinity(0, {min(every)})
        thread = threading.Thread(target=aside)
        thread.start()
        thread.join()

    def aside() -> None:
        before = os.sched_getaffinity(0)
        step_aside()
        assert before == {min(every)}
        found.append((os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    every = os.sched_getaffinity(0)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    engine = threading.Thread(target=bound)
    engine.start()
    engine.join()
    ((cores, nice),) = found
    assert cores == every
    assert nice == max(mine, 10)
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_both_savers_step_aside(host):
    host.serve()
    client = host.client()
    mine = os.getpriority(os.PRIO_PROCESS, 0)

    def are_aside() -> bool:
        savers = {thread.name: thread.native_id for thread in threading.enumerate()}
        return all(
            os.getpriority(os.PRIO_PROCESS, savers[name]) == max(mine, 10)
            for name in ("workmem-save", "workmem-host-save")
        )

    wait_until(are_aside, 5)
    assert client.dram_capacity_bytes() > 0
