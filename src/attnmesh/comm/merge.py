"""Merge partials across ranks: `merge_across` for any engine that returns `out` and `lse`, `merge_ranks` for decode.

A merge sends one message a step, of a size that does not depend on the context.

"tree"         halves exchange what they hold, inside hosts first: ceil(log2 p) exchanges
"direct"       every rank sends to every other: one exchange and one merge; one launch on GPUs of one host
"gather"       the same by an all-gather
"allreduce"    maximum, numerator and denominator by three all-reduces: the paper's Algorithm 3, a baseline
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.consensus import may_compare
from attnmesh.comm.counters import count_messages, current_traffic, timed_merge
from attnmesh.comm.failures import collective
from attnmesh.comm.host_merge import HostMerge, host_merge_for, is_plain, merge_as_one_call, merge_in_host
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
from attnmesh.comm.message import PartialMessage, checksum_of
from attnmesh.comm.p2p import all_gather_ints, all_to_all_bytes, tree_exchange
from attnmesh.comm.shared_memory import SLOT
from attnmesh.comm.symmetric_memory import symmetric_memory_of
from attnmesh.comm.topology import best_merge, mailboxes_of, rounds
from attnmesh.core.checks import check_checked
from attnmesh.core.partial import Partial, sum_dtype
from attnmesh.errors import InputError
from attnmesh.kernels.merge import use_triton
from attnmesh.mesh.axes import Axis, axis_of, device_type_of, group_named
from attnmesh.mesh.world import cached_per_world
from attnmesh.planner.decode_cost import COLLECTIVE

TRIAL_BATCHES = (1, 8)
"""Batches of 32 heads of 128, in float32, whose merges are timed before "auto" chooses one."""

TRIALS, TRIAL_CALLS = 5, 5
"""Times that each merge is timed, of which the first is not counted, and its calls in a row inside one host."""


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
    return None if merge is None else (merge, call_text(shape, torch.float32, how, output, None, "e"))


def raise_alike(
    error: InputError, partial: object, axis: Axis, how: str, output: str, checked: bool | None = None
) -> NoReturn:
    """Raise this rank's error of a merge, on all ranks if they compare their calls."""
    checker = MergeChecker(mesh_of(axis), how, _compares(partial, axis, how, checked), str)
    checker.report(error, lambda: send_poison(axis, how, output))
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
    text = call_text(partial.out.shape, partial.out.dtype, how, output, wire, base)
    compares = axis.size > 1 and may_compare(partial.lse.device) and _compares(partial, axis, how, checked)
    checker = MergeChecker(mesh_of(axis), how, compares, lambda: text)
    checker.before()
    checksum = checksum_of(crc32(text.encode()), partial.lse)
    (out, lse), checksum = merge_ranks(partial, checksum, axis, how, output, wire)
    if compares:
        checker.after(checksum, "merge_across")
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
    """Return the merge of the partials of all ranks, and the maximum of their checksums.

    If the checksums of a long message differ, return this rank's own partial and that maximum.

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
    dtype = sum_dtype(partial.out.dtype)
    form = PartialMessage(tuple(partial.out.shape), dtype, wire or dtype)
    how = chosen_merge(axis, how, output, checksum.device)
    # A rank that expects a shorter message cannot receive this one: compare checksums in a short message first.
    if how not in COLLECTIVE and form.size > SLOT and checksum.device.type == "cpu":
        compared = exchange_checksums(axis, how, output, checksum, canonical=canonical)
        if float(compared.sum()) != 0:
            return partial, compared
    with timed_merge():
        shared = symmetric_memory_of(axis, checksum.device) if how == "direct" and form.lse == torch.float32 else None
        if shared is not None and (wide_form := replace(form, out=form.lse)).size <= shared.longest:
            form = wide_form
            message = form.message(checksum, partial) if message is None else message
            checksum, whole = shared.merge(message, form.shape)
        elif how == "direct" and output == "heads" and not _is_one_call(form, axis, checksum.device):
            return _send_heads(partial, checksum, form, axis)
        elif how == "allreduce":
            checksum, whole = _allreduce(partial, checksum, form, axis)
        else:
            message = form.message(checksum, partial) if message is None else message
            checksum, whole = _merge_messages(message, form, axis, how, canonical)
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
    how, output = (given if given in known else "auto" for given, known in ((how, MERGE_CHOICES), (output, OUTPUTS)))
    return exchange_checksums(axis, how, output, like.new_full((2,), torch.inf), canonical=canonical)


def chosen_merge(axis: Axis, how: str, output: str, device: torch.device) -> str:
    """Return the merge that `how` stands for. The first call along an axis is collective, for any `how`."""
    best = fastest_merge(axis) if device.type == "cpu" else best_merge(axis, device)
    return how if how != "auto" else "direct" if output == "heads" else best


@cached_per_world()
def fastest_merge(axis: Axis) -> str:
    """Return the fastest merge along an axis of CPUs, measured at the first call, alike on all ranks.

    One is chosen for all sizes of messages: a rank that sends poison does not know the size of the others' messages. It
    is the one that loses least to the other, over short and long messages.
    """
    losses = []
    for batch in TRIAL_BATCHES:
        own = _time_merges(axis, PartialMessage((batch, 32, 1, 128), torch.float32, torch.float32))
        slowest = [max(column) for column in zip(*all_gather_ints(own, [axis]), strict=True)]
        losses.append([count / min(slowest) for count in slowest])
    tree, direct = (max(column) for column in zip(*losses, strict=True))
    return "direct" if direct < tree else "tree"


def _time_merges(axis: Axis, form: PartialMessage) -> list[int]:
    """Return this rank's median nanoseconds of a merge by tree, and direct, which take turns."""
    mailboxes = mailboxes_of(axis, torch.device("cpu"))
    calls = TRIAL_CALLS if mailboxes is not None and len(mailboxes.members) == axis.size else 1
    nanoseconds: dict[str, list[float]] = {"tree": [], "direct": []}
    token = current_traffic.set(None)
    try:
        for _ in range(TRIALS):
            for how, times in nanoseconds.items():
                start = perf_counter()
                for _ in range(calls):
                    message = torch.zeros(form.size, dtype=torch.uint8, device="cpu")
                    _merge_messages(message, form, axis, how, False)
                times.append(1e9 * (perf_counter() - start) / calls)
    finally:
        current_traffic.reset(token)
    return [int(median(times[1:])) for times in nanoseconds.values()]


def _merge_messages(
    message: Tensor, form: PartialMessage, axis: Axis, how: str, canonical: bool
) -> tuple[Tensor, Partial]:
    """Merge along a tree, whose bits do not depend on which of two messages comes first; else gather all messages."""
    if how == "gather":
        rows = list(message.new_empty(axis.size, len(message)))
        collective(axis, "merging", dist.all_gather, rows, message)
        count_messages(axis.size - 1, len(message))
        return form.merge(torch.stack(rows))
    mailboxes, steps = mailboxes_of(axis, message.device), rounds(axis, canonical)[axis.index]
    if mailboxes is not None and mailboxes.native and form.is_native and not canonical:
        if how == "tree":  # rounds inside the host come first
            inside = next((i for i, step in enumerate(steps) if not mailboxes.holds(step)), len(steps))
            merge_in_host(message, *form.sizes, axis, mailboxes, steps[:inside])
            steps = steps[inside:]
        elif len(mailboxes.members) == axis.size:
            merge_in_host(message, *form.sizes, axis, mailboxes, None)
            return form.partial(message)
    if how == "direct":
        return form.merge(all_to_all_bytes([message] * axis.size, axis, mailboxes))
    return form.partial(tree_exchange(message, steps, axis, form.merge_messages, mailboxes) if steps else message)


def _is_one_call(form: PartialMessage, axis: Axis, device: torch.device) -> bool:
    """Return True if all ranks share a host, where one native call merges all heads sooner than each rank its own."""
    return device.type == "cpu" and form.is_native and host_merge_for(axis, form.shape, "direct") is not None


def _send_heads(partial: Partial, checksum: Tensor, form: PartialMessage, axis: Axis) -> tuple[Partial, Tensor]:
    """Send each rank the partials of its own heads."""
    shares = [Axis(axis.size, rank).share_of(form.shape[1]) for rank in range(axis.size)]
    messages = [form.message(checksum, Partial(*(x[:, heads] for x in partial))) for heads in shares]
    mine = shares[axis.index]
    form = replace(form, shape=(form.shape[0], mine.stop - mine.start, *form.shape[2:]))
    checksum, partial = form.merge(all_to_all_bytes(messages, axis, mailboxes_of(axis, checksum.device)))
    return partial, checksum


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
