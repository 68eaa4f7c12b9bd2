"""The figures of /metrics, for Prometheus: those that the front counts, and those that rank 0 sends."""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

STATES = ("starting", "ready", "restarting", "stopping", "failed")
"""States of the server."""

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
"""Upper bounds of the histograms' buckets."""


class Metrics(Collector):
    """Metrics of one server. `engine` has the figures of rank 0: numbers, and lists with one number a rank."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine: dict[str, float | list[float]] = {}
        make: dict[str, Any] = {"registry": self.registry}
        self.responses = Counter("attnmesh_responses", "Responses by status.", ["status"], **make)
        self.restarts = Counter("attnmesh_restarts", "Worlds that were started in place of lost ones.", **make)
        self.tokens = Counter("attnmesh_tokens", "New tokens.", **make)
        self.prompt_tokens = Counter("attnmesh_prompt_tokens", "Tokens of prompts.", **make)
        make["buckets"] = SECONDS
        self.first_token = Histogram("attnmesh_first_token_seconds", "From a request to its first token.", **make)
        self.gap = Histogram("attnmesh_gap_seconds", "From one token of a request to its next.", **make)
        self.registry.register(self)

    def watch(self, state: Callable[[], str], open_requests: Callable[[], int]) -> None:
        """Show the server's state and its open requests."""
        states = Gauge("attnmesh_state", "1 for the state of the server.", ["state"], registry=self.registry)
        for name in STATES:
            states.labels(name).set_function(lambda name=name: float(state() == name))  # type: ignore[misc]
        waiting = Gauge("attnmesh_open_requests", "Requests that run or wait.", registry=self.registry)
        waiting.set_function(open_requests)

    def collect(self) -> Iterable[Metric]:
        """Yield the figures of rank 0; one that is a list has a label for the rank."""
        for name, value in self.engine.items():
            by_rank = isinstance(value, list)
            family = GaugeMetricFamily(f"attnmesh_engine_{name}", "Of the engine.", labels=["rank"] if by_rank else [])
            for rank, figure in enumerate(value if isinstance(value, list) else [value]):
                family.add_metric([str(rank)] if by_rank else [], figure)
            yield family

    def text(self) -> bytes:
        """Return all figures in Prometheus's text format."""
        return generate_latest(self.registry)
