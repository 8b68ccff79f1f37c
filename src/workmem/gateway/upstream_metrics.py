"""What upstream mode counts of requests that were split, asked again, or gone on with elsewhere."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from workmem.gateway.metrics import SECONDS, Metrics


class UpstreamMetrics:
    """Counters and times beside the gateway's own, and its events. Every label has a few values."""

    def __init__(self, metrics: Metrics) -> None:
        self.events = metrics.events
        registry = metrics.registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"workmem_upstream_{name}", text, labels, registry=registry)

        self.requests = counter(
            "generations", "Generations by whether they were split, and why.", "way", "reason"
        )
        self.one_sided = counter(
            "one_sided", "Splits that ended as whole requests, by what failed.", "reason"
        )
        self.repeated = counter(
            "repeated", "Generations asked again because a server died before it answered."
        )
        self.resumed = counter(
            "resumed_streams", "Streams whose server died, by what became of them.", "outcome"
        )
        self.role_changes = counter("role_changes", "Servers that began to change their role.", "role", "by")
        self.handed = counter("handed_tokens", "Prompt tokens computed by a prefill server for another one.")
        self.hop_s = Histogram(
            "workmem_upstream_hop_seconds",
            "Of generations: a prefill hop whole; of who answers, until the first of it is there.",
            ["hop"],
            buckets=SECONDS,
            registry=registry,
        )
