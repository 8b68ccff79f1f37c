"""Reading what an answer says about itself as it passes through, without changing or holding it."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from workmem.core.outcomes import COMPUTED, TierName

CACHED = "cached"
"""Source of prompt tokens that another server says it did not compute."""
UNREPORTED = "unreported"
"""Source of prompt tokens where the other server does not say which of them were cached."""

_HELD_BYTES_MAX = 4 * 1024 * 1024
_ID_CHARS_MAX = 128
# Only such events are decoded: the others carry text alone, and there is one per token.
_TELLING = re.compile(rb'"(?:usage|finish_reason|stop_reason|error|kv_transfer_params)"\s*:\s*[^n\s]')
_TOKEN = re.compile(rb'"(?:delta|text)"\s*:\s*["{]')
# The reasons of all dialects in the words of chat completions, so that labels stay few.
_REASONS = {
    "stop": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "completed": "stop",
    "length": "length",
    "max_tokens": "length",
    "incomplete": "length",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "refusal": "content_filter",
}


class PeekedUsage(msgspec.Struct, frozen=True):
    """Token counts of a passing answer. `by_source` sums to `prompt_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    by_source: dict[str, int]


def reused_tokens(usage: PeekedUsage) -> int | None:
    """Prompt tokens that the other server says it did not compute; None where it does not say."""
    if UNREPORTED in usage.by_source:
        return None
    return sum(count for source, count in usage.by_source.items() if source != COMPUTED)


class UsagePeek:
    """`feed` it the bytes that pass, then `close` it. Answers too large to hold say nothing."""

    def __init__(self, content_type: str) -> None:
        self.is_stream = content_type.startswith("text/event-stream")
        self.id = ""
        """Of the answer; empty where it names none."""
        self.has_token = False
        """Whether a streamed token has passed."""
        self.has_failed = False
        """Whether the answer is an error, or ended with one."""
        self.waited_s: float | None = None
        """How long it says that it waited for what another server computed."""
        self._held = bytearray()
        self._raw: dict[str, Any] = {}
        self._reasons: dict[Any, str] = {}
        self._is_blind = not self.is_stream and not content_type.startswith("application/json")

    @property
    def reasons(self) -> list[str]:
        """Why its choices finished, one each; empty where nothing was generated."""
        return list(self._reasons.values())

    @property
    def usage(self) -> PeekedUsage | None:
        """The counts, once everything has passed."""
        return _counts(self._raw)

    def feed(self, data: bytes) -> None:
        """Look at `data`."""
        if self._is_blind:
            return
        self._held += data
        if self.is_stream:
            *lines, rest = bytes(self._held).split(b"\n")
            self._held = bytearray(rest)
            for line in lines:
                self._see_line(line)
        if len(self._held) > _HELD_BYTES_MAX:
            self._is_blind = True
            self._held.clear()

    def close(self) -> None:
        """Everything has passed."""
        if self.is_stream:
            self._see_line(bytes(self._held))
        elif not self._is_blind:
            self._see(bytes(self._held))

    def _see_line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        self.has_token = self.has_token or _TOKEN.search(line) is not None
        if not self.id or _TELLING.search(line):
            self._see(line[5:])

    def _see(self, data: bytes) -> None:
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        # Chunks of chats tell at the top; events of `/v1/responses` and `/v1/messages` one level down.
        for part in (value, _field(value, "response"), _field(value, "message")):
            name = _field(part, "id")
            if not self.id and isinstance(name, str) and len(name) <= _ID_CHARS_MAX:
                self.id = name
            if isinstance(usage := _field(part, "usage"), dict):
                self._raw.update(usage)
            self.has_failed = self.has_failed or bool(_field(part, "error"))
            handoff = _field(_field(_field(part, "kv_transfer_params"), "workmem"), "handoff")
            if isinstance(waited := _field(handoff, "waited_s"), int | float):
                self.waited_s = float(waited)
            self._see_reasons(part)

    def _see_reasons(self, part: Any) -> None:
        found: dict[Any, Any] = {}
        if isinstance(choices := _field(part, "choices"), list):
            for number, choice in enumerate(choices):
                index = _field(choice, "index")
                found[index if isinstance(index, int) else number] = _field(choice, "finish_reason")
        elif _field(part, "object") == "response":
            found[0] = _field(part, "status")
        else:
            found[0] = _field(part, "stop_reason") or _field(_field(part, "delta"), "stop_reason")
        for index, reason in found.items():
            if isinstance(reason, str) and reason not in ("in_progress", "queued"):
                self._reasons[index] = _REASONS.get(reason, "other")


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _counts(raw: dict[str, Any]) -> PeekedUsage | None:
    if not raw:
        return None
    prompt = _count(raw, "prompt_tokens") or _count(raw, "input_tokens")
    completion = _count(raw, "completion_tokens") or _count(raw, "output_tokens")
    cached = _field(raw.get("prompt_tokens_details") or raw.get("input_tokens_details"), "cached_tokens")
    if cached is None and "cache_read_input_tokens" in raw:
        # In this dialect `input_tokens` are those that no cache had a part in.
        cached = _count(raw, "cache_read_input_tokens")
        prompt += cached + _count(raw, "cache_creation_input_tokens")
    by_source = {UNREPORTED: prompt}
    if isinstance(cached, int):
        cached = min(max(cached, 0), prompt)
        by_source = {CACHED: cached, COMPUTED: prompt - cached}
    if isinstance(tiers := _field(raw.get("workmem"), "tokens_by_source"), dict):
        known = {name: _count(tiers, name) for name in (*TierName, COMPUTED)}
        if sum(known.values()) == prompt:
            by_source = known
    return PeekedUsage(prompt, completion, {name: count for name, count in by_source.items() if count})


def _count(raw: Any, name: str) -> int:
    value = _field(raw, name)
    return value if isinstance(value, int) and value > 0 else 0
