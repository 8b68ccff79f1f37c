"""`workmem store scrub`: read every page of a running store now, rather than when its turn comes."""

from __future__ import annotations

import time
from typing import Annotated

from cyclopts import Parameter

from workmem.cli.options import ConfigFile, Settings
from workmem.cli.store_folder import console_out, disk_errors, progress_bar
from workmem.config import host_socket, load
from workmem.core.errors import ConfigError, IntegrityError
from workmem.core.units import format_bytes, parse_bytes
from workmem.store.host.client import HostStore
from workmem.store.host.place import is_served
from workmem.store.host.upkeep_messages import Scrubbed


def scrub(
    *,
    rate: Annotated[str, Parameter(help="Bytes a second to read at most.")] = "64MiB",
    config: ConfigFile = None,
    sets: Settings = (),
) -> None:
    """Have the host's store read and check every page on its disk. Exit code 1 where one was damaged.

    Damaged pages leave service at once, and are computed again when they are asked for. Requests go first: the
    pass waits while they read. Ctrl-C ends it.
    """
    bytes_per_s = parse_bytes(rate, "--rate")
    if bytes_per_s <= 0:
        raise ConfigError(f"--rate {rate}: a scrub reads something")
    socket = host_socket(load(config, sets=sets).config.store.host.socket)
    if not is_served(socket):
        raise ConfigError(
            f"no store is served at {socket}; `workmem store verify` reads the folder of one that is stopped"
        )
    began = time.monotonic()
    with disk_errors(), HostStore(socket) as store:
        total = int(store.gauges().get("store_ssd_live_bytes", 0))
        done = Scrubbed()
        with progress_bar("scrubbing", total) as bar:
            for now in store.scrub(bytes_per_s):
                bar.read(now.bytes - done.bytes)
                done = now
    took = time.monotonic() - began
    console_out().print(
        f"{done.pages} pages are what was written, {format_bytes(done.bytes)} read in {took:.1f} s"
    )
    if done.damaged or done.unreadable:
        raise IntegrityError(
            f"{done.damaged} pages were damaged and {done.unreadable} could not be read; they are out of service"
        )
