"""`merge_across`: partials of any engine that returns `out` and `lse`, merged across ranks by `comm/rank_merge.py`."""

import math
from collections.abc import Sequence
from functools import partial as partial_of
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.checks.argument_checks import (
    check_compare_option,
    check_dtype,
    check_one_device,
    check_tensor,
)
from attnmesh.comm.host_merge import HostMerge, agreed_host_merge
from attnmesh.comm.merges import MERGES, OUTPUTS, check_merge
from attnmesh.comm.mismatch import checksum_of, question_like
from attnmesh.comm.rank_merge import RequestedMerge
from attnmesh.core.partial import DTYPE_NAMES, Partial, sum_dtype
from attnmesh.errors import DeviceError, DtypeError, InputError, KernelError, ShapeError, check_choice
from attnmesh.guard.agreement import Agreement, CallGuard, agree_on_merges
from attnmesh.guard.call_text import describe_call, hash_of_call
from attnmesh.guard.merge_agreement import MergeAgreement, MergeDescription
from attnmesh.kernels.traced import are_plain
from attnmesh.mesh.axes import Axis, axis_of, device_type_of, group_named, mesh_of_axis
from attnmesh.runtime.operators import custom_operator
from attnmesh.runtime.world import cached_per_world

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

    Partials have no gradients here. Ranks whose calls differ all raise the same error, or get NaN as `out` where calls
    are not compared: with `checked=False`, in CUDA graphs, and by default on GPUs after the first call of a signature.

    Args:
        partial: `out` (batch, heads, length, dim) and `lse` (batch, heads, length) of this rank's keys.
        group: A process group, a mesh of one axis, or None for a single rank.
        how: "tree", "direct", "gather", "allreduce" or "auto".
        output: "replicated", the same bits on every rank; or "heads", the i-th share of the heads on rank i, as
            `torch.tensor_split` cuts them.
        wire: Dtype in which `out` travels: float32 or wider unless it is given.
        base: Base of the logarithm of `lse`, "e" or "2", for the partial and the result.
        checked: When ranks compare their calls: True always, False never, None always on CPUs, and on GPUs at the first
            call of each signature.

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
    axis = axis_of(group, "merge_across")
    if (
        is_plain(partial, how, output, wire, base, checked)
        and (merge_and_text := agreed_host_merge_and_text(axis, partial[0].shape, how, output)) is not None
    ):
        return merge_as_one_call(Partial(*partial), *merge_and_text, output, is_compared=checked is not False)
    merge = RequestedMerge(axis, how, output, wire)
    try:
        check_merge("merge_across", how, output)
        check_compare_option("merge_across", checked)
        check_partial(partial, wire, base)
    except InputError as error:
        merge_agreement(partial, merge, checked).raise_through_merge(error)
    out, lse = partial
    natural = lse if base == "e" else lse * BASES[base]
    if torch.compiler.is_compiling():
        dtype = str(wire or "").removeprefix("torch.")
        out, lse = merge_op(out, natural, axis.group_name, [axis.size, axis.index], how, output, dtype, checked)
    else:
        out, lse = _merge(merge_agreement(partial, merge, checked), Partial(out, natural), merge, base)
    return Partial(out, lse if base == "e" else lse / BASES[base])


@cached_per_world(1024)
def agreed_host_merge_and_text(
    axis: Axis, shape: tuple[int, ...], merge_name: str, output: str
) -> tuple[HostMerge, str] | None:
    """Return the native merge of partials of this shape, and the text that ranks compare; None if there is none.

    Collective at its first call along an axis. On an axis of GPUs it returns None at once: rank A may know the call and
    be in its merge already, where it would join no exchange of rank B.
    """
    if axis.size == 1 or merge_name not in ("auto", *MERGES) or _merges_on_gpus(axis):
        return None
    agree_on_merges(axis)
    merge = RequestedMerge(axis, merge_name, output)
    host_merge = agreed_host_merge(axis, tuple(shape), merge.agreed_merge(torch.device("cpu")))
    return None if host_merge is None else (host_merge, describe_merge(shape, torch.float32, merge))


def _merges_on_gpus(axis: Axis) -> bool:
    """Return whether partials of this axis are expected on GPUs. A default group names NCCL without any GPU, too."""
    return device_type_of(axis.group) == "cuda" and torch.cuda.is_available()


def merge_agreement(partial: object, merge: RequestedMerge, checked: bool | None = None) -> MergeAgreement:
    """Return the agreement on a merge. The partial need not be valid."""
    axis = merge.axis
    device_types = {x.device.type for x in partial if isinstance(x, Tensor)} if isinstance(partial, tuple) else set()
    # A partial that is not valid may have tensors anywhere: one on a GPU or a CPU tells where those of other ranks are.
    device = torch.device(next((x for x in ("cuda", "cpu") if x in device_types), device_type_of(axis.group)))
    poison = partial_of(_send_poison, merge)
    return MergeAgreement(_guard_along(axis), device, merge.name, checked, "merge_across", poison)


def _send_poison(merge: RequestedMerge) -> None:
    """Take part in a merge with poison. On CPUs ranks prepare their merges first, as the others do in this call."""
    if device_type_of(merge.axis.group) == "cpu":
        agree_on_merges(merge.axis)
    merge.send_poison()


def _fake_merge(
    out: Tensor, lse: Tensor, group: str, size_and_index: Sequence[int], merge_name: str, output: str, *_: Any
) -> Partial:
    size, index = size_and_index
    merged = RequestedMerge(Axis(size, index), merge_name, output).output_of(Partial(out, lse))
    return Partial(*(x.new_empty(x.shape) for x in merged))


@custom_operator("merge_across", _fake_merge)
def merge_op(
    out: Tensor,
    lse: Tensor,
    group: str,
    size_and_index: Sequence[int],
    merge_name: str,
    output: str,
    wire: str,
    checked: bool | None,
) -> tuple[Tensor, Tensor]:
    """Run the merge as an operator, which is one node of a compiled graph."""
    partial = Partial(out, lse)
    axis = Axis(size_and_index[0], size_and_index[1], group_named(group))
    merge = RequestedMerge(axis, merge_name, output, getattr(torch, wire) if wire else None)
    return _merge(merge_agreement(partial, merge, checked), partial, merge)


def _merge(agreement: MergeAgreement, partial: Partial, merge: RequestedMerge, base: str = "e") -> Partial:
    """Return the merge, in new tensors: an operator may not return its arguments."""
    axis, device = merge.axis, partial.lse.device
    text = describe_merge(partial.out.shape, partial.out.dtype, merge, base, device.type)
    send_question = None
    if merge.name == "auto" or MERGES[merge.name].is_packed:
        send_question = partial_of(_ask, merge, partial.lse.new_empty(0), partial.out.shape)
    description = MergeDescription(text, text, send_question)
    if not agreement.compare_before_merge(description):
        out, lse = merge.output_of(partial)
        return Partial(torch.full_like(out, torch.nan), lse.clone())
    if axis.size > 1 and device.type == "cpu":
        agree_on_merges(axis)
    try:
        merged, checksum = merge.run(partial, checksum_of(hash_of_call(text), partial.lse))
    except Exception as error:
        agreement.raise_through_merge(error)
    if axis.size > 1:
        agreement.check_merged(description, checksum)
    pairs = zip(merged, partial, strict=True)
    return Partial(*(x.to(like.dtype, copy=True).contiguous() for x, like in pairs))


@cached_per_world()
def _guard_along(axis: Axis) -> CallGuard:
    """Return the guard of the merges along an axis whose checksums stay on the device."""
    return CallGuard(mesh_of_axis(axis), torch.device(device_type_of(axis.group)), None)


def _ask(merge: RequestedMerge, lse: Tensor, shape: Sequence[int]) -> Tensor:
    """Take part in a merge with no keys, and a question for a checksum. Return the merged checksum."""
    nothing = Partial(lse.new_zeros(shape), lse.new_full(shape[:-1], -torch.inf))
    return merge.run(nothing, question_like(lse))[1]


def is_plain(partial: object, merge_name: object, output: object, wire: object, base: object, checked: object) -> bool:
    """Return True for a partial in float32 on the CPU, with its lse, and the usual options."""
    usual = isinstance(merge_name, str) and output in OUTPUTS and wire is None and base == "e"
    if not usual or type(checked) not in (bool, type(None)):
        return False
    if not isinstance(partial, tuple) or len(partial) != 2 or not are_plain(*partial):
        return False
    out, lse = partial
    fits: bool = out.dtype == lse.dtype == torch.float32 and out.ndim == 4 and lse.shape == out.shape[:-1]
    return fits


def merge_as_one_call(partial: Partial, host_merge: HostMerge, text: str, output: str, *, is_compared: bool) -> Partial:
    """Return the merge in new tensors, by one native call. Ranks compare `text`."""
    message, _, merged = host_merge.blank_message()
    assert message is not None
    assert merged is not None
    merged.out.copy_(partial.out)
    merged.lse.copy_(partial.lse)
    if not host_merge.run(message, hash_of_call(text)):
        if is_compared:
            Agreement(mesh_of_axis(host_merge.axis), "merge_across", text).raise_unequal()
        merged.out.fill_(torch.nan)  # ranks whose calls differ get NaN
    heads = host_merge.heads_of_output(output)
    return merged if heads is None else Partial(*(x[:, heads].contiguous() for x in merged))


def check_partial(partial: Partial, wire: torch.dtype | None, base: str) -> None:
    """Raise unless `merge_across` serves these arguments."""
    if not (isinstance(partial, tuple) and len(partial) == 2 and all(isinstance(x, Tensor) for x in partial)):
        fix = "pass what attend returned, or Partial(out, lse)"
        raise DtypeError("merge_across", "a partial (out, lse)", type(partial).__name__, fix)
    out, lse = partial
    check_tensor("merge_across out", out)
    check_tensor("merge_across lse", lse)
    check_one_device("merge_across", {"out": out, "lse": lse})
    if out.is_meta:
        fix = "compute it on the ranks' device"
        raise DeviceError("merge_across", "a partial with values", "one on the meta device", fix)
    is_float = str(out.dtype).removeprefix("torch.") in DTYPE_NAMES
    if not is_float or lse.dtype != sum_dtype(out.dtype):
        given = f"out {out.dtype}, lse {lse.dtype}"
        fix = "cast lse" if is_float else f"cast out to one of {', '.join(DTYPE_NAMES)}"
        raise DtypeError("merge_across", "out in floats and lse in float32, or both in float64", given, fix)
    if out.ndim != 4 or lse.shape != out.shape[:-1]:
        expected, given = "out (batch, heads, length, dim) and its lse", f"{tuple(out.shape)} and {tuple(lse.shape)}"
        raise ShapeError("merge_across", expected, given, "add missing dims, and put the heads before the length")
    if torch.is_grad_enabled() and (out.requires_grad or lse.requires_grad):
        fix = "call it under torch.no_grad(), or train with attention"
        raise KernelError("merge_across", "a partial without gradients", "one with requires_grad=True", fix)
    check_dtype("merge_across wire", wire, "leave it out for float32")
    check_choice("merge_across base", base, BASES, 'pass "2" if the engine took base-2 logarithms')


def describe_merge(
    shape: tuple[int, ...], dtype: torch.dtype, merge: RequestedMerge, base: str = "e", device: str = "cpu"
) -> str:
    """Return the text that ranks compare, of a call with a partial of this shape and dtype."""
    options = {"how": merge.name, "output": merge.output, "wire": merge.wire, "base": base}
    return describe_call("merge_across", device=device, out=list(shape), dtype=dtype, **options)
