"""Levers for measuring and testing a running server, from its own machine only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from workmem.gateway.exchange import Answer, Exchange, state_of
from workmem.gateway.explain import is_local
from workmem.gateway.failures import Refusal, json_response


async def drop_vram(exchange: Exchange) -> Answer:
    """`POST /debug/drop_vram`: forget idle vram blocks, so that the next hit comes from a lower tier.

    Local callers only, with or without a key: it slows every tenant down for a while.
    """
    if not is_local(exchange.request):
        raise Refusal(403, "vram is dropped for callers on this machine only.", code="forbidden")
    drop: Callable[[], Awaitable[int]] | None = getattr(
        state_of(exchange.request, "service").engine, "drop_vram", None
    )
    if drop is None:
        raise Refusal(404, "This engine has no vram of its own to drop.", code="unknown_url")
    return json_response({"dropped_blocks": await drop()})
