# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportMissingTypeArgument=false, reportIncompatibleMethodOverride=false
"""Eviction orders of ours for the host memory of vLLM's tiered offload, as it loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from workmem.engines.vllm.chunk_policy import ChunkPolicy
from workmem.plugins.vllm_chunks import chain_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from workmem.policy.choose import EvictionName


class _Policy(CachePolicy):
    """An eviction order of ours for vLLM's host memory."""

    order: ClassVar[EvictionName]

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: ChunkPolicy[Any] = ChunkPolicy(self.order, cache_capacity)

    def get(self, key: bytes) -> Any:
        """See `ChunkPolicy.get`."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any = None) -> None:
        """See `ChunkPolicy.insert`. The request's context is new in vLLM 0.33; `on_store_miss` had it before."""
        del req_context
        self._chunks.insert(key, chunk)

    def remove(self, key: bytes) -> None:
        """See `ChunkPolicy.remove`."""
        self._chunks.remove(key)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """See `ChunkPolicy.used`."""
        del req_context
        self._chunks.used(list(keys))

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """See `ChunkPolicy.missed`."""
        self._chunks.missed(keys, chain_of(req_context))

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """A chunk that only came with this request was not used again."""
        del insertion_only_keys, req_context
        for keys in key_groups:
            self._chunks.used([key for key in keys if key in reused_keys])

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """See `ChunkPolicy.evict`."""
        return self._chunks.evict(n, protected)

    def clear(self) -> None:
        """See `ChunkPolicy.clear`."""
        self._chunks.clear()

    def mark_evictable(self, key: bytes) -> None:
        """See `ChunkPolicy.let_go`."""
        self._chunks.let_go(key)


class WorkmemValue(_Policy):
    """What is worth least leaves first: how likely it is used again, times what it costs to compute."""

    order = "value"


class WorkmemSegmentedLru(_Policy):
    """What was used again is kept apart from what was not."""

    order = "segmented_lru"


class WorkmemS3Fifo(_Policy):
    """First in, first out, with a small queue in which new chunks prove themselves."""

    order = "s3fifo"


class WorkmemLru(_Policy):
    """What was used longest ago leaves first, the ends of contexts before their beginnings."""

    order = "lru"
