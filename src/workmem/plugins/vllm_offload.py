# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportMissingTypeArgument=false, reportIncompatibleMethodOverride=false
"""What vLLM's own tiered offload loads by name from this module. See docs/guides/vllm-native.md.

`WorkmemTier` for `secondary_tiers`, `WorkmemValue` and its like for `eviction_policy`, `WorkmemCpuSpec` for
`spec_name` where there is no GPU. Only translates: `workmem.engines.vllm` decides and copies.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from workmem.core.errors import ConfigError
from workmem.core.layout import Namespace
from workmem.engines.vllm.chunk_layout import chunk_rows
from workmem.engines.vllm.guard import Guard
from workmem.engines.vllm.offload_jobs import ChunkJob, ChunkJobs
from workmem.engines.vllm.offload_tier import OffloadTier
from workmem.plugins.vllm_chunks import chain_of, find_layout
from workmem.plugins.vllm_cpu import WorkmemCpuSpec
from workmem.plugins.vllm_policies import WorkmemLru, WorkmemS3Fifo, WorkmemSegmentedLru, WorkmemValue
from workmem.plugins.vllm_store import log, open_store, read_settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from workmem.store.host.client import HostStore

__all__ = [
    "WorkmemCpuSpec",
    "WorkmemLru",
    "WorkmemS3Fifo",
    "WorkmemSegmentedLru",
    "WorkmemTier",
    "WorkmemValue",
]


class WorkmemTier(SecondaryTierManager):
    """The host's store below vLLM's own host memory. What its configuration says in dotted paths are our settings."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **said: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.LOCAL
        self._side: OffloadTier | None = None
        self._store: HostStore | None = None
        # Not a part of `_side`: vLLM hears of the end of jobs whatever happens there.
        self._jobs = ChunkJobs()
        self._guard = Guard("offload tier", self._jobs.give_up)
        self._guard.call(lambda: self._open(said), None)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Nothing is known of its chunks yet."""
        del req_context
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """See `OffloadTier.has`."""
        side = self._side
        if side is None:
            return LookupResult.MISS
        is_there = self._guard.call(lambda: side.has(req_context.req_id, key, chain_of(req_context)), False)
        return LookupResult.HIT if is_there else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """See `OffloadTier.store`."""
        job, side = self._begin(job_metadata, is_load=False), self._side
        if side is not None and not self._guard.off:
            self._guard.call(lambda: side.store(job, chain_of(job_metadata.req_context)), None)
        else:
            self._jobs.end(job, ())

    def submit_load(self, job_metadata: Any) -> None:
        """See `OffloadTier.load`."""
        job, side = self._begin(job_metadata, is_load=True), self._side
        if side is not None and not self._guard.off:
            self._guard.call(lambda: side.load(job), None)
        else:
            self._jobs.end(job, ())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended since the last call."""
        ended, side = self._jobs.take(), self._side
        if side is not None and ended:
            self._guard.call(lambda: side.heard(ended), None)
        return [
            JobResult(
                job_id=end.job.number,
                success=end.is_whole,
                successful_keys=end.done or None if end.job.is_load else None,
                transfer_time=end.seconds,
                transfer_bytes=len(end.done) * self._block_size_bytes,
            )
            for end in ended
        ]

    def on_request_finished(self, req_context: Any) -> None:
        """See `OffloadTier.forget`."""
        self._forget((req_context.req_id,))

    def on_schedule_end(self, context: Any) -> None:
        """A request that was preempted has lost what was loaded for it, and may ask for it again."""
        if context.preempted_req_ids:
            self._forget(context.preempted_req_ids)

    def drain_jobs(self) -> None:
        """VLLM drops all that it has cached, as after a change of weights: a new epoch, and no job of the old one."""
        self._jobs.give_up()
        if self._side is not None:
            side = self._side
            self._guard.call(lambda: side.start_epoch(time.time_ns()), None)

    def shutdown(self) -> None:
        """Finish jobs, within a bound; what is in the store stays."""
        for part in (self._side, self._store):
            if part is not None:
                # Also where a bug has switched this off before.
                Guard("offload tier's end").call(part.close, None)
        # No thread reads vLLM's memory any more, also where closing met a bug.
        self._jobs.give_up()
        self._side = None

    def _begin(self, metadata: Any, *, is_load: bool) -> ChunkJob:
        rows = [int(row) for row in metadata.chunk_ids]
        job = ChunkJob(
            metadata.job_id, metadata.req_context.req_id, tuple(metadata.keys), rows, is_load=is_load
        )
        self._jobs.begin(job)
        return job

    def _forget(self, requests: Iterable[str]) -> None:
        side = self._side
        if side is not None:
            for request in requests:
                self._guard.call(lambda name=request: side.forget(name), None)

    def _open(self, said: dict[str, Any]) -> None:
        unknown = [name for name in said if "." not in name]
        if unknown:
            self._guard.turn_off(f"{', '.join(unknown)} in its configuration is no dotted path of a setting")
            return
        found = find_layout(self._offloading_spec)
        if isinstance(found, str):
            self._guard.turn_off(found)
            return
        layout, weights = found
        try:
            settings = read_settings(said)
        except ConfigError as error:
            self._guard.turn_off(str(error))
            return
        space = Namespace(model_fingerprint=weights, layout=layout)
        self._store = open_store(settings, said)
        # Behind the store, which brings the native copy.
        rows = chunk_rows(self._primary_kv_view, layout)
        self._side = OffloadTier(self._store, space, rows, self._jobs, settings.vllm)
        log.info(
            "workmem: %d chunks of vLLM's host memory have the store below them, %d bytes each",
            rows.count,
            layout.page_bytes,
        )
