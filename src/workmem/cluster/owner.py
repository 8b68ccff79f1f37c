"""A process that gives memory to a pool and does nothing else: `python -m workmem.cluster.owner OPTIONS`.

It says its segment's name, or why there is none, as one line of JSON, and ends with whoever holds its input.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from workmem.core.errors import ConfigError
from workmem.store.tiers.mooncake.link import Link
from workmem.store.tiers.mooncake.options import parse_options

FAILED = 1
MISCONFIGURED = 2


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What it says."""

    segment: str = ""
    problem: str = ""


def main() -> int:
    """Give memory until the input ends."""
    options = parse_options(msgspec.json.decode(sys.argv[1], type=dict[str, Any]))
    try:
        link = Link(options)
    except (ConfigError, OSError) as error:
        _say(Word(problem=str(error)))
        return MISCONFIGURED if isinstance(error, ConfigError) else FAILED
    _say(Word(segment=link.segment_name))
    sys.stdin.buffer.read()
    link.close()
    return 0


def _say(word: Word) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(word) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
