"""Prometheus metrics: what the gateway sees, what the engine reads off, and a count of every event."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from workmem.core.events import (
    BlockAdmitted,
    BlockEvicted,
    BlockQuarantined,
    BoundReached,
    Event,
    RequestPreempted,
    TierStateChanged,
)
from workmem.prompt.canonical.rule import Canonical

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
"""Buckets of times that a person waits."""
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_ODD = re.compile(r"[^a-zA-Z0-9_]")

Gauges = Callable[[], Mapping[str, float]]


class Metrics:
    """The metrics of one server, in a registry of their own. Noun parts of the names are vLLM's."""

    def __init__(self, gauges: Gauges = dict) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.prompt_tokens = Counter(
            "workmem_prompt_tokens", "Prompt tokens of finished completions.", registry=registry
        )
        self.generation_tokens = Counter("workmem_generation_tokens", "Tokens generated.", registry=registry)
        self.by_source = Counter(
            "workmem_prompt_tokens_by_source",
            "Prompt tokens by the tier that had them, or `computed`; `cached` or `unreported` of other servers.",
            ["source"],
            registry=registry,
        )
        self.miss_tokens = Counter(
            "workmem_miss_tokens",
            "Prompt tokens of finished requests that were computed though an earlier request had them, by cause.",
            ["cause"],
            registry=registry,
        )
        self.success = Counter(
            "workmem_request_success", "Completions by finish reason.", ["finished_reason"], registry=registry
        )
        self.http = Counter(
            "workmem_http_requests",
            "HTTP requests by path and status.",
            ["path", "status"],
            registry=registry,
        )
        self.http_running = Gauge(
            "workmem_http_requests_running", "HTTP requests in progress.", registry=registry
        )
        self.ttft = Histogram(
            "workmem_time_to_first_token_seconds",
            "Arrival to first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self.tpot = Histogram(
            "workmem_time_per_output_token_seconds",
            "Mean time per output token after the first, one value per completion.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.e2e = Histogram(
            "workmem_e2e_request_latency_seconds",
            "Arrival to last token.",
            buckets=SECONDS,
            registry=registry,
        )
        self.canonical = CanonicalCounter(registry)
        self.transcript_turns = Counter(
            "workmem_transcript_turns",
            "Newest assistant's turns of prompts: `used` with generated tokens, `same` without need, or why not.",
            ["outcome"],
            registry=registry,
        )
        self.transcript_tokens = Counter(
            "workmem_transcript_tokens",
            "Generated tokens that newest turns got back, where encoding their text would give others.",
            registry=registry,
        )
        self.transcript_tokens_held = Gauge(
            "workmem_transcript_tokens_held", "Generated tokens that are kept for this.", registry=registry
        )
        self.events = EventCounter(registry)
        registry.register(_Readings(gauges))

    def add_readings(self, gauges: Gauges) -> None:
        """Read off more than the engine."""
        self.registry.register(_Readings(gauges))

    def page(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class CanonicalCounter:
    """What rules did to prompts. A place is a tool, a text or a message."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._applied = Counter(
            "workmem_canonical_applied",
            "Requests whose prompt a rule changed.",
            ["rule"],
            registry=registry,
        )

    def count(self, canonical: Canonical) -> None:
        """Count what was applied to one request."""
        for one in canonical.applied:
            self._applied.labels(one.rule).inc()


class EventCounter:
    """An `EventSink` that counts. Thread-safe, and bounded: labels are tiers, reasons and bound names.

    What the store counts itself (`store_promoted_total` and its bytes) is a reading and not counted again here.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"workmem_{name}", text, labels, registry=registry)

        self._events = counter("events", "Events by type.", "type")
        self._bounds = counter("bound_reached", "Bounds hit, by name.", "name")
        self._evicted = counter("blocks_evicted", "Pages that made room.", "tier", "reason")
        self._admitted = counter("blocks_admitted", "Pages that became resident.", "tier")
        self._quarantined = counter("blocks_quarantined", "Pages that failed a check.", "tier", "reason")
        self._tier_states = counter("tier_state_changes", "A tier tripped or came back.", "tier", "state")
        self._preempted = counter("requests_preempted", "Requests that gave way.", "reason")

    def __call__(self, event: Event) -> None:
        """Count `event`."""
        self._events.labels(str(type(event).__struct_config__.tag)).inc()
        match event:
            case BoundReached():
                self._bounds.labels(event.name).inc()
            case BlockEvicted():
                self._evicted.labels(event.tier, event.reason).inc()
            case BlockAdmitted():
                self._admitted.labels(event.tier).inc()
            case BlockQuarantined():
                self._quarantined.labels(event.tier, event.reason).inc()
            case TierStateChanged():
                self._tier_states.labels(event.tier, event.state).inc()
            case RequestPreempted():
                self._preempted.labels(event.reason).inc()
            case _:
                pass


class _Readings:
    """A collector that asks for the current readings when the page is asked for."""

    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        """One metric per reading; those named `_total` only grow."""
        for name, value in self._gauges().items():
            clean = f"workmem_{_ODD.sub('_', name)}"
            kind = CounterMetricFamily if clean.endswith("_total") else GaugeMetricFamily
            family = kind(clean, f"Reading of {name}.")
            family.add_metric([], value)
            yield family

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the first reading."""
        return ()
