"""`workmem serve`: start everything, saying each step, and serve until told to stop."""

from __future__ import annotations

import logging
import signal
import time
from contextlib import suppress

from rich.console import Console

from workmem import __version__
from workmem.cli.options import ConfigFile, Host, Port, Settings
from workmem.cli.steps import Steps
from workmem.config import cache_dir, load


def serve(*, config: ConfigFile = None, sets: Settings = (), host: Host = None, port: Port = None) -> None:
    """Serve an OpenAI-compatible endpoint in front of the embedded engine, or of other servers.

    Stops on Ctrl-C or SIGTERM: running requests get `server.shutdown_s` to finish, then what was
    computed is brought to the ssd.
    """
    started = time.monotonic()
    console = Console(stderr=True, highlight=False)
    short = {"server.host": host, "server.port": port}
    loaded = load(
        config, sets=[*sets, *(f"{key}={value}" for key, value in short.items() if value is not None)]
    )
    for name, meant in loaded.unread.items():
        console.print(f"  {name} is not read; for this setting write {meant}", soft_wrap=True)
    settings = loaded.config
    # Loaded here, so that a wrong setting is told at once and not after seconds of imports.
    from workmem.app import open_app  # noqa: PLC0415
    from workmem.gateway.serve import listen  # noqa: PLC0415
    from workmem.gateway.serve import serve as serve_http  # noqa: PLC0415

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # A port that is taken is better told now than after the model has been loaded.
    listen(settings.server).close()
    console.print(f"workmem {__version__}")
    steps = Steps(console)

    def listening(url: str) -> None:
        seconds = time.monotonic() - started
        console.print(
            f"  listening on {url}/v1 after {seconds:.1f} s; Ctrl-C stops", style="bold", soft_wrap=True
        )

    def stopping(requests: int) -> None:
        what = "1 request" if requests == 1 else f"{requests} requests"
        console.print(
            f"  stopping: {what} may take {settings.server.shutdown_s} s more (server.shutdown_s); "
            "Ctrl-C again ends what runs now",
            soft_wrap=True,
        )

    # By default SIGTERM ends a process where it stands, and what waits for the ssd would be lost.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with steps, open_app(settings, cache_dir=cache_dir(), progress=steps) as app:
        # The server raises again what stopped it; being told to stop is how it is meant to end.
        with suppress(KeyboardInterrupt):
            serve_http(app, settings.server, listening, stopping)
        steps.begin("bringing what was computed to the ssd")
    console.print("  stopped")
