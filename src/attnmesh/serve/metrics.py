"""The figures of /metrics, for Prometheus: those that the front counts, and those that rank 0 sends."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class ServerState(StrEnum):
    """The state of the server, by the names that clients see."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    FAILED = "failed"


BUCKET_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
"""Upper bounds of the histograms' buckets."""


ENGINE: dict[str, tuple[Any, str]] = {
    "tokens": (CounterMetricFamily, "New tokens that the ranks have drawn."),
    "prompt_tokens": (CounterMetricFamily, "Tokens of prompts that the ranks have computed."),
    "cached_tokens": (CounterMetricFamily, "Tokens of prompts that kept caches had."),
    "preempted": (CounterMetricFamily, "Requests that were put back into the queue for want of memory."),
    "evicted": (CounterMetricFamily, "Kept caches that were dropped for want of memory."),
    "steps": (CounterMetricFamily, "Steps in which rows decoded a token, and checked guesses of further ones."),
    "drafted_tokens": (CounterMetricFamily, "Guesses of tokens that steps have checked."),
    "accepted_tokens": (CounterMetricFamily, "Those of them that were drawn, each a token without a step of its own."),
    "draft_passes": (
        CounterMetricFamily,
        "Passes of the draft model over rows, each of which guesses a token of each.",
    ),
    "draft_prompt_tokens": (CounterMetricFamily, "Tokens that the draft model has read before it guessed."),
    "draft_cache_bytes": (GaugeMetricFamily, "Bytes of the draft model's keys and values in the memory of rank 0."),
    "exchanges": (CounterMetricFamily, "Exchanges of operations with all ranks."),
    "running": (GaugeMetricFamily, "Requests that decode."),
    "filling": (GaugeMetricFamily, "Requests whose prompts are computed."),
    "queue": (GaugeMetricFamily, "Requests that wait on rank 0."),
    "kept": (GaugeMetricFamily, "Caches that are kept for prompts with the same beginning."),
    "step_seconds": (GaugeMetricFamily, "Seconds of a step of rows, a moving mean."),
    "cache_bytes": (GaugeMetricFamily, "Bytes of keys and values in the memory of a rank."),
    "cache_limit_bytes": (GaugeMetricFamily, "Bytes of keys and values that a rank may hold."),
    "store_memory_tokens": (CounterMetricFamily, "Tokens of prompts that stored blocks in memory had."),
    "store_disk_tokens": (CounterMetricFamily, "Tokens of prompts that stored blocks in the folder had."),
    "store_blocks_written": (CounterMetricFamily, "Blocks of prefixes that were written to the folder."),
    "store_blocks_damaged": (CounterMetricFamily, "Blocks that could not be read, and were computed again."),
    "store_memory_bytes": (GaugeMetricFamily, "Bytes of stored blocks in memory, of all ranks together."),
    "store_memory_blocks": (GaugeMetricFamily, "Stored blocks in memory."),
    "store_disk_bytes": (GaugeMetricFamily, "Bytes of stored blocks in the folder."),
    "store_disk_blocks": (GaugeMetricFamily, "Stored blocks in the folder."),
    "store_stopped": (GaugeMetricFamily, "1 if no more blocks are stored, as the folder could not be written to."),
    "merge_share": (GaugeMetricFamily, "Share of the time of steps in which rank 0 merged results of ranks, 0 to 1."),
}
"""Kind and text of each figure of the engine."""


class Metrics(Collector):
    """Metrics of one server. `engine` has the figures of rank 0: numbers, and lists with one number a rank."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine: dict[str, float | list[float]] = {}
        make: dict[str, Any] = {"registry": self.registry}
        self.responses = Counter(
            "attnmesh_responses", "Responses by status, but for those of /health and /metrics.", ["status"], **make
        )
        self.restarts = Counter("attnmesh_restarts", "Times that lost ranks were replaced.", **make)
        self.tokens = Counter("attnmesh_tokens", "New tokens that were sent to clients.", **make)
        self.prompt_tokens = Counter("attnmesh_prompt_tokens", "Tokens of the prompts of accepted requests.", **make)
        make["buckets"] = BUCKET_SECONDS
        self.first_token = Histogram(
            "attnmesh_first_token_seconds", "Seconds from a request to its first token.", **make
        )
        self.gap = Histogram("attnmesh_gap_seconds", "Seconds from one token of a request to its next.", **make)
        self.registry.register(self)

    def watch(self, state: Callable[[], ServerState], open_requests: Callable[[], int]) -> None:
        """Show the server's state and its open requests."""
        states = Gauge("attnmesh_state", "1 for the state of the server.", ["state"], registry=self.registry)
        for one in ServerState:
            states.labels(one).set_function(lambda one=one: float(state() == one))  # type: ignore[misc]
        waiting = Gauge(
            "attnmesh_open_requests", "Requests that run, wait, or have their prompts encoded.", registry=self.registry
        )
        waiting.set_function(open_requests)

    def collect(self) -> Iterable[Metric]:
        """Yield the figures of rank 0; one that is a list has a label for the rank."""
        for name, value in self.engine.items():
            labels = ["rank"] if isinstance(value, list) else []
            kind, text = ENGINE.get(name, (GaugeMetricFamily, f"{name} of rank 0."))
            family = kind(f"attnmesh_engine_{name}", text, labels=labels)
            for rank, figure in enumerate(value if isinstance(value, list) else [value]):
                family.add_metric([str(rank)] if labels else [], figure)
            yield family

    def text(self) -> bytes:
        """Return all figures in Prometheus's text format."""
        return generate_latest(self.registry)
