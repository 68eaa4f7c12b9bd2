"""Merge partials across ranks, once the ranks have checked their calls.

A merge sends one message a step, of a size that does not depend on the context.

"tree"         halves exchange what they hold, inside hosts first: ceil(log2 p) exchanges
"direct"       every rank sends to every other: one exchange and one merge; one launch on GPUs of one host
"gather"       the same by an all-gather
"allreduce"    maximum, numerator and denominator by three all-reduces: the paper's Algorithm 3, a baseline
"""

from dataclasses import replace
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.failures import collective
from attnmesh.comm.host_merge import host_merge_for, merge_in_host
from attnmesh.comm.message import PartialMessage
from attnmesh.comm.p2p import all_to_all_bytes, tree_exchange
from attnmesh.comm.shared_memory import DIFFERENT, SLOT, CallsDifferError
from attnmesh.comm.symmetric_memory import symmetric_memory_of
from attnmesh.comm.topology import all_gather_ints, best_merge, mailboxes_of, rounds, whole_mailboxes
from attnmesh.core.candidates import best
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.errors import KernelError
from attnmesh.kernels.stacked_merge import use_triton
from attnmesh.mesh.axes import Axis, device_type_of
from attnmesh.mesh.merges import COLLECTIVE, MERGE_CHOICES, OUTPUTS
from attnmesh.runtime.counters import count_messages, current_traffic, timed_merge
from attnmesh.runtime.world import cached_per_world

TRIAL_BATCHES = (1, 8)
"""Batches of 32 heads of 128, in float32, whose merges are timed before "auto" chooses one."""

TRIALS, TRIAL_CALLS = 5, 5
"""Times that each merge is timed, of which the first is not counted, and its calls in a row inside one host."""


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


def chosen_merge(axis: Axis, how: str, output: str, device: torch.device) -> str:
    """Return the merge that `how` stands for. The first call along an axis is collective, for any `how`."""
    fastest = fastest_merge(axis) if device.type == "cpu" else best_merge(axis, device)
    return how if how != "auto" else "direct" if output == "heads" else fastest


@cached_per_world()
def fastest_merge(axis: Axis) -> str:
    """Return the fastest merge along an axis of CPUs, measured at the first call, alike on all ranks.

    One is chosen for all sizes of messages: a rank that sends poison does not know the size of the others' messages. It
    is the one that loses least to the other, over short and long messages. Ranks that do not all share a host time
    short ones alone, once a turn.
    """
    forms = [PartialMessage((batch, 32, 1, 128), torch.float32, torch.float32) for batch in TRIAL_BATCHES]
    near, losses = whole_mailboxes(axis) is not None and forms[0].is_native, []
    for form in forms if near else forms[:1]:
        own = _time_merges(axis, form, TRIAL_CALLS if near else 1)
        slowest = [max(column) for column in zip(*all_gather_ints(own, [axis]), strict=True)]
        losses.append([count / min(slowest) for count in slowest])
    tree, direct = (max(column) for column in zip(*losses, strict=True))
    return "direct" if direct < tree else "tree"


def _time_merges(axis: Axis, form: PartialMessage, calls: int) -> list[int]:
    """Return this rank's median nanoseconds of a merge by tree, and direct, which take turns of so many calls."""
    nanoseconds: dict[str, list[float]] = {"tree": [], "direct": []}
    token = current_traffic.set(None)
    try:
        for _ in range(TRIALS):
            for how, times in nanoseconds.items():
                start = perf_counter()
                for _ in range(calls):
                    message = torch.zeros(form.size, dtype=torch.uint8, device="cpu")
                    merge_messages(message, form, axis, how, False)
                times.append(1e9 * (perf_counter() - start) / calls)
    finally:
        current_traffic.reset(token)
    return [int(median(times[1:])) for times in nanoseconds.values()]


def merge_messages(
    message: Tensor, form: PartialMessage, axis: Axis, how: str, canonical: bool
) -> tuple[Tensor, Partial]:
    """Merge along a tree, whose bits do not depend on which of two messages comes first; else gather all messages."""
    if how == "gather":
        rows = list(message.new_empty(axis.size, len(message)))
        collective(axis, "merging", dist.all_gather, rows, message)
        count_messages(axis.size - 1, len(message))
        return form.merge(torch.stack(rows))
    mailboxes, steps = mailboxes_of(axis, message.device), rounds(axis, canonical)[axis.index]
    if mailboxes is not None and form.is_native and not canonical:
        if how == "tree":  # rounds inside the host come first
            inside = next((i for i, step in enumerate(steps) if not mailboxes.holds(step)), len(steps))
            merge_in_host(message, *form.sizes, axis, mailboxes, steps[:inside])
            steps = steps[inside:]
        elif how == "direct" and mailboxes is whole_mailboxes(axis):
            merge_in_host(message, *form.sizes, axis, mailboxes, None)
            return form.partial(message)
    if how == "direct":
        return form.merge(all_to_all_bytes([message] * axis.size, axis))
    if how == "tree":
        return form.partial(tree_exchange(message, steps, axis, form.merge_messages) if steps else message)
    raise KernelError("merge", "a merge that has a branch in merge_messages", repr(how), "write one")


def is_one_call(form: PartialMessage, axis: Axis, device: torch.device) -> bool:
    """Return True if all ranks share a host, where one native call merges all heads sooner than each rank its own."""
    return device.type == "cpu" and form.is_native and host_merge_for(axis, form.shape, "direct") is not None


def send_heads(partial: Partial, checksum: Tensor, form: PartialMessage, axis: Axis) -> tuple[Partial, Tensor]:
    """Send each rank the partials of its own heads."""
    shares = [Axis(axis.size, rank).share_of(form.shape[1]) for rank in range(axis.size)]
    messages = [form.message(checksum, Partial(*(x[:, heads] for x in partial))) for heads in shares]
    mine = shares[axis.index]
    form = replace(form, shape=(form.shape[0], mine.stop - mine.start, *form.shape[2:]))
    checksum, partial = form.merge(all_to_all_bytes(messages, axis))
    return partial, checksum


def merge_by_allreduce(partial: Partial, checksum: Tensor, form: PartialMessage, axis: Axis) -> tuple[Tensor, Partial]:
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


def best_across(candidates: Tensor, axis: Axis, *, unique: bool = False) -> Tensor:
    """Return the best k of the candidates of all ranks, best first, of which each rank passes its own best k.

    They merge along the tree that merges partials: rows x k x 8 bytes a message. Ranks have compared their calls.
    """
    if axis.size == 1 or not candidates.numel():
        return candidates
    k = candidates.shape[-1]

    def merge(messages: Tensor) -> Tensor:
        both = messages.view(torch.int64).unflatten(-1, candidates.shape).movedim(0, -2).flatten(-2)
        return best(both, k, unique=unique).view(torch.uint8).reshape(-1)

    message = candidates.contiguous().view(torch.uint8).reshape(-1)
    merged = tree_exchange(message, rounds(axis, False)[axis.index], axis, merge)
    return merged.view(torch.int64).view(candidates.shape)
