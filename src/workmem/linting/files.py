"""Recordings on disk, line by line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

from workmem.core.errors import ClientError, ConfigError
from workmem.prompt.lint.entries import Entry, read_line

LINE_BYTES_MAX = 256 * 1024 * 1024


class Recorded(NamedTuple):
    """A request, and where it stands."""

    file: str
    line: int
    """Counted from 1."""
    entry: Entry


def read(
    path: Path, on_read: Callable[[int], None] = lambda _: None, on_skip: Callable[[], None] = lambda: None
) -> Generator[Recorded]:
    """The requests of a file, one per line, also where it is compressed (.gz).

    `on_read` hears how many bytes of the file were read since, `on_skip` of each line that holds no prompt. Raises ConfigError with file and line, what is
    wrong there and what to do.
    """
    count = done = 0
    try:
        with path.open("rb") as raw:
            lines = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            while line := lines.readline(LINE_BYTES_MAX):
                count += 1
                if len(line) >= LINE_BYTES_MAX:
                    raise ConfigError(
                        f"{path}:{count}: longer than {LINE_BYTES_MAX >> 20} MiB; one request per line"
                    )
                entry = _entry(path, count, line)
                on_read(raw.tell() - done)
                done = raw.tell()
                if entry is None:
                    on_skip()
                else:
                    yield Recorded(str(path), count, entry)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _entry(path: Path, number: int, line: bytes) -> Entry | None:
    if number == 1 and line[:1] == b"[":
        raise ConfigError(
            f"{path}:1: is one JSON list; one request per line is wanted: jq -c '.[]' {path} > requests.jsonl"
        )
    try:
        return read_line(line)
    except ClientError as error:
        raise ConfigError(f"{path}:{number}: {error}") from error
