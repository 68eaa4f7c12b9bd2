"""Merge partials across ranks: `merge_across` for any engine that returns `out` and `lse`, `merge_ranks` for decode.

A merge sends one message a step, of a size that does not depend on the context.

"tree"         halves exchange what they hold, inside hosts first: ceil(log2 p) exchanges
"direct"       every rank sends to every other: one exchange and one merge; one launch on GPUs of one host
"gather"       the same by an all-gather
"allreduce"    maximum, numerator and denominator by three all-reduces: the paper's Algorithm 3, a baseline
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial as partial_of
from typing import NoReturn
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.consensus import CallChecker, asks, may_compare
from attnmesh.comm.host_merge import HostMerge, host_merge_for, is_plain, merge_as_one_call
from attnmesh.comm.merge_checks import (
    BASES,
    MERGE_CHOICES,
    OUTPUTS,
    MergeChecker,
    call_text,
    check_merge,
    check_partial,
    mesh_of,
)
from attnmesh.comm.merge_messages import (
    chosen_merge,
    is_one_call,
    merge_by_allreduce,
    merge_messages,
    send_heads,
)
from attnmesh.comm.message import PartialMessage, checksum_of, question_like
from attnmesh.comm.shared_memory import DIFFERENT, SLOT, CallsDifferError
from attnmesh.comm.symmetric_memory import symmetric_memory_of
from attnmesh.core.checks import check_checked
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.errors import InputError
from attnmesh.kernels.merge import use_triton
from attnmesh.mesh.axes import Axis, axis_of, device_type_of, group_named
from attnmesh.mesh.merges import COLLECTIVE
from attnmesh.runtime.counters import timed_merge
from attnmesh.runtime.world import cached_per_world


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
    compared: with `checked=False`, and by default on GPUs after the first call of a kind.

    Args:
        partial: `out` (batch, heads, length, dim) and `lse` (batch, heads, length) of this rank's keys.
        group: A process group, a mesh of one axis, or None for a single rank.
        how: "tree", "direct", "gather", "allreduce" or "auto".
        output: "replicated", the same bits on every rank; or "heads", the i-th share of the heads on rank i, as
            `torch.tensor_split` cuts them.
        wire: Dtype in which `out` travels: float32 or wider unless it is given.
        base: Base of the logarithm of `lse`, "e" or "2", for the partial and the result.
        checked: When ranks compare their calls: True always, False never, None always on CPUs, and on GPUs at the first
            call of each kind.

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
        and (found := host_merge_and_text(axis, partial[0].shape, how, output)) is not None
    ):
        return merge_as_one_call(Partial(*partial), *found, output, compares=checked is not False)
    try:
        check_merge("merge_across", how, output)
        check_checked("merge_across", checked)
        check_partial(partial, wire, base)
    except InputError as error:
        raise_alike(error, partial, axis, how, output, checked)
    out, lse = partial
    natural = lse if base == "e" else lse * BASES[base]
    if torch.compiler.is_compiling():
        dtype = str(wire or "").removeprefix("torch.")
        out, lse = merge_op(out, natural, axis.group_name, [axis.size, axis.index], how, output, dtype)
    else:
        out, lse = _merge(Partial(out, natural), axis, how, output, wire, checked, base)
    return Partial(out, lse if base == "e" else lse / BASES[base])


@cached_per_world(1024)
def host_merge_and_text(axis: Axis, shape: tuple[int, ...], how: str, output: str) -> tuple[HostMerge, str] | None:
    """Return the native merge of partials of this shape, and the text that ranks compare; None if there is none.

    The first call along an axis is collective.
    """
    if axis.size == 1 or how not in MERGE_CHOICES:
        return None
    merge = host_merge_for(axis, tuple(shape), chosen_merge(axis, how, output, torch.device("cpu")))
    return None if merge is None else (merge, call_text(shape, torch.float32, how, output))


def raise_alike(
    error: InputError, partial: object, axis: Axis, how: str, output: str, checked: bool | None = None
) -> NoReturn:
    """Raise this rank's error of a merge, on all ranks if they compare their calls."""
    given = {x.device.type for x in partial if isinstance(x, Tensor)} if isinstance(partial, tuple) else set()
    # The other ranks' tensors are where this rank's are, if one of these is where tensors can be merged.
    device = torch.device(next((x for x in ("cuda", "cpu") if x in given), device_type_of(axis.group)))
    poison, compares = partial_of(send_poison, axis, how, output), checked is not False
    if not _ranks_ask(axis, device):
        MergeChecker(mesh_of(axis), how, compares, str).report(error, poison)
    elif axis.size > 1 and may_compare(device):
        _asker(axis).report(error, poison, compares=compares)
    raise error


@torch.library.custom_op("attnmesh::merge_across", mutates_args=())
def merge_op(
    out: Tensor, lse: Tensor, group: str, place: Sequence[int], how: str, output: str, wire: str
) -> tuple[Tensor, Tensor]:
    """Run the merge as an operator, which is one node of a compiled graph."""
    dtype = getattr(torch, wire) if wire else None
    return _merge(Partial(out, lse), Axis(place[0], place[1], group_named(group)), how, output, dtype)


@merge_op.register_fake
def _(out: Tensor, lse: Tensor, group: str, place: Sequence[int], how: str, output: str, _: str) -> Partial:
    heads = Axis(place[0], place[1]).share_of(out.shape[1]) if output == "heads" else slice(0, out.shape[1])
    return Partial(*(x.new_empty(x[:, heads].shape) for x in (out, lse)))


def _merge(
    partial: Partial,
    axis: Axis,
    how: str,
    output: str,
    wire: torch.dtype | None,
    checked: bool | None = None,
    base: str = "e",
) -> Partial:
    """Return the merge in new tensors."""
    device = partial.lse.device
    text = call_text(partial.out.shape, partial.out.dtype, how, output, wire, base, device.type)
    compares = axis.size > 1 and checked is not False and may_compare(device)
    checker = MergeChecker(mesh_of(axis), how, compares, lambda: text)
    asker = _asker(axis) if axis.size > 1 and _ranks_ask(axis, device) else None
    if asker is None:
        checker.before()
    elif compares and (checked or how == "allreduce" or text not in asker.kinds) and not asker.ask(text):
        return _nan_like(partial, axis, output)
    checksum = checksum_of(crc32(text.encode()), partial.lse)
    merged, checksum = merge_ranks(partial, checksum, axis, how, output, wire)
    if asker is not None and text != asker.last_kind:
        like = partial.out.new_empty(0), partial.lse.new_empty(0), partial.out.shape
        asker.learn(text, None if how == "allreduce" else partial_of(_ask_in_merge, *like, axis, how, output, wire))
    if compares and asker is None:
        checker.after(checksum, "merge_across")
    pairs = zip(merged, partial, strict=True)
    return Partial(*(x.to(like.dtype, copy=True).contiguous() for x, like in pairs))


@cached_per_world()
def _asker(axis: Axis) -> CallChecker:
    """Return the record of the merges along an axis that no host looks at."""
    return CallChecker(mesh_of(axis), torch.device(device_type_of(axis.group)), None)


def _ranks_ask(axis: Axis, device: torch.device) -> bool:
    """Return whether ranks ask before they compare a merge on a device: also if the last one was on another."""
    return asks(device) or _asker(axis).last_exchange is not None


def _ask_in_merge(
    out: Tensor, lse: Tensor, shape: Sequence[int], axis: Axis, how: str, output: str, wire: torch.dtype | None
) -> Tensor:
    """Take part in a merge with no keys, and a question for a checksum. Return the merged checksum."""
    nothing = Partial(out.new_zeros(shape), lse.new_full(shape[:-1], -torch.inf))
    return merge_ranks(nothing, question_like(lse), axis, how, output, wire)[1]


def _nan_like(partial: Partial, axis: Axis, output: str) -> Partial:
    heads = axis.share_of(partial.out.shape[1]) if output == "heads" else slice(None)
    return Partial(torch.full_like(partial.out[:, heads], torch.nan), partial.lse[:, heads].clone())


# --- partials of a step of decoding, and of `merge_across` once its arguments are checked ---


def merge_ranks(
    partial: Partial,
    checksum: Tensor,
    axis: Axis,
    how: str,
    output: str,
    wire: torch.dtype | None = None,
    *,
    canonical: bool = False,
    message: Tensor | None = None,
) -> tuple[Partial, Tensor]:
    """Return the merge of the partials of all ranks, and the maximum of their checksums. `out` is NaN if these differ.

    Args:
        partial: Attention over this rank's keys.
        checksum: Checksum of the call, as `checksum_of` returns it.
        axis: The ranks that merge.
        how, output, wire: As in `merge_across`.
        canonical: Merge even ranks with odd ranks last, as in `decode(reproducible=True)`. Otherwise ranks of a host
            merge first.
        message: A message that already holds the checksum and the partial.
    """
    if axis.size == 1:
        return partial, checksum
    heads = axis.share_of(partial.out.shape[1]) if output == "heads" else slice(None)
    own = Partial(*(x[:, heads] for x in partial))
    dtype = sum_dtype(partial.out.dtype)
    form = PartialMessage(tuple(partial.out.shape), dtype, wire or dtype)
    try:
        how = chosen_merge(axis, how, output, checksum.device)
        # A rank that expects a shorter message cannot receive this one: compare checksums in a short message first.
        if how not in COLLECTIVE and form.size > SLOT and checksum.device.type == "cpu":
            compared = exchange_checksums(axis, how, output, checksum, canonical=canonical)
            if float(compared.sum()) != 0:
                return nan_unless_equal(own, compared), compared
        with timed_merge():
            shared = (
                symmetric_memory_of(axis, checksum.device) if how == "direct" and form.lse == torch.float32 else None
            )
            if shared is not None and (wide_form := replace(form, out=form.lse)).size <= shared.longest:
                form = wide_form
                message = form.message(checksum, partial) if message is None else message
                checksum, whole = shared.merge(message, form.shape)
            elif how == "direct" and output == "heads" and not is_one_call(form, axis, checksum.device):
                own, checksum = send_heads(partial, checksum, form, axis)
                return nan_unless_equal(own, checksum), checksum
            elif how == "allreduce":
                checksum, whole = merge_by_allreduce(partial, checksum, form, axis)
            else:
                message = form.message(checksum, partial) if message is None else message
                checksum, whole = merge_messages(message, form, axis, how, canonical)
    except CallsDifferError:  # the ranks that compare their calls wait for this one
        checksum = torch.full_like(checksum, DIFFERENT)
        return nan_unless_equal(own, checksum), checksum
    merged = Partial(*(x[:, heads] for x in whole))
    by_kernel = use_triton(merged.lse) and how != "allreduce"
    return (merged if by_kernel else nan_unless_equal(merged, checksum)), checksum


def nan_unless_equal(partial: Partial, checksum: Tensor) -> Partial:
    """Return the partial, with NaN for `out` if the checksums of the ranks differ. The host reads nothing."""
    return Partial(torch.where(checksum.sum() == 0, partial.out, torch.nan), partial.lse)


def exchange_checksums(axis: Axis, how: str, output: str, checksum: Tensor, *, canonical: bool = False) -> Tensor:
    """Merge empty partials, and return the maximum of the checksums of all ranks."""
    nothing = Partial(checksum.new_zeros(1, 0, 0, 1), checksum.new_zeros(1, 0, 0))
    return merge_ranks(nothing, checksum, axis, how, output, canonical=canonical)[1]


def send_poison(axis: Axis, how: str, output: str, like: Tensor | None = None, *, canonical: bool = False) -> Tensor:
    """Run the merge with an empty partial and an invalid checksum, and return the checksum.

    The other ranks then detect this rank's error instead of hanging. `like` has the device and dtype of checksums.
    """
    like = torch.empty(0, device=device_type_of(axis.group)) if like is None else like
    how, output = (given if given in known else "auto" for given, known in ((how, MERGE_CHOICES), (output, OUTPUTS)))
    return exchange_checksums(axis, how, output, like.new_full((2,), torch.inf), canonical=canonical)
