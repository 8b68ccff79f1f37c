# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportMissingTypeArgument=false, reportIncompatibleMethodOverride=false
"""What vLLM loads by `--scheduler-cls workmem.plugins.vllm_scheduler.AgentScheduler`.

VLLM's own scheduler, with a word in who is admitted next: see `workmem.engines.vllm.admitting`. It decides all else, and
all of it after a bug of ours.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler, DiffusionScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.version import __version__ as vllm_version

from workmem.engines.vllm.admitting import Admitting
from workmem.engines.vllm.guard import Guard
from workmem.engines.vllm.versions import refusal
from workmem.plugins.vllm import WorkmemConnector
from workmem.plugins.vllm_store import log, read_settings, said_of_us
from workmem.policy.admission import Aged


class SyncAgentScheduler(Scheduler):
    """Where a step is over before the next is made up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._admitting: Admitting | None = None
        self._admission_guard = Guard("order of admission")
        self._admission_guard.call(self._open_admission, None)

    def add_request(self, request: Any) -> None:
        """See `Admitting.arrives`."""
        super().add_request(request)
        side = self._admitting
        if side is not None:
            self._admission_guard.call(lambda: side.arrives(request), None)

    def schedule(self, throttle_prefills: Any = False) -> Any:  # noqa: FBT002 - vLLM's own
        """See `Admitting.order`."""
        side = self._admitting
        if side is not None:
            self._admission_guard.call(lambda: self._put_in_order(side), None)
        return super().schedule(throttle_prefills)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Asked for each that is next. One that is held back is passed over, and those behind it are not."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        side = self._admitting
        # With tokens computed it has its blocks.
        if side is None or request.num_computed_tokens:
            return True
        return not self._admission_guard.call(
            lambda: side.is_held_back(request, self.running, self._table, self._gives_way), False
        )

    # -- inside

    def _open_admission(self) -> None:
        why = refusal(vllm_version)
        if why:
            self._admission_guard.turn_off(why)
            return
        settings = read_settings(said_of_us(self.vllm_config.kv_transfer_config)).vllm
        groups = self.kv_cache_config.kv_cache_groups
        share = settings.reserve_share
        if len(groups) != 1 and share:
            log.warning(
                "workmem: this model keeps KV in %d groups; no blocks are kept for critical requests",
                len(groups),
            )
            share = 0.0
        if self.policy is SchedulingPolicy.PRIORITY:
            log.warning("workmem: --scheduling-policy priority orders requests, and hints do not")
        policy = Aged(
            priority_s=settings.priority_s,
            critical=settings.critical_priority,
            share=share,
            lent_after_s=settings.reserve_s,
        )
        size = groups[0].kv_cache_spec.block_size if groups else self.block_size
        self._admitting = Admitting(policy, self.kv_cache_manager.block_pool, size, time.monotonic)
        for connector in self._ours():
            connector.also_tell(self._admitting.counts)

    def _put_in_order(self, side: Admitting) -> None:
        side.begin_step(self.requests, len(self.requests))
        if self.policy is SchedulingPolicy.PRIORITY:
            return
        ordered = side.order(list(self.waiting))
        if ordered is not None:
            queue = create_request_queue(self.policy)
            for request in ordered:
                queue.add_request(request)
            self.waiting = queue

    def _table(self, request: str) -> list[int]:
        return self.kv_cache_manager.get_block_ids(request)[0]

    def _gives_way(self) -> int:
        return sum(connector.blocks_that_give_way() for connector in self._ours())

    def _ours(self) -> list[WorkmemConnector]:
        all_ = (self.connector, *getattr(self.connector, "_connectors", ()))
        return [connector for connector in all_ if isinstance(connector, WorkmemConnector)]


class AsyncAgentScheduler(SyncAgentScheduler, AsyncScheduler):
    """Where a step is made up while the one before it runs."""


class AgentScheduler:
    """Whichever of the two vLLM would have taken the like of; its own for diffusion, which has a scheduler to itself."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> SchedulerInterface:
        """VLLM calls the class that it was told of, and asks no more of it than to make a scheduler."""
        is_async = vllm_config.scheduler_config.async_scheduling
        if vllm_config.diffusion_config is not None:
            log.warning(
                "workmem: a diffusion model has a scheduler of its own, and hints do not order its requests"
            )
            made = DiffusionAsyncScheduler if is_async else DiffusionScheduler
        else:
            made = AsyncAgentScheduler if is_async else SyncAgentScheduler
        return made(vllm_config, *args, **kwargs)
