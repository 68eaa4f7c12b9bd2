"""Halo: the last tokens before a rank's shard, which a causal convolution needs.

A convolution of width w needs the w - 1 tokens before each shard. A shard with fewer tokens passes on those of the
shards before it. Before the first token there are zeros. With 3 tokens of halo:

    tokens   0 1 2 3 | 4 5 | 6 7 8 9
    halo     . . .   1 2 3   3 4 5        a dot is a zero
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.consensus import describe_call, run_agreed_with
from attnmesh.comm.merge import axis_of
from attnmesh.comm.p2p import exchange_messages
from attnmesh.core.checks import check_count, check_tensor, require
from attnmesh.errors import DtypeError, ShapeError
from attnmesh.mesh.axes import Axis, Mesh, group_named


class Segment(NamedTuple):
    """Consecutive tokens that one rank sends to the halo of another."""

    source: int
    first: int
    """Index of the first token on the source rank."""
    target: int
    place: int
    """Index in the target's halos, which follow one another."""
    tokens: int


def halo(x: Tensor, size: int, group: ProcessGroup | DeviceMesh | None, *, dim: int = 1) -> Tensor:
    """Return the `size` tokens before this rank's shard, with zeros before the first token of the sequence.

    Shards follow one another in the order of the ranks, and may have any lengths. Gradients flow back to the ranks that
    hold the tokens, so each rank uses its halo in the loss, or none does.

    Args:
        x: This rank's tokens.
        size: Tokens of the halo: the width of a convolution less one.
        group: A process group, a mesh of one axis, or None for a single rank.
        dim: Dimension of the tokens.

    Returns:
        The halo, shaped like `x` but for `size` tokens.

    Raises:
        InputError: An argument cannot be served, or the ranks' calls differ.
        RankFailure: A rank is lost.

    >>> tokens = torch.arange(1.0, 6.0)[None]
    >>> torch.cat([halo(tokens, 2, None), tokens], dim=1)
    tensor([[0., 0., 1., 2., 3., 4., 5.]])
    """
    axis = axis_of(group, "halo")
    mesh = Mesh(Axis(), Axis(), axis)

    def describe(_: None) -> str:
        others = [n for other, n in enumerate(x.shape) if other != dim % x.ndim]
        learned = torch.is_grad_enabled() and x.requires_grad
        return describe_call("halo", others=others, dtype=x.dtype, size=size, dim=dim % x.ndim, requires_grad=learned)

    _, table = run_agreed_with(mesh, lambda: _check(x, size, dim), describe, lambda _: [x.shape[dim]])
    return halo_of_parts(x, size, axis, range(axis.size), [row[0] for row in table], dim=dim)


def halo_of_parts(
    x: Tensor, size: int, axis: Axis, owners: Sequence[int], lengths: Sequence[int], *, dim: int = 1
) -> Tensor:
    """Return the halos of this rank's parts of the sequence, one after the other along `dim`.

    The sequence is cut into parts of these lengths. `owners` are the ranks that hold them, by index of the axis. A rank
    holds its parts in order, one after the other in `x`.
    """
    halos: Tensor = halo_op(x, size, dim % x.ndim, axis.group_name, [axis.size, axis.index], [*owners], [*lengths])
    return halos


@torch.library.custom_op("attnmesh::halo", mutates_args=())
def halo_op(
    x: Tensor, size: int, dim: int, group: str, place: Sequence[int], owners: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Copy each segment from its source to its target's halo."""
    axis = Axis(place[0], place[1], group_named(group))
    halos = x.new_zeros(*x.shape[:dim], size * list(owners).count(axis.index), *x.shape[dim + 1 :])
    segments = list(_segments(size, owners, lengths))
    places = [(each.source, each.first, each.target, each.place, each.tokens) for each in segments]
    _copy(x, halos, places, axis, dim)
    return halos


@halo_op.register_fake
def _(x: Tensor, size: int, dim: int, _: str, place: Sequence[int], owners: Sequence[int], __: Sequence[int]) -> Tensor:
    return x.new_empty(*x.shape[:dim], size * list(owners).count(place[1]), *x.shape[dim + 1 :])


@torch.library.custom_op("attnmesh::halo_backward", mutates_args=())
def halo_backward_op(
    halos: Tensor, size: int, dim: int, group: str, place: Sequence[int], owners: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Add each segment of the halos to the tokens that it was copied from."""
    axis = Axis(place[0], place[1], group_named(group))
    x = halos.new_zeros(*halos.shape[:dim], _own_tokens(axis.index, owners, lengths), *halos.shape[dim + 1 :])
    segments = list(_segments(size, owners, lengths))
    places = [(each.target, each.place, each.source, each.first, each.tokens) for each in segments]
    _copy(halos, x, places, axis, dim)
    return x


@halo_backward_op.register_fake
def _(
    halos: Tensor, _: int, dim: int, __: str, place: Sequence[int], owners: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    return halos.new_empty(*halos.shape[:dim], _own_tokens(place[1], owners, lengths), *halos.shape[dim + 1 :])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.numbers = inputs


halo_op.register_autograd(
    lambda ctx, dhalos: (halo_backward_op(dhalos.contiguous(), *ctx.numbers), *[None] * 6),
    setup_context=_save_for_backward,
)
halo_backward_op.register_autograd(
    lambda ctx, dx: (halo_op(dx.contiguous(), *ctx.numbers), *[None] * 6),
    setup_context=_save_for_backward,
)


def _copy(x: Tensor, out: Tensor, places: Sequence[tuple[int, int, int, int, int]], axis: Axis, dim: int) -> None:
    """Add runs of tokens of `x` to `out`: (source rank, first token, target rank, first token, count) each."""
    mine = axis.index
    sends: dict[int, list[Tensor]] = {}
    wanted: dict[int, list[Tensor]] = {}
    targets: dict[int, list[Tensor]] = {}
    for source, first, target, place, count in places:
        if source == mine == target:
            out.narrow(dim, place, count).add_(x.narrow(dim, first, count))
        elif source == mine:
            sends.setdefault(target, []).append(x.narrow(dim, first, count))
        elif target == mine:
            targets.setdefault(source, []).append(out.narrow(dim, place, count))
            wanted.setdefault(source, []).append(torch.empty_like(targets[source][-1], device="meta"))
    if not sends and not wanted:
        return
    finish = exchange_messages(_tuples(sends), _tuples(wanted), axis, x.device, "exchanging halos")
    for source, arrived in finish().items():
        for into, tokens in zip(targets[source], arrived, strict=True):
            into.add_(tokens)


def _tuples(lists: dict[int, list[Tensor]]) -> dict[int, tuple[Tensor, ...]]:
    return {peer: tuple(tensors) for peer, tensors in lists.items()}


def _segments(size: int, owners: Sequence[int], lengths: Sequence[int]) -> Iterator[Segment]:
    """Return the segments of all halos, in the same order on all ranks."""
    starts: list[int] = []
    first: list[int] = []
    held = dict.fromkeys(owners, 0)
    for owner, length in zip(owners, lengths, strict=True):
        starts.append(sum(lengths[: len(starts)]))
        first.append(held[owner])
        held[owner] += length
    number = dict.fromkeys(owners, 0)  # of halos before this one on its rank
    for part, target in enumerate(owners):
        begin = starts[part] - size  # in the sequence
        place = number[target] * size - begin
        number[target] += 1
        for earlier in range(part):
            start, stop = max(begin, starts[earlier]), starts[earlier] + lengths[earlier]
            if start < stop:
                index = first[earlier] + start - starts[earlier]
                yield Segment(owners[earlier], index, target, place + start, stop - start)


def _own_tokens(index: int, owners: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(length for owner, length in zip(owners, lengths, strict=True) if owner == index)


def _check(x: Tensor, size: int, dim: int) -> None:
    check_tensor("halo x", x)
    fits, fix = x.is_floating_point(), "cast it with .float()"
    require(fits, DtypeError, "halo x", "a tensor of floats", x.dtype, fix)
    check_count("halo size", size, "pass the width of the convolution less one", least=0)
    fits, fix = type(dim) is int and -x.ndim <= dim < x.ndim, "pass the dim of the tokens"
    require(fits, ShapeError, "halo dim", f"a dim of the tensor's {x.ndim}", repr(dim), fix)
