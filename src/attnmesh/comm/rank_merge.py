"""Merges of partials across ranks, by a record of `comm/merges.py`. Each rank has checked its own call."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.comm.merges import MERGES, OUTPUTS, Merge, PartialWithChecksum, canonical_merge, merge_of_own_heads
from attnmesh.comm.message import MessageForm
from attnmesh.comm.mismatch import POISON, UNEQUAL_CHECKSUM, CallsDifferError
from attnmesh.comm.transport import agreed_transport
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.errors import KernelError
from attnmesh.kernels.stacked_merge import writes_nan
from attnmesh.mesh.axes import Axis, device_type_of
from attnmesh.runtime.counters import timed_merge
from attnmesh.runtime.world import collective_once


class RequestedMerge(NamedTuple):
    """The merge that a call asks for, along an axis."""

    axis: Axis
    name: str
    """Name of the merge, or "auto", as `how` of `merge_across`."""
    output: str
    """Heads of the result, as `output` of `merge_across`."""
    wire: torch.dtype | None = None
    """Dtype in which `out` travels; None for the dtype in which partials are summed."""
    reproducible: bool = False
    """True to merge even ranks with odd ranks in the last round. False to merge ranks of a host first."""

    def run(self, partial: Partial, checksum: Tensor, message: Tensor | None = None) -> tuple[Partial, Tensor]:
        """Return the merged partial of all ranks, and their highest checksum. `out` is NaN if checksums differ.

        Args:
            partial: Attention over this rank's keys.
            checksum: Checksum of the call, as `checksum_of` returns it.
            message: A message that already holds the checksum and the partial.
        """
        if self.axis.size == 1:
            return partial, checksum
        try:
            return self._run_or_raise(partial, checksum, message)
        except CallsDifferError:  # of a peer that compares its call: the caller sees unequal calls, and compares too
            checksum = torch.full_like(checksum, UNEQUAL_CHECKSUM)
            return nan_unless_equal(self.output_of(partial), checksum), checksum

    def _run_or_raise(self, partial: Partial, checksum: Tensor, message: Tensor | None) -> tuple[Partial, Tensor]:
        """Return what `run` returns. Raise `CallsDifferError` if a peer compares its call.

        That may happen in the merge, or before the first one, when ranks time all merges.
        """
        merge = self.agreed_merge(checksum.device)
        transport = agreed_transport(self.axis, checksum.device)
        dtype = sum_dtype(partial.out.dtype)
        form = MessageForm(tuple(partial.out.shape), dtype, self.wire if self.wire and merge.is_packed else dtype)
        # A rank that expects a shorter message cannot receive this one: compare checksums in a short message first.
        if merge.detects_mismatch and form.size > transport.max_mismatch_bytes:
            compared = self.merge_checksums(checksum)
            if float(compared.sum()) != 0:
                return nan_unless_equal(self.output_of(partial), compared), compared
        form = transport.form_of(form, merge)
        with timed_merge():
            if self.output == "heads" and merge.sends_own_heads and not transport.merges_all_heads(form):
                checksum, merged = send_heads(partial, checksum, form, self.axis)
                return nan_unless_equal(merged, checksum), checksum
            message = form.pack(checksum, partial) if message is None else message
            checksum, merged = merge.run(transport, message, form, self.reproducible)
        merged = self.output_of(merged)
        has_nan_already = writes_nan(merged.lse) and merge.is_packed
        return (merged if has_nan_already else nan_unless_equal(merged, checksum)), checksum

    def output_of(self, partial: Partial) -> Partial:
        """Return views of the heads of a merged partial that this rank gets."""
        heads = self.axis.slice_of(partial.out.shape[1]) if self.output == "heads" else slice(None)
        return Partial(partial.out[:, heads], partial.lse[:, heads])

    def merge_checksums(self, checksum: Tensor) -> Tensor:
        """Merge empty partials, and return the maximum of the checksums of all ranks."""
        nothing = Partial(checksum.new_zeros(1, 0, 0, 1), checksum.new_zeros(1, 0, 0))
        merge = self._replace(wire=None) if self.wire else self
        return merge.run(nothing, checksum)[1]

    def send_poison(self, like: Tensor | None = None) -> Tensor:
        """Take part in the merge with an empty partial and `POISON`, and return the merged checksum.

        The other ranks, which wait in the merge for this rank, find that it has an error. `like` has the device and
        dtype of checksums. Fields other than `axis` may be invalid, as the error may be about them.
        """
        like = torch.empty(0, device=device_type_of(self.axis.group), dtype=torch.float32) if like is None else like
        name = self.name if self.name in [*MERGES] else "auto"  # a list: what was passed may have no hash
        output = self.output if self.output in OUTPUTS else OUTPUTS[0]
        valid = RequestedMerge(self.axis, name, output, reproducible=self.reproducible)
        return valid.merge_checksums(like.new_full((2,), POISON))

    @collective_once
    def agreed_merge(self, device: torch.device) -> Merge:
        """Return the record of the name, or of the merge that "auto" stands for. Collective at its first call.

        Ranks find the fastest merge whatever the name is. If rank A passes "auto" and rank B "tree", A would otherwise
        wait for B in the trials.
        """
        name, fastest = self.name, agreed_transport(self.axis, device).agreed_fastest()
        if self.reproducible and not (name in MERGES and MERGES[name].is_canonical):
            return canonical_merge()
        if name != "auto":
            if name not in MERGES:
                raise KernelError("merge", f"auto or one of {', '.join(MERGES)}", repr(name), "pass one of these")
            return MERGES[name]
        return merge_of_own_heads() if self.output == "heads" else fastest


def nan_unless_equal(partial: Partial, checksum: Tensor) -> Partial:
    """Return the partial, with NaN for `out` if the merged checksum says that calls differ. The CPU reads nothing."""
    return Partial(torch.where(checksum.sum() == 0, partial.out, torch.nan), partial.lse)


def send_heads(partial: Partial, checksum: Tensor, form: MessageForm, axis: Axis) -> PartialWithChecksum:
    """Send each rank the partials of its heads. Return the merge of this rank's own heads."""
    heads_by_rank = [Axis(axis.size, rank).slice_of(form.shape[1]) for rank in range(axis.size)]
    forms = [replace(form, shape=(form.shape[0], part.stop - part.start, *form.shape[2:])) for part in heads_by_rank]
    parts = [Partial(*(x[:, heads] for x in partial)) for heads in heads_by_rank]
    messages = [form.pack(checksum, part) for form, part in zip(forms, parts, strict=True)]
    return forms[axis.index].merge(agreed_transport(axis, checksum.device).all_to_all(messages))


def highest_checksum(checksum: Tensor, axis: Axis) -> Tensor:
    """Return the maximum of the checksums of all ranks of an axis."""
    try:
        checksums = agreed_transport(axis, checksum.device).all_to_all([checksum.view(torch.uint8)] * axis.size)
    except CallsDifferError:  # of a peer that compares its call: the caller sees unequal calls, and compares too
        return torch.full_like(checksum, UNEQUAL_CHECKSUM)
    return checksums.view(checksum.dtype).amax(0)
