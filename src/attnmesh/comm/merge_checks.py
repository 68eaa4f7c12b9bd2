"""Checks of a merge across ranks: its arguments, and the comparison of the ranks' calls."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attnmesh.comm.consensus import agree, describe_call
from attnmesh.core.checks import check_choice, check_dtype, check_one_device, check_tensor, require
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.errors import DeviceError, DtypeError, InputError, KernelError, MeshError, ShapeError
from attnmesh.mesh.axes import Axis, Mesh
from attnmesh.mesh.merges import COLLECTIVE, MERGES

MERGE_CHOICES = ("auto", *MERGES)

OUTPUTS = ("replicated", "heads")

BASES = {"e": 1.0, "2": math.log(2.0)}
"""Factors that make an `lse` of this base natural."""


def check_partial(partial: Partial, wire: torch.dtype | None, base: str) -> None:
    """Raise unless `merge_across` serves these arguments."""
    fits = isinstance(partial, tuple) and len(partial) == 2 and all(isinstance(x, Tensor) for x in partial)
    given, fix = type(partial).__name__, "pass what attend returned, or Partial(out, lse)"
    require(fits, DtypeError, "merge_across", "a partial (out, lse)", given, fix)
    out, lse = partial
    check_tensor("merge_across out", out)
    check_tensor("merge_across lse", lse)
    check_one_device("merge_across", {"out": out, "lse": lse})
    fix = "compute it on the ranks' device"
    require(not out.is_meta, DeviceError, "merge_across", "a partial with values", "one on the meta device", fix)
    if not out.is_floating_point() or lse.dtype != sum_dtype(out.dtype):
        given = f"out {out.dtype}, lse {lse.dtype}"
        raise DtypeError("merge_across", "out in floats and lse in float32, or both in float64", given, "cast lse")
    if out.ndim != 4 or lse.shape != out.shape[:-1]:
        expected, given = "out (batch, heads, length, dim) and its lse", f"{tuple(out.shape)} and {tuple(lse.shape)}"
        raise ShapeError("merge_across", expected, given, "put the heads before the length")
    learned, fix = out.requires_grad or lse.requires_grad, "call it under torch.no_grad(), or train with attention"
    fits = not (torch.is_grad_enabled() and learned)
    require(fits, KernelError, "merge_across", "a partial without gradients", "one with requires_grad=True", fix)
    check_dtype("merge_across wire", wire, "leave it out for float32")
    check_choice("merge_across base", base, BASES, 'pass "2" if the engine took base-2 logarithms')


def check_merge(subject: str, how: str, output: str) -> None:
    """Raise unless `how` names a merge and `output` names an output."""
    check_choice(f"{subject} {'how' if subject == 'merge_across' else 'merge'}", how, MERGE_CHOICES, 'use "auto"')
    check_choice(f"{subject} output", output, OUTPUTS, 'use "replicated"')


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


def mesh_of(axis: Axis) -> Mesh:
    """Return a mesh of one axis."""
    return Mesh(Axis(), Axis(), axis)


def call_text(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    how: str,
    output: str,
    wire: torch.dtype | None = None,
    base: str = "e",
    device: str = "cpu",
) -> str:
    """Return the text of a call that ranks compare."""
    options = {"how": how, "output": output, "wire": wire, "base": base}
    return describe_call("merge_across", device=device, out=list(shape), dtype=dtype, **options)
