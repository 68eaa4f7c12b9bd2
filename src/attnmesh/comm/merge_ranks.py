"""Merge partials across ranks: one message a step, of a size that does not depend on the context.

"tree"         halves exchange what they hold, inside hosts first: ceil(log2 p) exchanges
"direct"       every rank sends to every other: one exchange and one merge; one launch on GPUs of one host
"gather"       the same by an all-gather
"allreduce"    maximum, numerator and denominator by three all-reduces: the paper's Algorithm 3, a baseline
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.consensus import agree, raise_checksum_mismatch
from attnmesh.comm.counters import count_messages, merging
from attnmesh.comm.failures import collective
from attnmesh.comm.message import PartialMessage
from attnmesh.comm.p2p import all_to_all_bytes, tree_exchange
from attnmesh.comm.shared_memory import SLOT
from attnmesh.comm.symmetric_memory import symmetric_memory_of
from attnmesh.comm.topology import best_merge, mailboxes_of, rounds
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.errors import InputError, KernelError
from attnmesh.mesh.axes import Axis, Mesh, device_type_of


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
    """Return the merge of the partials of all ranks, and the maximum of their checksums.

    With `canonical` the tree is that of `decode(reproducible=True)`: even ranks against odd ranks at the top. Otherwise
    ranks of a host merge first. `message`, if given, already holds the checksum and the partial.
    """
    if axis.size == 1:
        return partial, checksum
    dtype = sum_dtype(partial.out.dtype)
    form = PartialMessage(tuple(partial.out.shape), dtype, wire or dtype)
    best = best_merge(axis, checksum.device)  # the first call is an all-gather: every rank makes it, whatever its `how`
    if how == "auto":
        how = "direct" if output == "heads" else best
    # A rank that expects a shorter message cannot receive this one: compare checksums in a short message first.
    if how not in COLLECTIVE and form.size > SLOT and checksum.device.type == "cpu":
        compared = exchange_checksums(axis, how, output, checksum, canonical=canonical)
        if float(compared.sum()) != 0:
            return partial, compared
    with merging():
        shared = symmetric_memory_of(axis, checksum.device) if how == "direct" and form.lse == torch.float32 else None
        if shared is not None and (wide_form := replace(form, out=form.lse)).size <= shared.longest:
            form = wide_form
            message = form.message(checksum, partial) if message is None else message
            checksum, whole = shared.merge(message, form.shape)
        elif how == "direct" and output == "heads":
            return _to_each_its_heads(partial, checksum, form, axis)
        elif how == "allreduce":
            checksum, whole = _allreduce(partial, checksum, form, axis)
        else:
            message = form.message(checksum, partial) if message is None else message
            checksum, whole = MERGES[how](message, form, axis, canonical)
    heads = axis.share_of(form.shape[1]) if output == "heads" else slice(None)
    return Partial(*(x[:, heads] for x in whole)), checksum


def exchange_checksums(axis: Axis, how: str, output: str, checksum: Tensor, *, canonical: bool = False) -> Tensor:
    """Merge empty partials, and return the maximum of the checksums of all ranks."""
    nothing = Partial(checksum.new_zeros(1, 0, 0, 1), checksum.new_zeros(1, 0, 0))
    return merge_ranks(nothing, checksum, axis, how, output, canonical=canonical)[1]


def send_poison(axis: Axis, how: str, output: str, like: Tensor | None = None, *, canonical: bool = False) -> Tensor:
    """Run the merge with an empty partial and an invalid checksum, and return the checksum.

    The other ranks then detect this rank's error instead of hanging. `like` has the device and dtype of checksums.
    """
    like = torch.empty(0, device=device_type_of(axis.group)) if like is None else like
    how, output = (given if given in known else "auto" for given, known in ((how, HOW), (output, OUTPUTS)))
    return exchange_checksums(axis, how, output, like.new_full((2,), torch.inf), canonical=canonical)


def _tree(message: Tensor, form: PartialMessage, axis: Axis, canonical: bool) -> tuple[Tensor, Partial]:
    """Merge in rounds of pairs. The bits do not depend on which of two messages comes first."""
    steps = rounds(axis, canonical)[axis.index]
    whole = tree_exchange(message, steps, axis, form.join, mailboxes_of(axis, message.device))
    checksums, partials = form.read(whole[None])
    return checksums[0], Partial(partials.out[0].to(form.lse), partials.lse[0])


def _direct(message: Tensor, form: PartialMessage, axis: Axis, _: bool) -> tuple[Tensor, Partial]:
    return form.joined(all_to_all_bytes([message] * axis.size, axis, mailboxes_of(axis, message.device)))


def _to_each_its_heads(partial: Partial, checksum: Tensor, form: PartialMessage, axis: Axis) -> tuple[Partial, Tensor]:
    """Send each rank the partials of its own heads."""
    shares = [Axis(axis.size, rank).share_of(form.shape[1]) for rank in range(axis.size)]
    messages = [form.message(checksum, Partial(*(x[:, heads] for x in partial))) for heads in shares]
    mine = shares[axis.index]
    form = replace(form, shape=(form.shape[0], mine.stop - mine.start, *form.shape[2:]))
    checksum, partial = form.joined(all_to_all_bytes(messages, axis, mailboxes_of(axis, checksum.device)))
    return partial, checksum


def _gather(message: Tensor, form: PartialMessage, axis: Axis, _: bool) -> tuple[Tensor, Partial]:
    rows = list(message.new_empty(axis.size, len(message)))
    collective(axis, "merging", dist.all_gather, rows, message)
    count_messages(axis.size - 1, len(message))
    return form.joined(torch.stack(rows))


def _allreduce(partial: Partial, checksum: Tensor, form: PartialMessage, axis: Axis) -> tuple[Tensor, Partial]:
    """Merge by three all-reduces, as Algorithm 3 of Tree Attention does."""
    peaks = torch.cat([checksum, partial.lse.flatten()])
    collective(axis, "merging", dist.all_reduce, peaks, dist.ReduceOp.MAX)
    peak = peaks[2:].view(partial.lse.shape)
    weight = torch.exp(partial.lse - peak.masked_fill(peak == -torch.inf, 0.0))
    # Collectives add memory to memory, so all ranks' tensors need the same strides.
    numerator = (partial.out.to(form.lse) * weight.unsqueeze(-1)).contiguous()
    denominator = weight.clone(memory_format=torch.contiguous_format)
    collective(axis, "merging", dist.all_reduce, numerator)
    collective(axis, "merging", dist.all_reduce, denominator)
    sent = sum(x.numel() * x.element_size() for x in (peaks, numerator, denominator))
    count_messages(1, 2 * (axis.size - 1) * sent // axis.size)  # of a bandwidth-optimal all-reduce
    out = numerator / denominator.masked_fill(denominator == 0, 1.0).unsqueeze(-1)
    return peaks[:2], Partial(out, peak + denominator.log())


MERGES: dict[str, Callable[[Tensor, PartialMessage, Axis, bool], tuple[Tensor, Partial]]] = {
    "tree": _tree,
    "direct": _direct,
    "gather": _gather,
}
"""Merges that send `PartialMessage`s."""

COLLECTIVE = ("gather", "allreduce")
"""Merges by collectives, which hang or crash on messages of unequal sizes. Ranks compare their calls before them."""

HOW = ("auto", *MERGES, "allreduce")

OUTPUTS = ("replicated", "heads")


def check_merge(subject: str, how: str, output: str) -> None:
    """Raise unless `how` names a merge and `output` names an output."""
    for name, given, known in (
        ("how" if subject == "merge_across" else "merge", how, HOW),
        ("output", output, OUTPUTS),
    ):
        if not isinstance(given, str) or given not in known:
            raise KernelError(f"{subject} {name}", f"one of {', '.join(known)}", repr(given), f'use "{known[0]}"')


class MergedCall:
    """Comparison of one call on all ranks by the checksum that its merge carries, at no cost of its own.

    Collectives cannot carry a checksum that differs, so ranks compare their calls before them.
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
            raise_checksum_mismatch(subject)

    def failed(self, error: InputError, poison: Callable[[], object]) -> None:
        """Let the other ranks detect the error of this rank, which raises it afterwards."""
        if torch.compiler.is_compiling() or self.mesh.shape.ranks == 1:
            return
        if self.merge not in COLLECTIVE:
            poison()
        if self.compares:
            agree(self.mesh, error)
