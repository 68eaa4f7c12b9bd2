"""Arguments that the operators of one call share: this rank's place, the problem, and how to solve it."""

from collections.abc import Sequence
from typing import NamedTuple

from attnmesh.core.logits import Logits
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh.schedule import Problem
from attnmesh.mesh.world import cached_per_world, decode_cached

Code = tuple[str, list[int]]
"""A run as the schema of an operator carries it: names and numbers."""


class Run(NamedTuple):
    """All arguments of an operator that are not tensors."""

    mesh: Mesh
    problem: Problem
    exchange: str
    kernel: str
    logits: Logits

    def encode(self) -> Code:
        """Return the run as names and numbers, which compiled graphs keep as constants."""
        names = [*self.mesh.group_names, self.exchange, self.kernel, *map(repr, self.logits)]
        places = [*self.mesh.shape, *(axis.index for axis in self.mesh.axes)]
        return ",".join(names), [*places, *self.problem.encode()]

    @staticmethod
    def decode(names: str, numbers: Sequence[int]) -> "Run":
        """Return the run that `encode` wrote."""
        return decode_cached(_decoded, names, numbers)


@cached_per_world(1024)
def _decoded(names: str, numbers: tuple[int, ...]) -> Run:
    *groups, exchange, kernel, scale, softcap = names.split(",")
    mesh = Mesh.named(numbers[:3], numbers[3:6], groups)
    return Run(mesh, Problem.decode(mesh.shape, numbers[6:]), exchange, kernel, Logits(float(scale), float(softcap)))
