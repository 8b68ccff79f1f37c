"""Answers in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workmem.core.generation import KnownOutcome, TokenLogprob, Usage
from workmem.core.outcomes import COMPUTED, TierName
from workmem.gateway.transcripts import transcript_body

_LOGPROB_MIN = -9999.0
"""JSON knows no infinity; clients read this as one."""


def usage_body(
    usages: Mapping[int, Usage],
    n: int,
    canonical: Mapping[str, int] | None = None,
    known: Sequence[KnownOutcome] = (),
) -> dict[str, Any]:
    """`usage` of a request: each prompt counts once, however many choices it has.

    `canonical`: how many places each rule changed in the client's body. `known`: what became of the turns that were
    generated here.
    """
    prompts = [usage for index, usage in sorted(usages.items()) if index % n == 0]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in usages.values())
    by_source = {tier.value: 0 for tier in (TierName.VRAM, TierName.DRAM, TierName.SSD)} | {COMPUTED: 0}
    for usage in prompts:
        for run in usage.sources:
            by_source[run.source] = by_source.get(run.source, 0) + run.tokens
    workmem: dict[str, Any] = {"tokens_by_source": by_source, **transcript_body(known)}
    if any(usage.approximate for usage in prompts):
        workmem["approximate"] = True
    if told := [outcome.told() for usage in usages.values() for outcome in usage.hints]:
        workmem["hints"] = told
    if canonical:
        workmem["canonical"] = dict(canonical)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        "workmem": workmem,
    }


def transfer_body(usages: Mapping[int, Usage], n: int) -> dict[str, Any]:
    """`kv_transfer_params` of an answer, as vLLM has it; nothing where no handoff was asked for.

    The longest that a choice waited, and what was loaded for the first choice of each prompt.
    """
    told = [(index, usage.handoff) for index, usage in usages.items() if usage.handoff is not None]
    if not told:
        return {}
    tokens = sum(report.tokens for index, report in told if index % n == 0)
    waited_s = max(report.waited_s for _, report in told)
    return {"kv_transfer_params": {"workmem": {"handoff": {"waited_s": waited_s, "tokens": tokens}}}}


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = [
        {
            **_token(item.token, item.logprob),
            "top_logprobs": [_token(text, value) for _, text, value in item.top],
        }
        for item in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """`logprobs` of a text completion; `offset` is where the first token begins in the text."""
    offsets: list[int] = []
    for item in tokens:
        offsets.append(offset)
        offset += len(item.token)
    tops = [
        {text: _finite(value) for _, text, value in item.top} | {item.token: _finite(item.logprob)}
        for item in tokens
    ]
    return {
        "tokens": [item.token for item in tokens],
        "token_logprobs": [_finite(item.logprob) for item in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def tool_call_body(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """An entry of `tool_calls`."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(value: float) -> float:
    # NaN compares false with everything and takes the floor as well.
    return max(_LOGPROB_MIN, value)
