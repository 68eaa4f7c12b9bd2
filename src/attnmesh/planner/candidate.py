"""A way to run attention, and what it costs: the values that the planner weighs."""

from dataclasses import dataclass, field
from typing import NamedTuple

from attnmesh.core.layout import Layout
from attnmesh.mesh.shapes import Shape


class Candidate(NamedTuple):
    """How to run attention: the mesh, what of it a host holds, how tokens lie and how they travel.

    `exchange` is "bulk", "pipelined" or "ring", and in decoding "tree", "direct", "gather" or "allreduce".
    """

    shape: Shape
    tile: Shape
    layout: Layout
    exchange: str


class Bytes(NamedTuple):
    """Bytes of all ranks over each class of links, in all layers."""

    inside: float = 0.0
    between: float = 0.0


@dataclass
class Cost:
    """What a way costs; `parts` are the seconds of each stage by name."""

    seconds: float = 0.0
    inside: float = 0.0
    between: float = 0.0
    messages: float = 0.0  # between hosts
    memory: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def spend(self, name: str, seconds: float) -> None:
        """Seconds of one more stage."""
        self.seconds += seconds
        self.parts[name] = self.parts.get(name, 0.0) + seconds

    def send(self, inside: float, between: float, messages: float) -> None:
        """Bytes over each class of links, and in how many messages between hosts."""
        self.inside += inside
        self.between += between
        self.messages += messages

    def times(self, layers: int) -> "Cost":
        """Of so many layers one after the other; memory is reckoned for all of them."""
        parts = {name: layers * seconds for name, seconds in self.parts.items()}
        return Cost(
            layers * self.seconds,
            layers * self.inside,
            layers * self.between,
            layers * self.messages,
            self.memory,
            parts,
        )
