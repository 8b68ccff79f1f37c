"""`workmem cluster up`: this host's part in a pool."""

from __future__ import annotations

import json
import signal
import sys
import threading
from types import FrameType

from rich.console import Console

from workmem import __version__
from workmem.cli.options import ConfigFile, Settings
from workmem.cli.steps import Steps
from workmem.cluster.config import ClusterConfig
from workmem.cluster.hosting import Hosting
from workmem.cluster.view import look
from workmem.config import load
from workmem.core.units import format_bytes, parse_bytes


def up(*, config: ConfigFile = None, sets: Settings = ()) -> None:
    """Start a master, or join `cluster.master`, and give this host's memory to the pool.

    Prints what to set on this host and on others. Stops on Ctrl-C or SIGTERM, after pages have been moved to
    other hosts where there are any.
    """
    settings = load(config, sets=sets).config.cluster
    console = Console(stderr=True, highlight=False)
    console.print(f"workmem {__version__}")
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        stopped.set()

    steps = Steps(console)
    with steps:
        hosting = Hosting(settings, steps.note)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        steps.begin("joining the pool")
        hosting.start()
        try:
            steps.end("joined")
            sys.stdout.write(_advice(settings, hosting))
            sys.stdout.flush()
            console.print("  up; Ctrl-C stops", style="bold")
            hosting.tend(stopped)
        finally:
            steps.begin("moving pages to other hosts")
            hosting.stop()
    console.print("  stopped")


def _advice(settings: ClusterConfig, hosting: Hosting) -> str:
    """TOML for this host, and in comments what others need."""
    master, text = hosting.master_address, json.dumps
    capacity = _capacity(settings, hosting)
    others = [f"cluster.master={master}", "cluster.host=ADDRESS_OF_THAT_HOST"]
    if hosting.admin_urls and "127.0.0.1" not in hosting.admin_urls[0]:
        others.append(f"cluster.admin_urls={','.join(hosting.admin_urls)}")
    return (
        "# workmem.toml of each store on this host:\n"
        "[store.below]\n"
        'tier = "mooncake"\n'
        f"options = {{ master = {text(master)}, host = {text(settings.host)}, capacity = {text(capacity)} }}\n"
        "# capacity is what all hosts give together, as `workmem cluster status` shows it; raise it as hosts join.\n"
        "# On each other host, with its own address in the place of host above:\n"
        f"#   workmem cluster up {' '.join(f'--set {one}' for one in others)}\n"
        f"# Masters answer at {', '.join(hosting.admin_urls)}\n"
    )


def _capacity(settings: ClusterConfig, hosting: Hosting) -> str:
    size = parse_bytes(settings.segment_bytes, "$.cluster.segment_bytes")
    found = look(hosting.admin_urls).pool
    size = max(size, found.capacity_bytes if found else 0)
    return format_bytes(size).replace(" ", "") if size else "16GiB"
