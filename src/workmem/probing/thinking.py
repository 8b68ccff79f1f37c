"""Does the template leave earlier thinking out of the history."""

from __future__ import annotations

from typing import Any

from workmem.probing.asks import MessagesApi
from workmem.probing.findings import Finding, ok, unknown, warn
from workmem.probing.probe import Probe
from workmem.probing.server import Refused

_CHECK = "thinking in history"


class _Untold(Exception):
    """An answer without a count."""


def thinking(probe: Probe) -> list[Finding]:
    """Whether thinking that is sent back stays in the prompt, also behind the user's next message."""
    if isinstance(probe.api, MessagesApi):
        return [unknown(_CHECK, "thinking is signed in this API: nothing can be made up to send back")]
    system = probe.text("thinking", 120)
    thought = probe.text("thought", 80)
    call = {
        "id": "call_0001",
        "type": "function",
        "function": {"name": "look", "arguments": "{}"},
    }
    user = {"role": "user", "content": "Is it raining?"}
    result = {"role": "tool", "tool_call_id": "call_0001", "content": "It rains."}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    answered: list[dict[str, Any]] = [
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "Sure?"},
    ]
    try:
        inside = _tokens(probe, system, [user, calling | _thought(thought), result])
        plain = _tokens(probe, system, [user, calling, result])
        behind = _tokens(probe, system, [user, calling | _thought(thought), result, *answered])
        bare = _tokens(probe, system, [user, calling, result, *answered])
        inline = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\nIt rains."}
        tagged = _tokens(probe, system, [user, inline, answered[1]])
        untagged = _tokens(probe, system, [user, answered[0], answered[1]])
    except Refused as refused:
        return [unknown(_CHECK, f"it takes no thinking or no calls in a history: {refused}")]
    except _Untold:
        return [unknown(_CHECK, "the server does not say how many tokens a prompt has")]
    return [_finding(probe, inside - plain, behind - bare, tagged - untagged)]


def _finding(probe: Probe, inside: int, behind: int, tagged: int) -> Finding:
    seen = f"of thinking sent back, {inside} tokens stay while tools are called, {behind} behind the next message"
    if inside > 8 and behind <= inside // 2:
        return warn(
            _CHECK,
            f"template_strips_thinking: {seen}",
            f"at each new message of the user the prefix ends where the thinking stood: {inside} tokens and all behind "
            "them are lost; send no thinking back, or use a template that keeps it",
        )
    if inside > 8:
        return ok(_CHECK, f"it stays: {seen}")
    if tagged <= 8:
        return warn(
            _CHECK,
            f"template_strips_thinking: {tagged} tokens stay of a <think> part of an earlier answer",
            "an answer that had thinking is another text when it comes back: its tokens are computed again",
        )
    if probe.has_thought:
        return warn(
            _CHECK,
            f"the model thinks, and {inside} tokens stay of thinking sent back as reasoning_content",
            "each answer is another text when it comes back: its tokens are computed again in the next round",
        )
    return ok(
        _CHECK, f"the model does not think, and nothing is left out ({tagged} tokens stay of a <think> part)"
    )


def _thought(text: str) -> dict[str, Any]:
    return {"reasoning_content": text}


def _tokens(probe: Probe, system: str, messages: list[dict[str, Any]]) -> int:
    tokens = probe.ask(system, messages).prompt_tokens
    if tokens is None:
        raise _Untold
    return tokens
