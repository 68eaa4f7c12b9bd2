"""`merge_across`: merge partials across ranks, for any engine that returns `out` and `lse`."""

import math
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.consensus import describe_call, may_compare
from attnmesh.comm.merge_ranks import MergedCall, check_merge, merge_ranks, send_poison
from attnmesh.comm.message import checksum_of
from attnmesh.core.checks import DTYPES, check_checked, check_one_device, check_tensor
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.errors import DtypeError, InputError, KernelError, MeshError, ShapeError
from attnmesh.kernels.merge import use_triton
from attnmesh.mesh.axes import Axis, Mesh, device_type_of, group_named

BASES = {"e": 1.0, "2": math.log(2.0)}
"""Factors that make an `lse` of this base natural."""


def merge_across(
    partial: Partial,
    group: ProcessGroup | DeviceMesh | None,
    *,
    how: str = "auto",
    output: str = "replicated",
    wire: torch.dtype | None = None,
    base: str = "e",
    checked: bool | None = None,
) -> Partial:
    """Return the merge of the partials of all ranks: attention over the keys of all of them, for any engine.

    Partials have no gradients here. Ranks whose calls differ all raise the same error, or get NaN where calls are not
    compared: with `checked=False`, and by default where comparing would block a GPU.

    Args:
        partial: `out` (batch, heads, length, dim) and `lse` (batch, heads, length) of this rank's keys.
        group: A process group, a mesh of one axis, or None for a single rank.
        how: "tree", "direct", "gather", "allreduce" or "auto".
        output: "replicated", the same bits on every rank; or "heads", the i-th share of the heads on rank i, as
            `torch.tensor_split` cuts them.
        wire: Dtype in which `out` travels: float32 or wider unless it is given.
        base: Base of the logarithm of `lse`, "e" or "2", for the partial and the result.
        checked: When ranks compare their calls: True always, False never, None where that blocks no device.

    Returns:
        The merged partial, with `out` in the dtype in which it came.

    Raises:
        InputError: An argument cannot be served, or the ranks' calls differ.
        RankFailure: A rank is lost.

    >>> import attnmesh as am
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    >>> partial = am.attend(q, k, v)
    >>> torch.equal(merge_across(partial, None).out, partial.out)
    True
    """
    axis = axis_of(group)
    try:
        check_merge("merge_across", how, output)
        check_checked("merge_across", checked)
        _check(partial, wire, base)
    except InputError as error:
        call = MergedCall(_mesh_of(axis), how, _compares(partial, axis, how, checked), str)
        call.failed(error, lambda: send_poison(axis, how, output))
        raise
    out, lse = partial
    natural = lse if base == "e" else lse * BASES[base]
    if torch.compiler.is_compiling():
        dtype = str(wire or "").removeprefix("torch.")
        merged = Partial(*merge_op(out, natural, axis.group_name, [axis.size, axis.index], how, output, dtype))
    else:
        merged = _merged(Partial(out, natural), axis, how, output, wire, checked)
    return merged if base == "e" else Partial(merged.out, merged.lse / BASES[base])


@torch.library.custom_op("attnmesh::merge_across", mutates_args=())
def merge_op(
    out: Tensor, lse: Tensor, group: str, place: Sequence[int], how: str, output: str, wire: str
) -> tuple[Tensor, Tensor]:
    """Run the merge as an operator, which is one node of a compiled graph."""
    dtype = getattr(torch, wire) if wire else None
    return _merged(Partial(out, lse), Axis(place[0], place[1], group_named(group)), how, output, dtype)


@merge_op.register_fake
def _(out: Tensor, lse: Tensor, group: str, place: Sequence[int], how: str, output: str, _: str) -> Partial:
    heads = Axis(place[0], place[1]).share_of(out.shape[1]) if output == "heads" else slice(0, out.shape[1])
    return Partial(*(x.new_empty(x[:, heads].shape) for x in (out, lse)))


def _merged(
    partial: Partial, axis: Axis, how: str, output: str, wire: torch.dtype | None, checked: bool | None = None
) -> Partial:
    """Return the merge in tensors of its own."""
    shape, dtype = list(partial.out.shape), partial.out.dtype
    text = describe_call("merge_across", out=shape, dtype=dtype, how=how, output=output, wire=wire)
    compares = axis.size > 1 and may_compare(partial.lse.device) and _compares(partial, axis, how, checked)
    call = MergedCall(_mesh_of(axis), how, compares, lambda: text)
    call.before()
    checksum = checksum_of(crc32(text.encode()), partial.lse)
    (out, lse), checksum = merge_ranks(partial, checksum, axis, how, output, wire)
    if compares:
        call.after(checksum, "merge_across")
    else:  # ranks whose calls differ get NaN
        out = torch.where(checksum.sum() == 0, out, torch.nan)
    return Partial(*(x.to(like.dtype, copy=True).contiguous() for x, like in ((out, partial.out), (lse, partial.lse))))


def _compares(partial: object, axis: Axis, how: str, checked: bool | None) -> bool:
    """Return whether the host reads the merged checksum: by default where that blocks no device."""
    if checked is None and how != "allreduce":
        lse = partial[-1] if isinstance(partial, tuple) and partial else None
        blocks = use_triton(lse) if isinstance(lse, Tensor) else device_type_of(axis.group) == "cuda"
        return not blocks
    return checked is not False


def _mesh_of(axis: Axis) -> Mesh:
    """Return a mesh of one axis."""
    return Mesh(Axis(), Axis(), axis)


def axis_of(group: Any) -> Axis:
    """Return the axis of a process group, or of a mesh of one axis."""
    if group is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            given, fix = (
                f"None in a world of {dist.get_world_size()} ranks",
                "pass dist.group.WORLD to mean all of them",
            )
            raise MeshError("merge_across group", "a process group", given, fix)
        return Axis()
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            fix = 'pass one axis of it, as mesh["keys"]'
            raise MeshError("merge_across group", "a process group or a mesh of one axis", str(group), fix)
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        fix = "pass dist.group.WORLD, mesh.get_group(axis), or None for one rank"
        raise MeshError("merge_across group", "a process group that holds this rank", type(group).__name__, fix)
    return Axis(group.size(), group.rank(), group)


def _check(partial: Partial, wire: torch.dtype | None, base: str) -> None:
    if not (isinstance(partial, tuple) and len(partial) == 2 and all(isinstance(x, Tensor) for x in partial)):
        given, fix = type(partial).__name__, "pass what attend returned, or Partial(out, lse)"
        raise DtypeError("merge_across", "a partial (out, lse)", given, fix)
    out, lse = partial
    check_tensor("merge_across out", out)
    check_tensor("merge_across lse", lse)
    check_one_device("merge_across", {"out": out, "lse": lse})
    if not out.is_floating_point() or lse.dtype != sum_dtype(out.dtype):
        given = f"out {out.dtype}, lse {lse.dtype}"
        raise DtypeError("merge_across", "out in floats and lse in float32, or both in float64", given, "cast lse")
    if out.ndim != 4 or lse.shape != out.shape[:-1]:
        expected, given = "out (batch, heads, length, dim) and its lse", f"{tuple(out.shape)} and {tuple(lse.shape)}"
        raise ShapeError("merge_across", expected, given, "put the heads before the length")
    if torch.is_grad_enabled() and (out.requires_grad or lse.requires_grad):
        fix = "call it under torch.no_grad(), or train with attention"
        raise KernelError("merge_across", "a partial without gradients", "one that asks for them", fix)
    if wire is not None and (not isinstance(wire, torch.dtype) or str(wire).removeprefix("torch.") not in DTYPES):
        expected = f"None or one of {', '.join(DTYPES)}"
        raise DtypeError("merge_across wire", expected, repr(wire), "leave it out for float32")
    if not isinstance(base, str) or base not in BASES:
        fix = 'pass "2" if the engine took base-2 logarithms'
        raise KernelError("merge_across base", "one of 'e', '2'", repr(base), fix)
