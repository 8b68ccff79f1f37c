"""The steps of a start, said on a terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.status import Status


class Steps:
    """Says what is going on, and how long each step took. See `app.Progress`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._began = time.monotonic()

    def begin(self, step: str) -> None:
        """See `app.Progress.begin`."""
        self._halt()
        self._status = self._console.status(escape(step))
        self._status.start()

    def end(self, result: str) -> None:
        """See `app.Progress.end`."""
        self._halt()
        now = time.monotonic()
        self._console.print(f"  {escape(result)} ({now - self._began:.1f} s)", soft_wrap=True)
        self._began = now

    def note(self, text: str) -> None:
        """See `app.Progress.note`."""
        self._halt()
        self._console.print(f"  {escape(text)}", soft_wrap=True, style="dim")

    def _halt(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *failure: object) -> None:
        self._halt()
