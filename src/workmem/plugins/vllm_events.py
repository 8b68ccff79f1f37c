# pyright: reportMissingImports=false
"""What workmem announces as the events that vLLM publishes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from workmem.core.outcomes import TierName
from workmem.engines.vllm.announcing import Announcement, StoredRun

OWNERSHIP = "workmem"


def as_kv_events(said: Iterable[Announcement]) -> list[Any]:
    """A `KVCacheEvent` for each announcement."""
    return [_event(one) for one in said]


def _event(said: Announcement) -> Any:
    hashes = [_name(key) for key in said.keys]
    where = {
        "medium": MEDIUM_CPU if said.tier is TierName.DRAM else MEDIUM_STORAGE,
        "locality": "REMOTE" if said.tier is TierName.REMOTE else "LOCAL",
        "ownership": OWNERSHIP,
        "group_idx": 0,
    }
    if not isinstance(said, StoredRun):
        return BlockRemoved(block_hashes=hashes, **where)
    scope = said.origin.scope
    # The name before the digest of the files, see the connector's `_adapter`.
    adapter = scope.adapter.rpartition(":")[0] or None
    of_all = [adapter] if adapter else []
    of_first = [*of_all, scope.salt] if scope.salt and not said.parent else of_all
    extra = [tuple(of_first) or None, *[tuple(of_all) or None] * (len(hashes) - 1)]
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=_name(said.parent) if said.parent else None,
        token_ids=list(said.tokens),
        block_size=len(said.tokens) // len(hashes),
        lora_id=None,
        lora_name=adapter,
        extra_keys=extra if any(extra) else None,
        session_id=said.origin.session or None,
        **where,
    )


def _name(key: bytes) -> Any:
    """As the engine's own events name the block: digests, or their low 64 bits."""
    return maybe_convert_block_hash(key)
