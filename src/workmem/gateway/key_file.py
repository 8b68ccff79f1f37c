"""The key we send to others, out of a file."""

from __future__ import annotations

from pathlib import Path

from workmem.core.errors import ConfigError


def key_to_send(path: str | Path, setting: str) -> str:
    """The first line of the file `path` that is not empty.

    Raises ConfigError, starting with `setting`, where the file cannot be read, holds no key, or one that
    an HTTP header cannot carry.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: cannot read {str(path)!r}: {error}") from error
    key = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if not key:
        raise ConfigError(f"{setting}: {str(path)!r} is empty")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{setting}: the key in {str(path)!r} has characters that a header cannot carry")
    return key
