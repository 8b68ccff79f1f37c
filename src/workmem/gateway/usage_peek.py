"""Reading `usage` out of an answer that passes through, without changing or holding it."""

from __future__ import annotations

from typing import Any

import msgspec

from workmem.core.outcomes import COMPUTED, TierName

_HELD_BYTES_MAX = 4 * 1024 * 1024


class PeekedUsage(msgspec.Struct, frozen=True):
    """Token counts of a passing answer. `by_source` sums to `prompt_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    by_source: dict[str, int]


class UsagePeek:
    """`feed` it the bytes that pass; `usage` is what they said. Answers too large to hold say nothing."""

    def __init__(self, content_type: str) -> None:
        self._is_stream = content_type.startswith("text/event-stream")
        self._held = bytearray()
        self._raw: Any = None
        self._is_blind = not self._is_stream and not content_type.startswith("application/json")

    def feed(self, data: bytes) -> None:
        """Look at `data`."""
        if self._is_blind:
            return
        self._held += data
        if self._is_stream:
            *lines, rest = bytes(self._held).split(b"\n")
            self._held = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:") and b'"usage"' in line:
                    self._raw = _usage_in(line[5:]) or self._raw
        if len(self._held) > _HELD_BYTES_MAX:
            self._is_blind = True
            self._held.clear()

    def usage(self) -> PeekedUsage | None:
        """The counts, once everything has passed."""
        if not self._is_stream and not self._is_blind:
            self._raw = _usage_in(bytes(self._held))
        return _counts(self._raw)


def _usage_in(data: bytes) -> Any:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value.get("usage") if isinstance(value, dict) else None


def _counts(raw: Any) -> PeekedUsage | None:
    if not isinstance(raw, dict):
        return None
    prompt = _count(raw, "prompt_tokens") or _count(raw, "input_tokens")
    completion = _count(raw, "completion_tokens") or _count(raw, "output_tokens")
    details = raw.get("prompt_tokens_details") or raw.get("input_tokens_details")
    cached = min(_count(details, "cached_tokens"), prompt)
    by_source = {"cached": cached, COMPUTED: prompt - cached}
    extension = raw.get("workmem")
    if isinstance(extension, dict) and isinstance(tiers := extension.get("tokens_by_source"), dict):
        known = {name: _count(tiers, name) for name in (*TierName, COMPUTED)}
        if sum(known.values()) == prompt:
            by_source = known
    return PeekedUsage(prompt, completion, {name: count for name, count in by_source.items() if count})


def _count(raw: Any, name: str) -> int:
    value = raw.get(name) if isinstance(raw, dict) else None
    return value if isinstance(value, int) and value > 0 else 0
