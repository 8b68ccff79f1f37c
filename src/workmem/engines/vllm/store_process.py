"""The host's store, started where none is served: it outlives the engine, and so does what is in it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from workmem.store.host.place import is_served

log = logging.getLogger("vllm.workmem")

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
        process = _start(command, output)
    with contextlib.suppress(OSError):
        # The engine's threads are bound to cores; the store must be able to run beside them.
        os.sched_setaffinity(process, range(os.cpu_count() or 1))
    until = time.monotonic() + wait_s
    while not is_served(socket):
        if not _is_running(process) and not is_served(socket):
            return f"workmem store serve ended: {_last_line(log_file)}; see {log_file}"
        if time.monotonic() > until:
            return f"workmem store serve did not listen within {wait_s:g} s; see {log_file}"
        time.sleep(_PAUSE_S)
    log.info("workmem: started the host's store (process %d) at %s", process, socket)
    return ""


def _start(command: Sequence[str], output: BinaryIO) -> int:
    """Start a process that is nobody's child: at its end vLLM kills all that its processes have started. Its number."""
    # In a session of its own: a Ctrl-C for the engine is not for the store. The shell ends at once.
    shell = subprocess.run(  # noqa: S603 - our own command
        ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=output,
        start_new_session=True,
        check=True,
    )
    return int(shell.stdout)


def _is_running(process: int) -> bool:
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # One that ended and that nobody has asked about: in a container perhaps nobody ever does.
    return fields.rpartition(")")[2].split()[0] not in ("Z", "X")


def _last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1].strip().removeprefix("workmem: ") if lines else "it said nothing"
