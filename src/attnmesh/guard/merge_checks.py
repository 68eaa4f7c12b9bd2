"""Checks of a merge across ranks: its arguments, and the comparison of the ranks' calls."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from attnmesh.comm.rank_merge import fastest_merge
from attnmesh.errors import InputError, MeshError, check_choice
from attnmesh.guard.consensus import CallChecker, agree, asks, describe_call, drop_messages, may_compare
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


def raise_unequal(mesh: Mesh, call: str, subject: str) -> NoReturn:
    """Raise on all ranks, whose checksums differ."""
    agree(mesh, call)
    drop_messages(mesh)  # of a call that some rank broke off
    given, fix = "different checksums of equal calls", "report this bug, with the arguments of each rank"
    raise MeshError(subject, "the same checksum on every rank", given, fix)


@dataclass
class MergeChecker:
    """Comparison of one call on all ranks around its merge, which carries a checksum of the call.

    On a CPU the merged checksum shows at no cost if calls differ; they are compared before collectives, which hang or
    crash on messages of unequal sizes. Ranks that may not look at the checksum ask instead: see `CallChecker`.
    """

    checker: CallChecker
    device: torch.device
    merge: str
    checked: bool | None
    describe: Callable[[], str] = str
    kind: Hashable = None
    stays: bool = False  # no host looks at the messages of a call of this kind

    def __post_init__(self) -> None:
        self.asks = asks(self.device) or self.checker.last_exchange is not None
        self.may = not self.checker.is_alone and may_compare(self.device)
        is_new = not (self.asks and self.stays and self.kind in self.checker.kinds)
        self.compares = self.may and (is_new if self.checked is None else self.checked)

    def before(self) -> bool:
        """Compare the call before messages that need it. Return False if some rank knows its own: all get NaN then."""
        if self.compares and self.asks:
            return self.checker.ask(self.describe())
        if self.compares and self.merge in COLLECTIVE:
            agree(self.checker.mesh, self.describe())
        return True

    def after(self, checksum: Tensor, subject: str, ask: Callable[[], Tensor]) -> None:
        """Raise on all ranks if the checksums differ. Where ranks ask, keep how to repeat the messages instead."""
        if self.asks:
            if self.kind != self.checker.last_kind:
                self.checker.learn(self.kind, ask if self.stays else None)
        elif self.compares and float(checksum.sum()) != 0:
            raise_unequal(self.checker.mesh, self.describe(), subject)

    def report(self, error: InputError, poison: Callable[[], object]) -> None:
        """Send poison, so that the other ranks detect this error. Raise it on all ranks if they compare their calls.

        Where ranks ask, it is raised if the call is new to all; if not, the others get NaN.
        """
        compares = self.checked is not False
        if self.may and self.asks and compares:
            self.checker.ask(error)
        elif self.may and self.asks:
            (self.checker.last_exchange or poison)()
        elif self.may:
            if self.merge not in COLLECTIVE:
                poison()
            if compares:
                agree(self.checker.mesh, error)
