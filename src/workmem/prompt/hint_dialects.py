"""Hints as other systems' clients send them, read as our own.

Dynamo's `nvext`, vLLM's agent hints, lifetimes in the OpenAI and Anthropic APIs and for LMCache. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from workmem.core.hints import Kind
from workmem.prompt.hints import ACTIONS_MAX, Hints, read_action, read_envelope, read_hints

SESSION_FINAL = "x-dynamo-session-final"
"""Header: no turn of this session follows."""
_DURATION = re.compile(r"^(\d{1,9})([smhd]?)$")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_EDITS = {"offload": Kind.DEMOTE, "evict": Kind.DEMOTE, "prefetch": Kind.PREFETCH}
_MARKED_MAX = 256
"""Parts that are looked at for a lifetime."""


def hints_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> Hints:
    """All hints of a request. `headers` has lower-case names. Those in our own words come first."""
    params = body.get("kv_transfer_params")
    hints = read_hints(body.get("kv_hints"), params if isinstance(params, dict) else None, None)
    own = body.get("workmem")
    if isinstance(own, dict) and "actions" in own:
        read_envelope(hints, "workmem", own)
    for place, kind, payload in _foreign(headers, body):
        if len(hints.actions) + len(hints.outcomes) >= ACTIONS_MAX:
            break
        read_action(hints, place, {"action_type": kind.value, "payload": payload})
    if not hints.priority:
        hints.priority = _priority(body)
    return hints


def _foreign(
    headers: Mapping[str, str], body: Mapping[str, Any]
) -> Iterator[tuple[str, Kind, dict[str, Any]]]:
    for place, lifetime in _lifetimes(body):
        seconds = _seconds(lifetime)
        if seconds is not None:
            yield place, (Kind.RETAIN if seconds else Kind.DEMOTE), ({"ttl_s": seconds} if seconds else {})
    edits = _object(_object(body.get("agent_hint")).get("context_management")).get("edits")
    for index, edit in enumerate(edits[:ACTIONS_MAX] if isinstance(edits, list) else ()):
        kind = _EDITS.get(str(_object(edit).get("type")))
        if kind is not None:
            yield f"agent_hint.context_management.edits[{index}]", kind, {}
    if headers.get(SESSION_FINAL, "").strip().lower() in ("1", "true"):
        yield SESSION_FINAL, Kind.DEMOTE, {}


def _lifetimes(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Where a client says how long its context is wanted, and what it says."""
    yield "agent_hint.cache_control.ttl", _ttl_of(_object(body.get("agent_hint")))
    yield "nvext.cache_control.ttl", _ttl_of(_object(body.get("nvext")))
    context = _object(_object(body.get("vllm_xargs")).get("agentic_context"))
    yield "vllm_xargs.agentic_context.kv_retention_ttl_seconds", context.get("kv_retention_ttl_seconds")
    params = _object(body.get("kv_transfer_params"))
    yield "kv_transfer_params.lmcache_retention_ttl_sec", params.get("lmcache_retention_ttl_sec")
    if body.get("prompt_cache_retention") != "in_memory":
        yield "prompt_cache_retention", body.get("prompt_cache_retention")
    yield "prompt_cache_options.ttl", _object(body.get("prompt_cache_options")).get("ttl")
    # Marks of Anthropic's API stand on parts, and the longest is that of the prefix they share.
    marked = [(where, seconds) for where, ttl in _marks(body) if (seconds := _seconds(ttl))]
    if marked:
        yield max(marked, key=lambda one: one[1])


def _marks(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "cache_control.ttl", _ttl_of(body)
    seen = 0
    for name in ("system", "tools", "messages"):
        items = body.get(name)
        for index, item in enumerate(items if isinstance(items, list) else ()):
            parts = [(f"{name}[{index}]", item)]
            content = _object(item).get("content")
            if isinstance(content, list):
                parts += [(f"{name}[{index}].content[{at}]", part) for at, part in enumerate(content)]
            for path, part in parts:
                seen += 1
                if seen > _MARKED_MAX:
                    return
                yield f"{path}.cache_control.ttl", _ttl_of(_object(part))


def _ttl_of(holder: Mapping[str, Any]) -> Any:
    return _object(holder.get("cache_control")).get("ttl")


def _seconds(said: Any) -> float | None:
    """`30`, `"30m"`, `"24h"`; None for anything else."""
    if isinstance(said, int | float) and not isinstance(said, bool):
        return float(said) if 0 <= said < float("inf") else None
    found = _DURATION.match(said) if isinstance(said, str) else None
    return float(found[1]) * _UNITS[found[2]] if found else None


def _priority(body: Mapping[str, Any]) -> int:
    """Higher is admitted earlier, as in all of these dialects."""
    hinted = _object(_object(body.get("nvext")).get("agent_hints"))
    context = _object(_object(body.get("vllm_xargs")).get("agentic_context"))
    for said in (hinted.get("strict_priority"), hinted.get("priority"), context.get("priority")):
        if isinstance(said, int) and not isinstance(said, bool):
            return max(-100, min(100, said))
    return 0


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
