"""Levers of a running server: for measuring and testing, and to have a store forget."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from workmem.core.errors import ConfigError
from workmem.gateway.exchange import Answer, Exchange, state_of
from workmem.gateway.explain import is_local
from workmem.gateway.failures import Refusal, json_response
from workmem.gateway.keys import ApiKeys
from workmem.store.selector import Purged, PurgeSelector


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


async def purge_store(exchange: Exchange) -> Answer:
    """`POST /debug/store/purge` with a `PurgeSelector`: those namespaces leave every tier, vram's idle blocks too.

    With keys, a key that has a tenant purges that tenant and no other; without keys, local callers only.
    """
    keys: ApiKeys = state_of(exchange.request, "keys")
    if not keys.is_required and not is_local(exchange.request):
        text = "A store is purged for callers on this machine only, unless server.api_key_file is set."
        raise Refusal(403, text, code="forbidden")
    purge: Callable[[PurgeSelector], Purged] | None = exchange.request.app.state.purge
    if purge is None:
        raise Refusal(404, "This server has no store of its own to purge.", code="unknown_url")
    try:
        chosen = msgspec.json.decode(exchange.body, type=PurgeSelector)
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise Refusal(400, f"What to purge cannot be told: {error}", code="invalid_value") from error
    if keys.is_required and exchange.tenant and chosen.tenant != exchange.tenant:
        raise Refusal(403, "This key purges its own tenant only: name it in `tenant`.", code="forbidden")
    drop: Callable[[], Awaitable[int]] | None = getattr(
        state_of(exchange.request, "service").engine, "drop_vram", None
    )
    # First, so that what it still saves is purged as well.
    dropped = await drop() if drop is not None else 0
    gone = await asyncio.to_thread(purge, chosen)
    return json_response(msgspec.structs.asdict(gone) | {"dropped_vram_blocks": dropped})
