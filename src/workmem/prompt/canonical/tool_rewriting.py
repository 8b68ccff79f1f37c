"""Rewriting tools. Clients send the same ones again and again: what was made of one is remembered by its bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

_REMEMBERED = 2048
_REMEMBERED_BYTES_MAX = 16 * 1024
"""A longer definition is rewritten each time, so that the memory of all of them stays within 64 MiB."""

Rewrite = Callable[[dict[str, Any]], dict[str, Any]]


def rewriter(rewrite: Rewrite) -> Callable[[dict[str, Any]], list[str]]:
    """What rewrites the tools of a body with `rewrite`, and returns the paths of those that it changed.

    `rewrite` depends on nothing but the tool, and changes nothing in it. So do the bytes kept here: they are those
    of its result, whoever sent the tool first.
    """

    def from_bytes(tool: bytes) -> bytes | None:
        rewritten = msgspec.json.encode(rewrite(msgspec.json.decode(tool)))
        return None if rewritten == tool else rewritten

    remembered = lru_cache(_REMEMBERED)(from_bytes)

    def rewrite_all(body: dict[str, Any]) -> list[str]:
        tools = body.get("tools")
        if not isinstance(tools, list):
            return []
        changed: list[str] = []
        for number, tool in enumerate(tools):
            if not isinstance(tool, dict):
                continue
            try:
                now = msgspec.json.encode(tool)
            except RecursionError:
                continue
            rewritten = remembered(now) if len(now) <= _REMEMBERED_BYTES_MAX else from_bytes(now)
            if rewritten is not None:
                tools[number] = msgspec.json.decode(rewritten)
                changed.append(f"tools[{number}]")
        return changed

    return rewrite_all
