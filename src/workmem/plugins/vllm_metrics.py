# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportMissingTypeArgument=false, reportIncompatibleMethodOverride=false
"""The connector's own metrics among vLLM's. See `workmem.engines.vllm.telling`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from workmem.engines.vllm.guard import Guard
from workmem.engines.vllm.telling import METRICS, PREFIX, Metric, added, summary


class WorkmemStats(KVConnectorStats):
    """Changes on their way to vLLM's front end: name of a count to what came to it."""

    def reset(self) -> None:
        """Nothing has changed."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> WorkmemStats:
        """Both as one."""
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int]:
        """For vLLM's log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Nothing has changed."""
        return not self.data


class WorkmemMetrics(KVConnectorPromMetrics):
    """`vllm:workmem_...`, each with vLLM's own labels. All are there from the start, at 0."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._levels: Counter[tuple[int, str]] = Counter()
        self._metric_of: dict[str, Metric] = {}
        self._series: dict[tuple[int, str], Any] = {}
        self._guard = Guard("metrics")
        self._guard.call(self._make, None)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Changes of an engine."""
        self._guard.call(lambda: self._observe(transfer_stats_data, engine_idx), None)

    def _make(self) -> None:
        for name, metric in METRICS.items():
            labels = [*self._labelnames, *([metric.label] if metric.label else [])]
            about = {"name": PREFIX + name, "documentation": metric.about, "labelnames": labels}
            if metric.is_level:
                # Which front end hears of a change is chance: each has a part of the level.
                made = self._gauge_cls(**about, multiprocess_mode="sum")
            else:
                made = self._counter_cls(**about)
            for value, count in metric.names(name).items():
                self._metric_of[count] = metric
                for engine, own in self.per_engine_labelvalues.items():
                    self._series[engine, count] = made.labels(*own, *([value] if metric.label else []))

    def _observe(self, changes: dict[str, int], engine: int) -> None:
        for count, change in changes.items():
            series = self._series.get((engine, count))
            if series is None:
                continue
            metric = self._metric_of[count]
            if metric.is_level:
                self._levels[engine, count] += change
                series.set(self._levels[engine, count])
            else:
                series.inc(metric.scale * change)
