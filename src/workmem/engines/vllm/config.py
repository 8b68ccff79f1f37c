"""Settings of the connector that vLLM loads."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[vllm]`: workmem inside vLLM. Also set by vLLM's `kv_connector_extra_config`, as dotted paths."""

    start_store: bool = True
    """Start the host's store (`workmem store serve`) where none is served yet; it stays when vLLM ends."""
    start_s: Annotated[float, Meta(gt=0)] = 60.0
    """Longest that vLLM's start waits for that store; without one it computes everything until the store is there."""
    load_min_blocks: Annotated[int, Meta(ge=1)] = 1
    """Fewer blocks than this are computed rather than loaded."""
    load_s: Annotated[float, Meta(gt=0)] = 30.0
    """Longest that a request waits for pages from below dram; then the rest is computed."""
    handoff_wait_max_s: Annotated[float, Meta(ge=0)] = 5.0
    """Longest that a request is held back for blocks that were just computed elsewhere, whatever its handoff says. 0: never."""
    deny_s: Annotated[float, Meta(gt=0)] = 60.0
    """A block that could not be loaded is not offered again for so long."""
    prefetch_share: Annotated[float, Meta(ge=0, le=1)] = 0.25
    """Share of dram in which pages are held for requests that still wait for their turn."""
    retention: Literal["lru", "ttl"] = "lru"
    """What stays in vLLM's memory after a turn: what hints ask for (`lru`), or every session for `pin_ttl_s` (`ttl`)."""
    pin_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of vLLM's blocks that may be held for contexts between turns; the longest request always has room beside."""
    pin_ttl_s: Annotated[float, Meta(gt=0)] = 30.0
    """Contexts are held for so long where a hint does not say."""
    pin_ttl_max_s: Annotated[float, Meta(gt=0)] = 3600.0
    """A hint that asks for more gets this."""
    priority_s: Annotated[float, Meta(ge=0)] = 1.0
    """With our scheduler class: a step of a request's priority is worth so many seconds of waiting. 0: no order of ours."""
    critical_priority: Annotated[int, Meta(ge=-100, le=101)] = 50
    """From this priority on a request is critical; 101: none is."""
    reserve_share: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    """With our scheduler class: share of vLLM's blocks kept for critical requests when others are admitted."""
    reserve_s: Annotated[float, Meta(ge=0)] = 30.0
    """Kept for so long after the last critical request, then lent to all. Nobody is held back for longer either."""
