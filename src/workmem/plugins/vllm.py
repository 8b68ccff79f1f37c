# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportMissingTypeArgument=false, reportIncompatibleMethodOverride=false
"""The connector that vLLM loads by `--kv-transfer-config`, with this module as its `kv_connector_module_path`.

Only translates: `workmem.engines.vllm` decides and moves. No exception leaves a hook.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from workmem.config import cache_dir, host_socket
from workmem.core.errors import ConfigError
from workmem.engines.vllm.adapters import AdapterDigests, Adapters
from workmem.engines.vllm.guard import Guard
from workmem.engines.vllm.hearing import Hearing
from workmem.engines.vllm.outcomes import LoadOutcomes
from workmem.engines.vllm.scheduler import SchedulerSide
from workmem.engines.vllm.steps import OTHER_WEIGHTS, StepPlan, StepReport
from workmem.engines.vllm.telling import Changes, guard_totals, scheduler_totals, worker_totals
from workmem.engines.vllm.weights import WeightsWatch
from workmem.engines.vllm.worker import WorkerSide
from workmem.plugins.vllm_events import as_kv_events
from workmem.plugins.vllm_facts import fingerprint, read_facts
from workmem.plugins.vllm_metrics import WorkmemMetrics, WorkmemStats
from workmem.plugins.vllm_store import open_store, read_settings
from workmem.plugins.vllm_tensors import blocks_of
from workmem.plugins.vllm_watched import SLEEPERS, WritesCounted, around, worker_above
from workmem.store.host.client import HostStore

if TYPE_CHECKING:
    import torch

log = logging.getLogger("vllm.workmem")

IDLE_WAIT_S = 0.002
"""A step without a request waits so long, for a load or a handoff: an engine that turns in place has the interpreter, and
its core."""


_ANSWERED = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"}


@dataclass
class WorkmemPlan(KVConnectorMetadata):
    """A step's plan on its way to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class WorkmemReport(KVConnectorWorkerMetadata):
    """A worker's report on its way to the scheduler."""

    report: StepReport = field(default_factory=StepReport)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkmemReport:
        """See `StepReport.with_`."""
        assert isinstance(other, WorkmemReport)
        return WorkmemReport(self.report.with_(other.report))


class WorkmemConnector(KVConnectorBase_V1, SupportsHMA):
    """Contexts of this engine are kept in the host's store, and come from there. See docs/guides/vllm.md."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        # Not a part of `_worker`: vLLM hears how loads ended whatever happens there.
        self._outcomes = LoadOutcomes()
        self._weights = WeightsWatch(lambda: 0)
        self._store: HostStore | None = None
        self._adapters = Adapters(AdapterDigests(cache_dir()))
        self._is_empty = False
        """VLLM dropped all of its own blocks when it last was to."""
        self._beside: list[Counter[str]] = []
        self._changes = Changes()
        self._is_scheduler = is_scheduler = role is KVConnectorRole.SCHEDULER
        self._guard = Guard("scheduler" if is_scheduler else "worker", self._gone_off)
        self._hearing = Hearing(self._outcomes, self._guard, self._end_loads)
        # What is off has still to be told.
        self._telling = Guard("metrics")
        # A cache's failure is a miss, never the request's: vLLM reads this after it has made the connector.
        for config in (self._kv_transfer_config, _transfer_config_above()):
            if config is not None:
                config.kv_load_failure_policy = "recompute"
        if is_scheduler:
            self._guard.call(self._open_scheduler, None)

    @property
    def requires_kv_delivery(self) -> bool:
        """Best effort: a page that is not saved is a miss later."""
        return False

    # -- scheduler's side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The engine's pool is there: contexts can be held in it."""
        side = self._scheduler
        if side is not None:
            self._guard.call(lambda: self._bind_pool(side, gpu_block_pool), None)

    def blocks_that_give_way(self) -> int:
        """Of those held in the pool, the ones that are free as soon as somebody needs them. For our scheduler class."""
        side = self._scheduler
        return 0 if side is None else self._guard.call(side.levers.gives_way, 0)

    def has_pending_block_frees(self) -> bool:
        """VLLM asks before it preempts: what is held gives way, and it tries again. See `SchedulerSide.is_short`."""
        side = self._scheduler
        return side is not None and self._guard.call(side.is_short, False)

    def on_new_request(self, request: Any) -> None:
        """See `SchedulerSide.arrives`."""
        side = self._scheduler
        if side is not None:
            self._guard.call(lambda: side.arrives(request, self._adapter(request)), None)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerSide.match`. VLLM asks again in its next step for one that is told None."""
        side = self._scheduler
        if side is None:
            return 0, False
        return self._guard.call(lambda: side.match(request, num_computed_tokens), (0, False))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `SchedulerSide.allocated`."""
        side = self._scheduler
        if side is None or not num_external_tokens:
            return
        table = blocks.get_block_ids()[0]
        self._guard.call(lambda: side.allocated(request, table, num_external_tokens), None)
        if self._guard.off:
            side.not_allocated(request.request_id, table)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """From which tier the tokens come that were promised last."""
        side = self._scheduler
        if side is None or not num_external_tokens:
            return super().get_external_cache_hit_sources(request, num_external_tokens)
        tokens = self._guard.call(lambda: side.hit_sources(request), None) or {}
        host = min(num_external_tokens, tokens.get("dram", 0))
        found = {CacheHitSource.HOST: host, CacheHitSource.DISK: num_external_tokens - host}
        return {source: count for source, count in found.items() if count}

    def build_connector_meta(self, scheduler_output: Any) -> WorkmemPlan:
        """See `SchedulerSide.plan`."""
        side = self._scheduler
        if side is None:
            return WorkmemPlan(StepPlan(is_off=True))
        plan = self._guard.call(lambda: _plan(side, scheduler_output), None)
        return WorkmemPlan(side.plan_off() if plan is None else plan)

    def update_connector_output(self, connector_output: Any) -> None:
        """See `SchedulerSide.heard`."""
        side, meta = self._scheduler, connector_output.kv_connector_worker_meta
        if side is None or not isinstance(meta, WorkmemReport):
            return
        if meta.report.off:
            self._guard.turn_off(f"a worker is off: {meta.report.off}")
        self._guard.call(lambda: side.heard(meta.report), None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerSide.finished`. What is held for later has a reference of its own."""
        side = self._scheduler
        if side is None:
            return False, None
        # A client that has gone away takes no next turn, and of what failed nobody knows what is in its blocks.
        kept = block_ids if request.status.name in _ANSWERED else []
        return False, self._guard.call(lambda: side.finished(request, kept), None)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self.request_finished(request, block_ids[0])

    def take_events(self) -> list[Any]:
        """See `SchedulerSide.take_announcements`; empty unless vLLM publishes KV events."""
        side = self._scheduler
        if side is None:
            return []
        return self._guard.call(lambda: as_kv_events(side.take_announcements()), list[Any]())

    def reset_cache(self) -> bool:
        """Weights were changed, or somebody wants nothing of before: a new epoch."""
        side = self._scheduler
        if side is not None:
            # vLLM has just tried to drop its own blocks, and comes here also where requests that run kept it from that.
            self._guard.call(lambda: side.start_epoch(time.time_ns(), is_empty=self._is_empty), None)
        return True

    # -- workers' side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's tensors are there: open the worker's side."""
        self._guard.call(lambda: self._open_worker(kv_caches), None)

    def unregister_kv_caches(self) -> None:
        """Before sleep: the tensors' memory goes, and comes back in the same place. A hook since vLLM 0.33."""
        side = self._worker
        if side is not None:
            self._guard.call(side.before_sleep, None)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See `WorkerSide.before_step`: vLLM calls this in every step, before anything is written."""
        side = self._worker
        if side is not None and isinstance(kv_connector_metadata, WorkmemPlan):
            plan = kv_connector_metadata.plan
            self._guard.call(lambda: self._look_at_weights(plan), None)
            self._guard.call(lambda: side.before_step(plan), None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `WorkerSide.load`."""
        del forward_context, kwargs
        side, plan = self._worker, self._plan()
        self._hearing.begins(plan)
        if side is not None and self._weights.stale is None:
            self._guard.call(lambda: side.load(plan), None)
        why = "off" if side is None or self._guard.off or plan.is_off else ""
        if not why and self._weights.stale is not None:
            why = OTHER_WEIGHTS
        if why:
            self._hearing.fail(plan, why)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Whole pages are loaded at once."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole pages are saved at once."""

    def wait_for_save(self) -> None:
        """See `WorkerSide.save`: the step is over, its blocks are complete."""
        side = self._worker
        if side is not None and self._weights.stale is None:
            plan = self._plan()
            self._guard.call(lambda: side.save(plan), None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See `LoadOutcomes.arrived`."""
        del finished_req_ids
        plan = self._plan()
        wait_s = IDLE_WAIT_S if plan.is_idle else 0.0
        return None, self._hearing.arrived(wait_s, anyway=plan.holds_back) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `LoadOutcomes.failed_blocks`."""
        return self._hearing.failed_blocks()

    def build_connector_worker_meta(self) -> WorkmemReport | None:
        """See `LoadOutcomes.report`."""
        report = self._hearing.report()
        stale = self._weights.stale
        if self._guard.off or stale is not None:
            report = StepReport(report.loads if report else {}, self._guard.off, stale)
        return WorkmemReport(report) if report is not None else None

    def shutdown(self) -> None:
        """Stop threads; what is in the store stays."""
        for part in (self._scheduler, self._worker, self._store):
            if part is not None:
                self._guard.always(part.close, None)

    # -- what both sides count

    def also_tell(self, counts: Counter[str]) -> None:
        """Of our scheduler class, which has no metrics of its own."""
        self._beside.append(counts)

    def get_kv_connector_stats(self) -> WorkmemStats | None:
        """What has changed since the last call."""
        changes = self._telling.call(self._changed, dict[str, int]())
        return WorkmemStats(data=changes) if changes else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> WorkmemStats:
        """In vLLM's front end: what a side has told."""
        return WorkmemStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> WorkmemMetrics:
        """In vLLM's front end: what shows them."""
        return WorkmemMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- inside

    def _changed(self) -> dict[str, int]:
        side = "scheduler" if self._is_scheduler else "worker"
        totals = guard_totals(side, self._guard)
        if self._scheduler is not None:
            totals.update(scheduler_totals(self._scheduler, *self._beside))
        if self._worker is not None:
            totals.update(worker_totals(self._worker))
        return self._changes.of(totals)

    def _end_loads(self) -> bool:
        return self._worker is None or self._guard.always(self._worker.end_loads, otherwise=False)

    def _look_at_weights(self, plan: StepPlan) -> None:
        self._weights.begins(plan)
        if self._weights.stale is not None:
            self._outcomes.spoil(OTHER_WEIGHTS)

    def _plan(self) -> StepPlan:
        meta = self._connector_metadata
        return meta.plan if isinstance(meta, WorkmemPlan) else StepPlan()

    def _adapter(self, request: Any) -> str | None:
        """See `SchedulerSide.arrives`."""
        lora = request.lora_request
        if lora is None:
            return ""
        try:
            found = self._adapters.of(
                lora.lora_name, lora.lora_int_id, lora.lora_path, is_read_again=lora.load_inplace
            )
        except OSError as error:
            log.warning(
                "workmem: adapter %s cannot be read (%s); its contexts are not kept", lora.lora_name, error
            )
            return None
        if found is None:
            log.warning(
                "workmem: files of adapter %s changed while vLLM has it, or blocks of it; its contexts are not kept until "
                "it is loaded under another number and the prefix cache was reset",
                lora.lora_name,
            )
        return found

    def _bind_pool(self, side: SchedulerSide, pool: Any) -> None:
        limits = self._vllm_config.scheduler_config
        side.bind(
            pool,
            longest_tokens=self._vllm_config.model_config.max_model_len,
            step_tokens=limits.max_num_batched_tokens,
            watermark_blocks=int(limits.watermark * pool.num_gpu_blocks),
        )
        reset = pool.reset_prefix_cache

        def release_and_reset() -> bool:
            self._guard.call(side.release, None)
            self._is_empty = reset()
            if self._is_empty:
                self._adapters.emptied()
                self._guard.call(side.emptied, None)
            return self._is_empty

        # No hook is called before it, and it refuses while anybody holds a block.
        pool.reset_prefix_cache = release_and_reset

    def _gone_off(self) -> None:
        if self._scheduler is not None:
            # With a guard of its own: that one is off by now.
            Guard("pins").call(self._scheduler.release, None)
        if self._worker is not None:
            self._worker.give_up()

    def _open_scheduler(self) -> None:
        said = self._kv_transfer_config.kv_connector_extra_config
        facts = read_facts(self._vllm_config, self._kv_cache_config)
        try:
            settings = read_settings(said)
        except ConfigError as error:
            self._guard.turn_off(str(error))
            return
        why = facts if isinstance(facts, str) else facts.refusal()
        if why or isinstance(facts, str):
            self._guard.turn_off(why)
            return
        weights = fingerprint(self._vllm_config, cache_dir())
        self._store = open_store(settings, said)
        events = self._vllm_config.kv_events_config
        self._scheduler = SchedulerSide(
            facts,
            weights,
            self._store,
            settings.vllm,
            announces=events is not None and events.enable_kv_cache_events,
            may_load=self._kv_transfer_config.is_kv_consumer,
            may_save=self._kv_transfer_config.is_kv_producer,
        )
        log.info("workmem: contexts are kept in the store at %s", host_socket(settings.store.host.socket))

    def _open_worker(self, kv_caches: dict[str, torch.Tensor]) -> None:
        said = self._kv_transfer_config.kv_connector_extra_config
        facts = read_facts(self._vllm_config, self._kv_cache_config)
        if isinstance(facts, str) or facts.refusal():
            return
        settings = read_settings(said)
        rank = self._vllm_config.parallel_config.rank % facts.workers
        self._store = open_store(settings, said, starts=False)
        blocks = blocks_of(kv_caches, facts.layout(rank), self._kv_cache_config.num_blocks)
        worker = worker_above()
        self._weights = WeightsWatch(WritesCounted(worker))
        self._worker = WorkerSide(self._store, blocks, self._outcomes, rank=rank, load_s=settings.vllm.load_s)
        for name in SLEEPERS:
            around(worker, name, self.unregister_kv_caches)


def _transfer_config_above() -> Any:
    """That of the `MultiConnector` which makes this connector: its children have copies, and vLLM reads its own."""
    frame = inspect.currentframe()
    while frame is not None:
        config = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
        if getattr(config, "kv_connector", "") == "MultiConnector":
            return config
        frame = frame.f_back
    return None


def _plan(side: SchedulerSide, output: Any) -> StepPlan:
    has: dict[str, int] = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    has.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    state = output.kv_connector_block_state

    def table(request: str) -> list[int] | None:
        tables = state.get_block_ids(request)
        return None if tables is None else tables[0]

    return side.plan({name: (has[name], adds) for name, adds in output.num_scheduled_tokens.items()}, table)


with contextlib.suppress(ValueError):
    # In a MultiConnector vLLM looks by name for whose metrics these are. A ValueError says that it is known already.
    KVConnectorFactory.register_connector(WorkmemConnector.__name__, __name__, WorkmemConnector.__name__)
