"""What upstream mode remembers of the requests it passed on, and what it can say about them."""

from __future__ import annotations

from typing import Any

from workmem.core.outcomes import TierName
from workmem.gateway.exchange import Answer, Exchange, state_of
from workmem.gateway.explain import RequestLog, RequestRecord, may_see, only_operators, unknown_request
from workmem.gateway.failures import Refusal, json_response
from workmem.gateway.usage_peek import CACHED, PeekedUsage


class PassedRequest(RequestRecord, frozen=True, kw_only=True):
    """A request whose answer has passed, whole or in part. `usage` is what `server` said, if it did."""

    server: str
    status: int
    is_whole: bool
    usage: PeekedUsage | None


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
        raise Refusal(404, text, code="usage_not_reported")
    return json_response(_explanation(record, record.usage))


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
    }
