"""A conversation of three rounds, as an agent has it: does each find the one before."""

from __future__ import annotations

from typing import Any

from workmem.probing.asks import Reading
from workmem.probing.findings import Finding, fail, ok, unknown, warn
from workmem.probing.probe import GENERATED_MAX, Probe

_QUESTIONS = ("Count slowly from one to sixty in words.", "Go on counting.", "And further.")
_LOOSE_TOKENS = 8
"""What templates write anew behind a prompt's last message."""


def rounds(probe: Probe) -> list[Finding]:
    """Whether rounds 2 and 3 hit, and whether what was generated is found as it was generated."""
    system = probe.text("rounds", min(probe.long_tokens // 2, max(300, 3 * probe.step)))
    wanted = min(GENERATED_MAX, max(40, probe.step + 16))
    messages: list[dict[str, Any]] = []
    readings: list[Reading] = []
    for question in _QUESTIONS:
        messages.append({"role": "user", "content": question})
        reading = probe.ask(system, messages, max_tokens=wanted)
        readings.append(reading)
        messages.append(_echo(reading))
    if any(reading.cached is None or reading.prompt_tokens is None for reading in readings):
        return [unknown("rounds", "the server does not say what was cached")]
    return [_growth(probe, readings), _output(probe, readings)]


def _echo(reading: Reading) -> dict[str, Any]:
    """The answer as clients send it back."""
    message: dict[str, Any] = {"role": "assistant", "content": reading.text or "Yes."}
    return message | ({"reasoning_content": reading.thinking} if reading.thinking else {})


def _growth(probe: Probe, readings: list[Reading]) -> Finding:
    one, two, three = readings
    seen = (
        f"round 2: {two.cached} of {two.prompt_tokens} cached, round 3: {three.cached} of {three.prompt_tokens}; "
        f"the prompts before had {one.prompt_tokens} and {two.prompt_tokens}"
    )
    pairs = [(two.cached or 0, one.prompt_tokens or 0), (three.cached or 0, two.prompt_tokens or 0)]
    if any(cached <= probe.head for cached, _ in pairs):
        return fail(
            "rounds",
            seen,
            "a conversation that only grows is computed anew: look whether the template changes what stands "
            "earlier, and whether rounds reach the same server",
        )
    if any(cached < before - probe.step - _LOOSE_TOKENS for cached, before in pairs):
        return warn(
            "rounds",
            seen,
            "part of the round before is lost: what the template writes of earlier messages changes when a new one comes",
        )
    return ok("rounds", seen)


def _output(probe: Probe, readings: list[Reading]) -> Finding:
    """Generated tokens are in the cache already; they are found if the next prompt has the same ones."""
    one, two, three = readings
    seen: list[str] = []
    is_covered: list[bool] = []
    for before, after in ((one, two), (two, three)):
        prompt, made = before.prompt_tokens or 0, before.completion_tokens or 0
        reach = (prompt + made - 1) // probe.step * probe.step
        # Without the answer's tokens a hit ends here.
        bare = (prompt + _LOOSE_TOKENS) // probe.step * probe.step
        if made > _LOOSE_TOKENS and reach > bare:
            is_covered.append((after.cached or 0) > bare)
            beyond = max(0, (after.cached or 0) - prompt)
            seen.append(f"{beyond} of {made} generated tokens")
    text = "found in the next round: " + ", then ".join(seen)
    if not is_covered:
        made = one.completion_tokens or 0
        return unknown(
            "generated tokens", f"answers of {made} tokens are too short for blocks of {probe.step} to tell"
        )
    if all(is_covered):
        return ok("generated tokens", text)
    why = "the history's thinking is left out" if probe.has_thought else "the text is cut into other tokens"
    return warn(
        "generated tokens",
        text,
        f"each answer is computed again in the next round: the server drops what it generated, or {why} "
        "when it comes back",
    )
