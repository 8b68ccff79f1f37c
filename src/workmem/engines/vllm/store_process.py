"""The host's store, started where none is served: it outlives the engine, and so does what is in it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from workmem.store.host.place import is_served

log = logging.getLogger(__name__)

_PAUSE_S = 0.1


def ensure_store(socket: Path, settings: Mapping[str, str], log_file: Path, wait_s: float) -> str:
    """Have a store served at `socket`. Returns why there is none; empty when there is one.

    `settings`: dotted paths and values for `workmem store serve`. What it prints goes to `log_file`. Two engines that
    start at once may both try: the second store finds the place taken and ends.
    """
    if is_served(socket):
        return ""
    command = [sys.executable, "-m", "workmem", "store", "serve", "--set", f"store.host.socket={socket}"]
    for path, value in settings.items():
        command += ["--set", f"{path}={value}"]
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        # In a session of its own: a Ctrl-C for the engine is not for the store.
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    with contextlib.suppress(OSError):
        # The engine's threads are bound to cores; the store must be able to run beside them.
        os.sched_setaffinity(process.pid, range(os.cpu_count() or 1))
    until = time.monotonic() + wait_s
    while not is_served(socket):
        code = process.poll()
        if code is not None and not is_served(socket):
            return f"workmem store serve ended with {code}; see {log_file}"
        if time.monotonic() > until:
            return f"workmem store serve did not listen within {wait_s:g} s; see {log_file}"
        time.sleep(_PAUSE_S)
    log.info("workmem: started the host's store (process %d) at %s", process.pid, socket)
    return ""
