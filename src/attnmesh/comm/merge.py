"""Merge partials across ranks, once the ranks have checked their calls.

A merge sends one message a step, of a size that does not depend on the context.

"tree"         halves exchange what they hold, inside hosts first: ceil(log2 p) exchanges
"direct"       every rank sends to every other: one exchange and one merge; one launch on GPUs of one host
"gather"       the same by an all-gather
"allreduce"    maximum, numerator and denominator by three all-reduces: the paper's Algorithm 3, a baseline
"""

from dataclasses import replace

import torch
from torch import Tensor

from attnmesh.comm.merge_messages import (
    chosen_merge,
    is_one_call,
    merge_by_allreduce,
    merge_messages,
    send_heads,
)
from attnmesh.comm.message import PartialMessage
from attnmesh.comm.shared_memory import DIFFERENT, SLOT, CallsDifferError
from attnmesh.comm.symmetric_memory import symmetric_memory_of
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.kernels.merge import use_triton
from attnmesh.mesh.axes import Axis, device_type_of
from attnmesh.mesh.merges import COLLECTIVE, MERGE_CHOICES, OUTPUTS
from attnmesh.runtime.counters import timed_merge


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
    has_nan_already = use_triton(merged.lse) and how != "allreduce"
    return (merged if has_nan_already else nan_unless_equal(merged, checksum)), checksum


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
