"""A mesh that attention could run on, and its predicted cost."""

from dataclasses import dataclass, field
from typing import NamedTuple

from attnmesh.core.layout import Layout
from attnmesh.mesh.shapes import Shape


class CandidateMesh(NamedTuple):
    """A mesh that attention could run on: its shape, its tile on each host, a token layout, and an exchange or merge.

    `exchange_or_merge` is "bulk", "pipelined" or "ring"; in decoding it is the name of a merge, as "tree".
    """

    shape: Shape
    tile: Shape
    layout: Layout
    exchange_or_merge: str


@dataclass
class Cost:
    """Predicted cost of a candidate mesh: `parts` has the seconds of each stage, `memory` the bytes per rank."""

    seconds: float = 0.0
    inside: float = 0.0
    """Bytes inside hosts."""
    between: float = 0.0
    """Bytes between hosts."""
    messages: float = 0.0
    """Messages between hosts."""
    memory: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def add_stage(self, name: str, seconds: float) -> None:
        """Add the seconds of a stage; stages of the same name add up."""
        self.seconds += seconds
        self.parts[name] = self.parts.get(name, 0.0) + seconds

    def add_traffic(self, inside: float, between: float, messages: float) -> None:
        """Add bytes inside hosts, bytes between hosts, and messages between hosts."""
        self.inside += inside
        self.between += between
        self.messages += messages

    def add(self, other: "Cost") -> None:
        """Add the stages, the traffic and the memory of another cost."""
        for name, seconds in other.parts.items():
            self.add_stage(name, seconds)
        self.add_traffic(other.inside, other.between, other.messages)
        self.memory += other.memory

    def of_layers(self, layers: int) -> "Cost":
        """Return the cost of `layers` layers like this one. `memory` already counts all layers."""
        return Cost(
            seconds=layers * self.seconds,
            inside=layers * self.inside,
            between=layers * self.between,
            messages=layers * self.messages,
            memory=self.memory,
            parts={name: layers * seconds for name, seconds in self.parts.items()},
        )
