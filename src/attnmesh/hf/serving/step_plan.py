"""A step of an engine, and the requests for which steps are planned."""

from collections import deque
from dataclasses import dataclass, field

from attnmesh.hf.serving.engine_request import EngineRequest
from attnmesh.hf.serving.operations import Operation


@dataclass
class StepPlan:
    """A step: the operations of all ranks, and the requests that take their results."""

    operations: list[Operation] = field(default_factory=list)
    """Operations in the order in which ranks run them: `Scheduler.plan` has the reasons for it."""
    rows: list[EngineRequest] = field(default_factory=list)
    """Rows that decode. Other rows wait for masks of grammars."""
    starting: EngineRequest | None = None
    """Request whose prompt begins."""
    computing: EngineRequest | None = None
    """Request of whose prompt a chunk is computed."""
    forking: tuple[EngineRequest, int] | None = None
    """Request whose cache is forked, and the id of the fork."""
    spared: set[int] = field(default_factory=set)
    """Kept caches that this step forks, or makes: they are not evicted for it."""
    promised: int = 0
    """Bytes by which caches may grow in this step, on the rank that holds most. `CacheMemory` counts them."""


@dataclass
class ServedRequests:
    """The requests of an engine by their stage: waiting, prefilling, or rows that decode."""

    waiting: deque[EngineRequest] = field(default_factory=deque)
    prefilling: list[EngineRequest] = field(default_factory=list)
    """Requests whose prompts are being computed, the oldest first."""
    rows: list[EngineRequest] = field(default_factory=list)
    """Requests that decode."""

    @property
    def running(self) -> list[EngineRequest]:
        """The requests that have a cache of their own."""
        return [*self.rows, *self.prefilling]
