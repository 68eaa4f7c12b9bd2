"""Merge partials across ranks: one packed message a step, of a size that the context does not change.

        "tree"         halves exchange what they hold, inside hosts first: ceil(log2 p) exchanges
        "direct"       every rank sends to every other, one exchange, one merge; on GPUs of one host in one launch
        "gather"       the same by a collective
        "allreduce"    maximum, numerator and denominator, each by a collective: the paper's Algorithm 3, a baseline

A *checksum* rides along: two numbers whose maximum over all ranks tells each of them whether all ranks said the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.consensus import agree, askable, describe_call, unlike
from attnmesh.comm.counters import count_messages, merging
from attnmesh.comm.failures import collective
from attnmesh.comm.p2p import all_to_all_bytes, tree_exchange
from attnmesh.comm.shared_memory import SLOT
from attnmesh.comm.symmetric_memory import symmetric_memory_of
from attnmesh.comm.topology import best_merge, mailboxes_of, rounds
from attnmesh.core.checks import DTYPES, check_checked, check_one_device, check_tensor
from attnmesh.core.digest import ROW, digest
from attnmesh.core.partial import Partial, collapse, wide
from attnmesh.errors import DtypeError, InputError, KernelError, MeshError, ShapeError
from attnmesh.kernels.merge import launch_checksum, merged, use_triton
from attnmesh.mesh.axes import Axis, Mesh, device_type_of, group_named

DIGEST = (1 << 24) - 3
"""Checksums are numbers below this one: float32 holds them exactly."""

FEW = ROW
"""Numbers up to which one program tells them apart sooner than PyTorch, who uses all of the chip."""

BASES = {"e": 1.0, "2": math.log(2.0)}
"""By which an `lse` in this base is multiplied to be natural."""


@dataclass(frozen=True)
class PartialMessage:
    """How a partial and its checksum lie in a message of bytes: (checksum, lse, out), the checksum in lse's dtype."""

    shape: tuple[int, ...]
    lse: torch.dtype
    out: torch.dtype

    @property
    def size(self) -> int:
        """Bytes of a message."""
        rows = math.prod(self.shape[:-1])
        return (2 + rows) * self.lse.itemsize + rows * self.shape[-1] * self.out.itemsize

    def blank(self, device: torch.device) -> Tensor:
        """Room for a message."""
        return torch.empty(self.size, dtype=torch.uint8, device=device)

    def places(self, message: Tensor) -> tuple[Tensor, Partial]:
        """Where in a message the checksum and the partial lie, to be written."""
        checksum, (out, lse) = self.read(message[None])
        return checksum[0], Partial(out[0], lse[0])

    def message(self, checksum: Tensor, partial: Partial) -> Tensor:
        """The bytes of one rank's message."""
        out = partial.out.to(self.out).reshape(-1)
        if self.out == self.lse:
            return torch.cat((checksum, partial.lse.reshape(-1), out)).view(torch.uint8)
        parts = (checksum, partial.lse.reshape(-1)), (out,)
        return torch.cat([torch.cat(part).view(torch.uint8) for part in parts])

    def read(self, rows: Tensor) -> tuple[Tensor, Partial]:
        """The checksums and the partials of several messages, stacked."""
        size, first, count = self.lse.itemsize, 2 * self.lse.itemsize, math.prod(self.shape[:-1])
        middle = first + count * size
        lse = rows[:, first:middle].view(self.lse).view(len(rows), *self.shape[:-1])
        out = rows[:, middle : middle + count * self.shape[-1] * self.out.itemsize].view(self.out)
        return rows[:, :first].view(self.lse), Partial(out.view(len(rows), *self.shape), lse)

    def join(self, rows: Tensor) -> Tensor:
        """Several messages as one."""
        checksums, partials = self.read(rows)
        if not use_triton(partials.lse):
            return self.message(checksums.amax(0), collapse(partials))
        message = self.blank(rows.device)
        checksum, place = self.places(message)
        merged(partials, place, checksums=checksums, checksum=checksum)
        return message

    def joined(self, rows: Tensor) -> tuple[Tensor, Partial]:
        """What several messages come to."""
        checksums, partials = self.read(rows)
        if not use_triton(partials.lse):
            return checksums.amax(0), collapse(partials)
        checksum = checksums.new_empty(2)
        return checksum, merged(partials, checksums=checksums, checksum=checksum)


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
    """The merge of the partials of all ranks of a group: attention over the keys of all of them, for any engine.

    `out` is (batch, heads, length, dim) and `lse` (batch, heads, length), natural or, with `base="2"`, base 2; so is
    the result's. `output="heads"` gives rank i the i-th share of the heads, as `torch.tensor_split` cuts them. `how` is
    "tree", "direct", "gather", "allreduce" or "auto". Partials travel in float32 or wider, or with `out` in the dtype
    `wire`. All ranks pass the same shapes and options. If they did not, all raise the same error, or get NaN where
    nobody looks: with `checked=False`, and by default where looking would hold up a GPU. No gradients. `group` is None
    for a single rank.

    >>> import attnmesh as am
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    >>> here = am.attend(q, k, v)
    >>> torch.equal(merge_across(here, None).out, here.out)
    True
    """
    axis = axis_of(group)
    try:
        check_merge("merge_across", how, output)
        check_checked("merge_across", checked)
        _check(partial, wire, base)
    except InputError as error:
        if not torch.compiler.is_compiling():
            if how not in COLLECTIVE:
                send_poison(axis, how, output)  # or the others would wait for this rank
            if axis.size > 1 and _asks(partial, axis, how, checked):
                agree(_line(axis), error)
        raise
    out, lse = partial
    natural = lse if base == "e" else lse * BASES[base]
    if torch.compiler.is_compiling():
        name, wired = "" if axis.group is None else axis.group.group_name, str(wire or "").removeprefix("torch.")
        merged = Partial(*merge_op(out, natural, name, [axis.size, axis.index], how, output, wired))
    else:
        merged = _merged(Partial(out, natural), axis, how, output, wire, checked)
    return merged if base == "e" else Partial(merged.out, merged.lse / BASES[base])


@torch.library.custom_op("attnmesh::merge_across", mutates_args=())
def merge_op(
    out: Tensor, lse: Tensor, group: str, place: Sequence[int], how: str, output: str, wire: str
) -> tuple[Tensor, Tensor]:
    """As an operator, so that it is one node of a compiled graph."""
    dtype = getattr(torch, wire) if wire else None
    return _merged(Partial(out, lse), Axis(place[0], place[1], group_named(group)), how, output, dtype)


@merge_op.register_fake
def _(out: Tensor, lse: Tensor, group: str, place: Sequence[int], how: str, output: str, _: str) -> Partial:
    heads = Axis(place[0], place[1]).share_of(out.shape[1]) if output == "heads" else slice(0, out.shape[1])
    return Partial(*(x.new_empty(x[:, heads].shape) for x in (out, lse)))


def _merged(
    partial: Partial, axis: Axis, how: str, output: str, wire: torch.dtype | None, checked: bool | None = None
) -> Partial:
    """In tensors of its own, and `out` in the dtype in which it came."""
    shape, dtype = list(partial.out.shape), partial.out.dtype
    call = describe_call("merge_across", out=shape, dtype=dtype, how=how, output=output, wire=wire)
    asks = axis.size > 1 and askable(partial.lse.device) and _asks(partial, axis, how, checked)
    if asks and how in COLLECTIVE:  # collectives cannot hear of a message that is not the one expected
        agree(_line(axis), call)
    checksum = checksum_of(crc32(call.encode()), partial.lse)
    (out, lse), checksum = merged_across(partial, checksum, axis, how, output, wire)
    if not asks:  # ranks that disagree have NaN
        out = torch.where(checksum.sum() == 0, out, torch.nan)
    elif float(checksum.sum()) != 0:
        agree(_line(axis), call)
        unlike("merge_across")
    return Partial(*(x.to(like.dtype, copy=True).contiguous() for x, like in ((out, partial.out), (lse, partial.lse))))


def _asks(partial: object, axis: Axis, how: str, checked: bool | None) -> bool:
    """Whether the host looks at what the ranks said: where that holds up no device, unless it is told when."""
    if checked is None and how != "allreduce":
        lse = partial[-1] if isinstance(partial, tuple) and partial else None
        held_up = use_triton(lse) if isinstance(lse, Tensor) else device_type_of(axis.group) == "cuda"
        return not held_up
    return checked is not False


def _line(axis: Axis) -> Mesh:
    """A mesh of one axis."""
    return Mesh(Axis(), Axis(), axis)


def merged_across(
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
    """The merge and the checksums' maximum. `canonical` is the tree whose halves are the ranks' residues.

    `message`, if there is one, holds checksum and partial already, as `PartialMessage` places them.
    """
    if axis.size == 1:
        return partial, checksum
    dtype = wide(partial.out.dtype)
    form = PartialMessage(tuple(partial.out.shape), dtype, wire or dtype)
    best = best_merge(axis, checksum.device)  # the first time all ranks ask at once, also one that was told otherwise
    if how == "auto":
        how = "direct" if output == "heads" else best
    # Too long to be heard by a rank that expects another. The same length on all ranks, with a board or without.
    if how not in COLLECTIVE and form.size > SLOT and checksum.device.type == "cpu":
        told = send_poison(axis, how, output, checksum, canonical=canonical)
        if float(told.sum()) != 0:
            return partial, told
    with merging():
        peers = symmetric_memory_of(axis, checksum.device) if how == "direct" and form.lse == torch.float32 else None
        if peers is not None and (whole_form := replace(form, out=form.lse)).size <= peers.longest:
            form = whole_form
            message = form.message(checksum, partial) if message is None else message
            checksum, whole = peers.merge(message, form.shape)
        elif how == "direct" and output == "heads":
            return _to_each_its_heads(partial, checksum, form, axis)
        elif how == "allreduce":
            checksum, whole = _allreduce(partial, checksum, form, axis)
        else:
            message = form.message(checksum, partial) if message is None else message
            checksum, whole = MERGES[how](message, form, axis, canonical)
    heads = axis.share_of(form.shape[1]) if output == "heads" else slice(None)
    return Partial(*(x[:, heads] for x in whole)), checksum


def send_poison(
    axis: Axis, how: str, output: str, checksum: Tensor | None = None, *, canonical: bool = False
) -> Tensor:
    """Take part in the exchanges with a checksum alone: one that nobody shares, of a rank that cannot go on.

    Also what goes before messages that are too long for a box that expects others.
    """
    if checksum is None:
        checksum = torch.full((2,), torch.inf, device=device_type_of(axis.group))
    nothing = Partial(checksum.new_zeros(1, 0, 0, 1), checksum.new_zeros(1, 0, 0))
    how, output = (given if given in known else "auto" for given, known in ((how, HOW), (output, OUTPUTS)))
    return merged_across(nothing, checksum, axis, how, output, canonical=canonical)[1]


def call_checksum(tensors: Sequence[Tensor], call: int, state: Tensor, like: Tensor, into: Tensor | None) -> Tensor:
    """Of a call on a cache, whose length is on the device, and of the bits of some tensors."""
    if use_triton(like) and sum(x.numel() for x in tensors) <= FEW:
        return launch_checksum(tensors, call, state, DIGEST, like.new_empty(2) if into is None else into)
    checksum = checksum_of(sum(map(digest, tensors), start=call + state[0]), like)
    return checksum if into is None else into.copy_(checksum)


def checksum_of(number: int | Tensor, like: Tensor) -> Tensor:
    """The number, and less the number: their maxima over all ranks cancel if all say the same."""
    if isinstance(number, int):  # without a copy from the host, which a CUDA graph cannot have
        checksum = like.new_full((2,), number % DIGEST)
        checksum[1].neg_()
        return checksum
    number = number.remainder(DIGEST).to(like.dtype)
    return torch.stack((number, -number))


def _tree(message: Tensor, form: PartialMessage, axis: Axis, canonical: bool) -> tuple[Tensor, Partial]:
    """Of two messages the bits of the merge do not depend on which is the first."""
    steps = rounds(axis, canonical)[axis.index]
    whole = tree_exchange(message, steps, axis, form.join, mailboxes_of(axis, message.device))
    checksums, merged = form.read(whole[None])
    return checksums[0], Partial(merged.out[0].to(form.lse), merged.lse[0])


def _direct(message: Tensor, form: PartialMessage, axis: Axis, _: bool) -> tuple[Tensor, Partial]:
    return form.joined(all_to_all_bytes([message] * axis.size, axis, mailboxes_of(axis, message.device)))


def _to_each_its_heads(partial: Partial, checksum: Tensor, form: PartialMessage, axis: Axis) -> tuple[Partial, Tensor]:
    """All to all: each rank hears of its own heads alone, from all."""
    shares = [Axis(axis.size, rank).share_of(form.shape[1]) for rank in range(axis.size)]
    messages = [form.message(checksum, Partial(*(x[:, heads] for x in partial))) for heads in shares]
    mine = shares[axis.index]
    form = replace(form, shape=(form.shape[0], mine.stop - mine.start, *form.shape[2:]))
    checksum, merged = form.joined(all_to_all_bytes(messages, axis, mailboxes_of(axis, checksum.device)))
    return merged, checksum


def _gather(message: Tensor, form: PartialMessage, axis: Axis, _: bool) -> tuple[Tensor, Partial]:
    rows = list(message.new_empty(axis.size, len(message)))
    collective(axis, "merging", dist.all_gather, rows, message)
    count_messages(axis.size - 1, len(message))
    return form.joined(torch.stack(rows))


def _allreduce(partial: Partial, checksum: Tensor, form: PartialMessage, axis: Axis) -> tuple[Tensor, Partial]:
    """Algorithm 3 of Tree Attention as it stands: softmax is not left to `merge`, and it takes three collectives."""
    peaks = torch.cat([checksum, partial.lse.flatten()])
    collective(axis, "merging", dist.all_reduce, peaks, dist.ReduceOp.MAX)
    peak = peaks[2:].view(partial.lse.shape)
    weight = torch.exp(partial.lse - peak.masked_fill(peak == -torch.inf, 0.0))
    # Collectives add memory to memory: all ranks' tensors have to lie alike.
    numerator = (partial.out.to(form.lse) * weight.unsqueeze(-1)).contiguous()
    denominator = weight.clone(memory_format=torch.contiguous_format)
    collective(axis, "merging", dist.all_reduce, numerator)
    collective(axis, "merging", dist.all_reduce, denominator)
    sent = sum(x.numel() * x.element_size() for x in (peaks, numerator, denominator))
    count_messages(1, 2 * (axis.size - 1) * sent // axis.size)  # of a good all-reduce; which one it is, it does not say
    out = numerator / denominator.masked_fill(denominator == 0, 1.0).unsqueeze(-1)
    return peaks[:2], Partial(out, peak + denominator.log())


MERGES: dict[str, Callable[[Tensor, PartialMessage, Axis, bool], tuple[Tensor, Partial]]] = {
    "tree": _tree,
    "direct": _direct,
    "gather": _gather,
}
"""Those that send messages."""

COLLECTIVE = ("gather", "allreduce")
"""Merges whose ranks cannot even hear of a message that is not the one expected."""

HOW = ("auto", *MERGES, "allreduce")

OUTPUTS = ("replicated", "heads")


def axis_of(group: Any) -> Axis:
    """The ranks of a process group, or of a mesh of one axis, in line."""
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


def check_merge(subject: str, how: str, output: str) -> None:
    """Raise unless there is such a merge and such an output."""
    for name, given, known in (
        ("how" if subject == "merge_across" else "merge", how, HOW),
        ("output", output, OUTPUTS),
    ):
        if not isinstance(given, str) or given not in known:
            raise KernelError(f"{subject} {name}", f"one of {', '.join(known)}", repr(given), f'use "{known[0]}"')


def _check(partial: Partial, wire: torch.dtype | None, base: str) -> None:
    if not (isinstance(partial, tuple) and len(partial) == 2 and all(isinstance(x, Tensor) for x in partial)):
        given, fix = type(partial).__name__, "pass what attend returned, or Partial(out, lse)"
        raise DtypeError("merge_across", "a partial (out, lse)", given, fix)
    out, lse = partial
    check_tensor("merge_across out", out)
    check_tensor("merge_across lse", lse)
    check_one_device("merge_across", {"out": out, "lse": lse})
    if not out.is_floating_point() or lse.dtype != wide(out.dtype):
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
        fix = 'say "2" if the engine took base-2 logarithms'
        raise KernelError("merge_across base", "one of 'e', '2'", repr(base), fix)
