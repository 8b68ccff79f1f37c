"""The instructions of a body: what stands in front of the history, and what changing values in it are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from workmem.prompt.dialects.places import Dialect, TextPlace


def instructions(body: Mapping[str, Any], dialect: Dialect) -> Iterator[TextPlace]:
    """The system's texts up to the first of anybody else."""
    for place in dialect.texts(body):
        if place.role != "system":
            return
        yield place
