"""Reading a key for encryption at rest from a file. The key is never part of a message, a log or a dump."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from workmem.core.errors import ConfigError

KEY_BYTES = 32
_HEX = re.compile(rb"[0-9A-Fa-f]{64}(\r?\n)?")
_MAKE = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


def read_key(file: str | Path, path: str) -> bytes:
    """The 32 bytes in `file`: raw, or as 64 hex digits with or without a line end.

    Raises ConfigError, starting with the setting's `path`, where the file is missing, not a plain file, owned by
    somebody else, open to group or others, of another size, or plainly no random key.
    """
    try:
        # Not blocking, so that a pipe put there by mistake is refused and not waited for.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no key file {str(file)!r}; {_MAKE}") from None
    except OSError as problem:
        raise ConfigError(f"{path}: key file {str(file)!r} cannot be read: {problem.strerror}") from problem
    try:
        # Of the open file, not of its name: nobody can change what was checked.
        _require_private(os.fstat(descriptor), file, path)
        content = os.read(descriptor, 2 * KEY_BYTES + 3)
    finally:
        os.close(descriptor)
    return _parsed(content, file, path)


def _require_private(status: os.stat_result, file: str | Path, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path}: key file {str(file)!r} is not a plain file; name one that holds the key")
    if status.st_uid not in {os.geteuid(), 0}:
        raise ConfigError(
            f"{path}: key file {str(file)!r} belongs to user {status.st_uid}, who could replace it; "
            "make it yours or root's"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{path}: key file {str(file)!r} has mode {mode:04o}, so others can reach it; "
            f"run: chmod 600 {str(file)!r}"
        )


def _parsed(content: bytes, file: str | Path, path: str) -> bytes:
    if _HEX.fullmatch(content):
        key = bytes.fromhex(content.decode("ascii"))
    elif len(content) == KEY_BYTES:
        key = content
    else:
        size = f"{len(content)} bytes" if len(content) <= 2 * KEY_BYTES + 2 else "more than 66 bytes"
        raise ConfigError(
            f"{path}: key file {str(file)!r} holds {size}, which are neither 64 hex digits nor 32 raw bytes; {_MAKE}"
        )
    # Neither happens to a random key in the life of the universe.
    if len(set(key)) < 4:
        raise ConfigError(f"{path}: key file {str(file)!r} holds hardly any different bytes; {_MAKE}")
    if key is content and all(0x20 <= byte < 0x7F for byte in key):
        raise ConfigError(
            f"{path}: key file {str(file)!r} holds 32 typed characters, a passphrase and no key; {_MAKE}"
        )
    return key
