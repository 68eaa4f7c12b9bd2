"""A step of an engine, and the requests of which it is planned."""

from collections import deque
from dataclasses import dataclass, field

from attnmesh.hf.serving.engine_request import EngineRequest
from attnmesh.hf.serving.operations import Operation


@dataclass
class StepPlan:
    """A step: the operations of all ranks, and the requests that take their results."""

    operations: list[Operation] = field(default_factory=list)
    rows: list[EngineRequest] = field(default_factory=list)
    """Rows that decode; the others wait for masks of grammars."""
    starting: EngineRequest | None = None
    """Request whose prompt begins."""
    computing: EngineRequest | None = None
    """Request whose prompt has a chunk."""
    forking: tuple[EngineRequest, int] | None = None
    """Request whose cache is forked, and the id of the fork."""
    spared: set[int] = field(default_factory=set)
    """Kept caches that are forked, or made."""
    promised: int = 0
    """Bytes by which caches grow."""


@dataclass
class ServedRequests:
    """The requests of an engine, by how far they are."""

    waiting: deque[EngineRequest] = field(default_factory=deque)
    prefilling: list[EngineRequest] = field(default_factory=list)
    """Their prompts are computed, the oldest first."""
    rows: list[EngineRequest] = field(default_factory=list)
    """They decode."""

    @property
    def running(self) -> list[EngineRequest]:
        """The requests that have a cache of their own."""
        return [*self.rows, *self.prefilling]
