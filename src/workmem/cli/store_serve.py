"""`workmem store serve`: one store for all processes of this host."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

from rich.console import Console

from workmem import __version__
from workmem.app import open_host
from workmem.cli.options import ConfigFile, Settings
from workmem.cli.steps import Steps
from workmem.config import cache_dir, host_socket, load
from workmem.core.events import BlockQuarantined, BoundReached, Event, TierStateChanged

log = logging.getLogger("workmem.store")

_SIGNAL_S = 0.25


def serve(*, config: ConfigFile = None, sets: Settings = ()) -> None:
    """Serve one store to the processes of this host, over a Unix socket and shared memory.

    Engines attach with `store.host.attach = "auto"` or `"require"`. Stops on Ctrl-C or SIGTERM, after
    what is in memory has been brought to the ssd; clients go on with misses and come back by themselves.
    """
    settings = load(config, sets=sets).config.store
    console = Console(stderr=True, highlight=False)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console.print(f"workmem {__version__}")
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    steps = Steps(console)
    with steps, open_host(settings, cache_dir=cache_dir(), sink=_log, progress=steps):
        path = host_socket(settings.host.socket)
        console.print(f"  listening on {path}; Ctrl-C stops", style="bold", soft_wrap=True)
        # A signal may reach another thread; its handler runs when this one wakes up next.
        while not stopped.wait(_SIGNAL_S):
            pass
        steps.begin("bringing what is in memory to the ssd")
    console.print("  stopped")


def _log(event: Event) -> None:
    """Say what whoever runs the store can act on."""
    if isinstance(event, BoundReached | TierStateChanged | BlockQuarantined):
        log.warning("%s", event)
