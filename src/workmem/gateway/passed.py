"""What upstream mode remembers of the requests it passed on, and what it can say about them."""

from __future__ import annotations

from typing import Any

import msgspec

from workmem.core.outcomes import TierName
from workmem.gateway.exchange import Answer, Exchange, state_of
from workmem.gateway.explain import (
    RequestLog,
    RequestRecord,
    kept_of,
    may_see,
    only_operators,
    unknown_request,
)
from workmem.gateway.explainer import Explainer
from workmem.gateway.failures import Refusal, json_response
from workmem.gateway.splitting import Split
from workmem.gateway.usage_peek import CACHED, PeekedUsage


class PassedRequest(RequestRecord, frozen=True, kw_only=True):
    """A request whose answer has passed, whole or in part. `usage` is what `server` said, if it did."""

    server: str
    status: int
    is_whole: bool
    usage: PeekedUsage | None
    split: Split | None = None
    """How it was served, where it is a generation."""
    resumed_on: tuple[str, ...] = ()
    """Servers that went on with it, after those before them died in it."""


async def explain_passed(exchange: Exchange) -> Answer:
    """`GET /debug/requests/{id}` of upstream mode: the server's own counts, as one span."""
    only_operators(exchange.request)
    any_id: str = exchange.request.path_params["id"]
    log: RequestLog = state_of(exchange.request, "request_log")
    record = log.find(any_id)
    if not isinstance(record, PassedRequest) or not may_see(exchange, record):
        raise unknown_request(any_id)
    if record.usage is None:
        text = (
            f"{record.server} answered {any_id[:128]!r} with status {record.status} and without `usage`, so nothing "
            'is known of its prompt. Streams need "stream_options": {"include_usage": true}.'
        )
        if record.split is not None:
            text += f" {served(record.split, record.server)}"
        raise Refusal(404, text, code="usage_not_reported")
    explainer: Explainer = state_of(exchange.request, "explainer")
    told = await explainer.told(kept_of(explainer, record))
    return json_response(_explanation(record, record.usage) | told)


def _explanation(record: PassedRequest, usage: PeekedUsage) -> dict[str, Any]:
    reused = {CACHED, *TierName}
    parts = [
        {"source": source, "tokens": tokens, "reason": f"as {record.server} says"}
        for source, tokens in usage.by_source.items()
    ]
    return {
        "request_id": record.id,
        "created": record.created,
        "finished": record.is_whole,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": sum(count for source, count in usage.by_source.items() if source in reused),
        "tokens_by_source": usage.by_source,
        "spans": [{"path": "prompt", "start": 0, "end": usage.prompt_tokens, "parts": parts}],
        "compared_with": None,
        "difference": None,
        "split": None if record.split is None else msgspec.structs.asdict(record.split),
        "served": "" if record.split is None else served(record.split, record.server),
        "resumed_on": list(record.resumed_on),
    }


_REASONS = {
    "never": "upstream.split is never",
    "always": "upstream.split is always",
    "no_prefill_server": "no prefill server is up",
    "no_decode_server": "no server that decodes is up",
    "short_prompt": "the prompt was expected to be shorter than upstream.split_min_tokens",
    "cached": "most of the prompt was expected to be in the server's memory",
    "faster": "that was expected to be faster",
    "slower": "that was expected to be slower",
    "measuring": "to learn what that takes",
    "other_endpoint": "this endpoint is not split",
    "no_single_prompt": "it has several prompts, or none",
    "one_token": "one token was asked for",
    "prompt_is_answered": "it asks for more than what follows its prompt",
    "reuse_off": "it asked that nothing be kept",
    "client_params": "its own kv_transfer_params are in the way",
}


def served(split: Split, server: str) -> str:
    """One sentence: by whom, and why."""
    reason = _REASONS.get(split.reason, split.reason)
    if split.is_split:
        return (
            f"Split: {split.prompt_tokens} tokens computed by {split.prefill_server} in {split.prefill_s:.3f} s, "
            f"answered by {server}; {reason}."
        )
    if split.fallback:
        return f"Was to be split ({reason}), but {split.prefill_server} failed ({split.fallback}); {server} did all."
    return f"Not split: {reason}."
