# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportMissingTypeArgument=false, reportIncompatibleMethodOverride=false
"""VLLM's tiered offload without a GPU: it refuses to start there, for want of a copy engine alone."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from workmem.engines.vllm.chunk_copy import ChunkCopy


class WorkmemCpuSpec(TieringOffloadingSpec):
    """VLLM's tiered offload where the engine computes on the processor; all its options but `canonical_layout`."""

    def create_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker's part of host memory, and the copies to and from it."""
        if self.config.canonical_layout:
            raise ValueError("canonical_layout needs a GPU: leave it out of kv_connector_extra_config")
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return _CpuWorker(kv_caches, self.blocks_per_chunk, region)

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """As vLLM's, which wants a GPU here."""
        if not self._worker:
            self._worker = self.create_worker(kv_caches)
        return self._worker


class _CpuWorker(OffloadingWorker):
    """Copies as soon as it is asked to: the engine's threads have all cores, a thread beside them would wait for one."""

    def __init__(self, kv_caches: Any, per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._done: list[TransferResult] = []
        blocks = [
            t.tensor.view(t.tensor.dtype).view(-1, t.page_size_bytes).numpy() for t in kv_caches.tensors
        ]
        chunks = [
            region.create_next_worker_view(t.page_size_bytes * per_chunk).numpy() for t in kv_caches.tensors
        ]
        groups = [[(r.tensor_idx, r.page_size_bytes) for r in refs] for refs in kv_caches.group_data_refs]
        self._copy: ChunkCopy | None = ChunkCopy(blocks, chunks, groups, per_chunk=per_chunk)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Blocks into host memory."""
        assert self._copy is not None
        began = time.monotonic()
        size = self._copy.store(
            src_spec.block_ids, src_spec.group_sizes, src_spec.block_indices, dst_spec.block_ids
        )
        return self._end(job_id, size, began)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: Any = None) -> bool:
        """Host memory into blocks. At once: `expedited`, new in vLLM 0.33, asks for no more."""
        del expedited
        assert self._copy is not None
        began = time.monotonic()
        size = self._copy.load(
            dst_spec.block_ids, dst_spec.group_sizes, dst_spec.block_indices, src_spec.block_ids
        )
        return self._end(job_id, size, began)

    def get_finished(self) -> list[TransferResult]:
        """Since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All are done."""
        del job_ids

    def shutdown(self) -> None:
        """Give host memory back."""
        self._copy = None
        self._region.cleanup()

    def _end(self, job: int, size: int, began: float) -> bool:
        self._done.append(
            TransferResult(job, success=True, transfer_size=size, transfer_time=time.monotonic() - began)
        )
        return True
