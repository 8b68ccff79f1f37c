"""Is a prompt that comes again found, does the server say so, and in which pieces."""

from __future__ import annotations

import math

from workmem.probing.asks import Reading
from workmem.probing.findings import Finding, fail, ok, unknown, warn
from workmem.probing.probe import Probe
from workmem.probing.server import Refused

_WARM_WORDS = 120
_CUTS = (0.79, 0.47, 0.23, 0.09)
"""Longest first: a server that keeps the last prompt alone still has what the next one needs."""
_DOUBTS_MAX = 2
_FASTER = 0.6
_HEAD_TOKENS_MAX = 64
_QUESTION = "Say yes."
_REPORT = (
    "make it say so: vLLM needs --enable-prompt-tokens-details, SGLang --enable-cache-report; "
    "without it nobody can tell a miss from silence"
)


def caching(probe: Probe) -> list[Finding]:
    """Whether answers report cached tokens, and whether a prompt that comes again has any."""
    warm = probe.ask(probe.filler.text("warm", _WARM_WORDS), _QUESTION)
    if warm.prompt_tokens:
        probe.tokens_per_word = max(0.5, warm.prompt_tokens / (_WARM_WORDS + 10))
    first = _longest(probe)
    second = probe.ask(probe.text("long", probe.long_tokens), _QUESTION)
    if first.cached is None and second.cached is None:
        return _by_time(probe, first, second)
    before, after, tokens = first.cached or 0, second.cached or 0, second.prompt_tokens or 0
    probe.head = min(before, after)
    findings = [_reporting(probe, before, after, tokens)]
    if after > tokens > 0 or before > max(_HEAD_TOKENS_MAX, (first.prompt_tokens or 0) // 10):
        text = (
            f"{before} cached of a prompt that was never sent before, {after} of {tokens} when it came again"
        )
        findings.append(
            fail("counts", text, "what it reports is not what it reused; do not steer by these numbers")
        )
    probe.caches = after > before
    findings.append(_found_again(probe, before, after, tokens))
    if probe.caches:
        findings += _blocks(probe, second)
    return findings


def _longest(probe: Probe) -> Reading:
    """The long prompt for the first time, shorter where the server does not take it."""
    for _ in range(2):
        try:
            return probe.ask(probe.text("long", probe.long_tokens), _QUESTION)
        except Refused as refused:
            if refused.status not in (400, 413, 422):
                raise
            probe.long_tokens //= 2
    return probe.ask(probe.text("long", probe.long_tokens), _QUESTION)


def _reporting(probe: Probe, before: int, after: int, tokens: int) -> Finding:
    if probe.reports:
        return ok(
            "cached tokens",
            f"answers report them: {before}, and {after} of {tokens} when a prompt came again",
        )
    return warn(
        "cached tokens", f"answers do not report them; its metrics counted {after} of {tokens}", _REPORT
    )


def _found_again(probe: Probe, before: int, after: int, tokens: int) -> Finding:
    if after > before:
        return ok("prefix cache", f"{after} of {tokens} tokens were reused when a prompt came again")
    return fail(
        "prefix cache",
        f"it does not cache: {after} of {tokens} tokens were reused when a prompt came again at once",
        "switch prefix caching on; if the server asks for longer prompts, --tokens "
        f"{4 * probe.long_tokens} probes further",
    )


def _by_time(probe: Probe, first: Reading, second: Reading) -> list[Finding]:
    """Nobody says what was cached: time tells something where prompts take long."""
    text = probe.text("long", probe.long_tokens)
    cold = [first.seconds]
    again = [second.seconds, *(probe.ask(text, _QUESTION).seconds for _ in range(2))]
    cold.append(probe.ask(probe.text("other", probe.long_tokens), _QUESTION).seconds)
    seen = f"a new prompt took {min(cold) * 1e3:.0f} ms, the same again {min(again) * 1e3:.0f} ms"
    silent = warn("cached tokens", "neither answers nor metrics say how many tokens were cached", _REPORT)
    if min(again) < _FASTER * min(cold) and min(cold) - min(again) > 0.02:
        return [silent, ok("prefix cache", f"it seems to cache: {seen}")]
    return [
        silent,
        unknown(
            "prefix cache", f"it does not report, or does not cache: {seen}", "let it report, then ask again"
        ),
    ]


def _blocks(probe: Probe, second: Reading) -> list[Finding]:
    """The size of its blocks, and the shortest prefix of which anything is reused."""
    tokens = second.prompt_tokens or probe.long_tokens
    found = {1.0: second.cached or 0}
    for number, cut in enumerate(_CUTS):
        text = f"{probe.text('long', cut * probe.long_tokens)} {probe.filler.text(f'end{number}', 8)}"
        found[cut] = probe.ask(text, _QUESTION).cached or 0
    # Cuts fall anywhere: what all the counts are multiples of is the block.
    probe.block = math.gcd(*_hits(probe, found))
    for number in range(_DOUBTS_MAX):
        # Few blocks may all be even ones by chance. Of a part of a block, nothing is found if it is one.
        cut = 1.8 * probe.block / tokens
        if max(found.values()) > 20 * probe.block or cut > 0.9:
            break
        text = f"{probe.text('long', cut * probe.long_tokens)} {probe.filler.text(f'doubt{number}', 8)}"
        found[cut] = probe.ask(text, _QUESTION).cached or 0
        if math.gcd(*_hits(probe, found)) == probe.block:
            break
        probe.block = math.gcd(*_hits(probe, found))
    return [_block(probe, tokens, found), _minimum(probe, tokens, found)]


def _hits(probe: Probe, found: dict[float, int]) -> list[int]:
    return [cached for cached in found.values() if cached > probe.head]


def _block(probe: Probe, tokens: int, found: dict[float, int]) -> Finding:
    counts = ", ".join(str(cached) for cached in found.values())
    seen = f"reuse is to the token (cached: {counts})"
    if probe.block > 1:
        seen = f"reuse is in blocks of {probe.block} tokens (cached: {counts})"
    distinct = len(set(_hits(probe, found)))
    if distinct < 3:
        return unknown("block", f"{seen}, or of a size that divides this: too few different counts to tell")
    lost = tokens - found[1.0]
    if lost > probe.block + 1:
        return warn(
            "block",
            f"{seen}; the last {lost} of {tokens} tokens of a prompt that came again were computed",
            "more than a block is given up at the end of each prompt: look for a setting of the server that does so",
        )
    return ok("block", seen)


def _minimum(probe: Probe, tokens: int, found: dict[float, int]) -> Finding:
    missed = [int(tokens * cut) for cut, cached in found.items() if cached <= probe.head]
    hit = min(int(tokens * cut) for cut, cached in found.items() if cached > probe.head)
    if not missed:
        return ok("minimum", f"of a shared prefix of about {hit} tokens some were reused")
    longest = max(missed)
    seen = f"nothing of a shared prefix of about {longest} tokens was reused, something of one of {hit}"
    if longest >= 2 * probe.block:
        return warn("minimum", f"below_minimum: {seen}", "prefixes shorter than its minimum are never reused")
    return warn(
        "minimum",
        f"below_block_size: {seen}; a block is {probe.block} tokens",
        "a smaller block (vLLM: --block-size 16) reuses short prefixes, and wastes less behind each change",
    )
