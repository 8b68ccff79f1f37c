"""What the commands of `workmem store` share: the folder they mean, and how they show what they do."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from workmem.config import cache_dir, load
from workmem.core.errors import TransferError
from workmem.store.codecs.sealing import Keyring
from workmem.store.codecs.settings import page_keyring

FolderPath = Annotated[Path | None, Parameter(help="The store's folder; the configured one if left out.")]


def folder_of(path: Path | None, config: Path | None, sets: tuple[str, ...]) -> Path:
    """`path`, or the folder of the configured store."""
    if path is not None:
        return path
    configured = load(config, sets=sets).config.store.ssd.path
    return Path(configured).expanduser() if configured else cache_dir() / "store"


def keyring_of(config: Path | None, sets: tuple[str, ...]) -> Keyring | None:
    """The configured keys, for a folder named on the command line as for the configured one."""
    return page_keyring(load(config, sets=sets).config.store.ssd)


@contextmanager
def disk_errors() -> Generator[None]:
    """What the disk did not do is an error with one line."""
    try:
        yield
    except OSError as error:
        raise TransferError(f"the disk failed: {error}") from error


class Bar:
    """A progress bar that counts bytes read, and then segments."""

    def __init__(self, progress: Progress, name: str, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=total)

    def read(self, count: int) -> None:
        """So many bytes more are read."""
        self._progress.advance(self._task, count)

    def segment(self, done: int, total: int) -> None:
        """So many segments of so many are written again."""
        self._progress.update(self._task, description=f"segment {done} of {total}")


@contextmanager
def progress_bar(name: str, total: int | None = None) -> Generator[Bar]:
    """A bar on stderr, where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        yield Bar(progress, name, total)


def console_out() -> Console:
    """For results: as wide as the terminal, or fixed."""
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)
