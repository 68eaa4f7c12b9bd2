"""Checks of a merge across ranks: its arguments, and the comparison of the ranks' calls."""

from collections.abc import Callable

import torch
from torch import Tensor

from attnmesh.comm.merge_messages import fastest_merge
from attnmesh.errors import InputError, MeshError, check_choice
from attnmesh.guard.consensus import agree, describe_call, drop_messages
from attnmesh.mesh.axes import Axis, Mesh, mesh_of
from attnmesh.mesh.merges import COLLECTIVE, MERGE_CHOICES, OUTPUTS
from attnmesh.runtime.world import cached_per_world


def check_merge(subject: str, how: str, output: str) -> None:
    """Raise unless `how` names a merge and `output` names an output."""
    check_choice(f"{subject} {'how' if subject == 'merge_across' else 'merge'}", how, MERGE_CHOICES, 'use "auto"')
    check_choice(f"{subject} output", output, OUTPUTS, 'use "replicated"')


@cached_per_world()
def prepare_merges(axis: Axis) -> None:
    """Let the ranks of an axis of CPUs find out how they merge, before the first of them does.

    They compare this first: else its exchanges could meet those of another call.
    """
    agree(mesh_of(axis), describe_call("the first merge along an axis"))
    fastest_merge(axis)


class MergeChecker:
    """Comparison of one call on all ranks by the checksum that its merge carries, at no cost of its own.

    Collectives hang or crash on messages of unequal sizes, so ranks compare their calls before them.
    """

    def __init__(self, mesh: Mesh, merge: str, compares: bool, describe: Callable[[], str]) -> None:
        self.mesh, self.merge, self.compares, self.describe = mesh, merge, compares, describe

    def before(self) -> None:
        """Compare the call before a collective."""
        if self.compares and self.merge in COLLECTIVE:
            agree(self.mesh, self.describe())

    def after(self, checksum: Tensor, subject: str) -> None:
        """Raise on all ranks if the checksums differ."""
        if float(checksum.sum()) != 0:
            agree(self.mesh, self.describe())
            drop_messages(self.mesh)  # of a call that some rank broke off
            given, fix = "different checksums of equal calls", "report this bug, with the arguments of each rank"
            raise MeshError(subject, "the same checksum on every rank", given, fix)

    def report(self, error: InputError, poison: Callable[[], object]) -> None:
        """Send poison, so that the other ranks detect this error. Raise it on all ranks if they compare their calls."""
        if torch.compiler.is_compiling() or self.mesh.shape.ranks == 1:
            return
        if self.merge not in COLLECTIVE:
            poison()
        if self.compares:
            agree(self.mesh, error)
