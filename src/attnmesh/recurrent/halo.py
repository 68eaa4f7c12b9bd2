"""Halo: the last tokens before a rank's shard, which a causal convolution needs.

A convolution of width w needs the w - 1 tokens before each shard. A shard with fewer tokens passes on those of the
shards before it. Before the first token there are zeros. With 3 tokens of halo:

    tokens   0 1 2 3 | 4 5 | 6 7 8 9
    halo     . . .   1 2 3   3 4 5        a dot is a zero
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.checks.argument_checks import check_tensor
from attnmesh.comm.p2p import Channel
from attnmesh.errors import DtypeError, ShapeError, check_count
from attnmesh.guard.agreement import Agreement
from attnmesh.mesh.axes import Axis, axis_of, group_named, mesh_of_axis
from attnmesh.recurrent.head_exchange import first_indices, own_token_count
from attnmesh.runtime.operators import custom_operator

Segment = tuple[int, int, int]
"""Consecutive tokens of one rank: the rank, the first of them, and their number."""


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
    with Agreement(mesh_of_axis(axis), "halo") as agreement:
        _check_halo(x, size, dim)
        other_sizes = [other_size for other, other_size in enumerate(x.shape) if other != dim % x.ndim]
        requires_grad = torch.is_grad_enabled() and x.requires_grad
        options = {"size": size, "dim": dim % x.ndim, "requires_grad": requires_grad}
        fields = {"others": other_sizes, "dtype": x.dtype, **options}
        table = agreement.compare(fields, payload=[x.shape[dim]])
    return halo_of_parts(x, size, axis, range(axis.size), [numbers[0] for numbers in table], dim=dim)


def halo_of_parts(
    x: Tensor, size: int, axis: Axis, owners: Sequence[int], lengths: Sequence[int], *, dim: int = 1
) -> Tensor:
    """Return the halos of this rank's parts of the sequence, one after the other along `dim`.

    The sequence is cut into parts of these lengths. `owners` are the ranks that hold them, by index of the axis. A rank
    holds its parts in order, one after the other in `x`.
    """
    halos: Tensor = halo_op(
        x, False, size, dim % x.ndim, axis.group_name, [axis.size, axis.index], [*owners], [*lengths]
    )
    return halos


def _fake_halos(x: Tensor, to_tokens: bool, size: int, dim: int, *numbers: Any) -> Tensor:
    _, (_, index), owners, lengths = numbers
    return _empty(x, to_tokens, size, dim, index, owners, lengths)


def _keep_numbers(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.to_tokens, *ctx.numbers = inputs


def _halo_backward(ctx: Any, dout: Tensor) -> list[Tensor]:
    return [halo_op(dout.contiguous(), not ctx.to_tokens, *ctx.numbers)]


@custom_operator("halo", _fake_halos, _keep_numbers, _halo_backward)
def halo_op(
    x: Tensor,
    to_tokens: bool,
    size: int,
    dim: int,
    group: str,
    size_and_index: Sequence[int],
    owners: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """Return zeros with each segment of the tokens added to its target's halo, or back to the tokens if `to_tokens`."""
    axis = Axis(size_and_index[0], size_and_index[1], group_named(group))
    out = _empty(x, to_tokens, size, dim, axis.index, owners, lengths).zero_()
    segments = _segments(size, owners, lengths)
    _add_segments(x, out, (pair[::-1] for pair in segments) if to_tokens else segments, axis, dim)
    return out


def _empty(
    x: Tensor, to_tokens: bool, size: int, dim: int, index: int, owners: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Return memory for a rank's tokens if `to_tokens`, otherwise for its halos."""
    tokens = own_token_count(index, owners, lengths) if to_tokens else size * list(owners).count(index)
    return x.new_empty(*x.shape[:dim], tokens, *x.shape[dim + 1 :])


def _add_segments(x: Tensor, out: Tensor, segments: Iterable[tuple[Segment, Segment]], axis: Axis, dim: int) -> None:
    """Add the first segment of each pair, in `x` of its rank, to the second one, in `out` of its rank."""
    rank = axis.index
    sends: dict[int, tuple[Tensor, ...]] = {}
    targets: dict[int, tuple[Tensor, ...]] = {}
    for (source, first, count), (target, start, _) in segments:
        if source == rank == target:
            out.narrow(dim, start, count).add_(x.narrow(dim, first, count))
        elif source == rank:
            sends[target] = (*sends.get(target, ()), x.narrow(dim, first, count))
        elif target == rank:
            targets[source] = (*targets.get(source, ()), out.narrow(dim, start, count))
    wanted = {peer: tuple(torch.empty_like(into, device="meta") for into in halos) for peer, halos in targets.items()}
    # Also with nothing to send: the first exchange along an axis is collective.
    finish = Channel(axis, x.device).begin_messages(sends, wanted, "exchanging halos")
    for source, arrived in finish().items():
        for into, part in zip(targets[source], arrived, strict=True):
            into.add_(part)


def _segments(size: int, owners: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[Segment, Segment]]:
    """Yield where each segment of a halo lies, in the order of all ranks: among tokens, and among its rank's halos.

    Halos of 2 tokens, of parts of 3, 1 and 2 tokens. The halo of rank 2 has tokens of both other ranks:

    >>> for source, target in _segments(2, [0, 1, 2], [3, 1, 2]):          # each (rank, first, tokens)
    ...     print(source, "->", target)
    (0, 1, 2) -> (1, 0, 2)
    (0, 2, 1) -> (2, 0, 1)
    (1, 0, 1) -> (2, 1, 1)
    """
    starts = [0, *accumulate(lengths)]
    first = first_indices(owners, lengths)
    halo_counts = dict.fromkeys(owners, 0)  # halos before this one on its rank
    for part, target in enumerate(owners):
        begin = starts[part] - size  # in the sequence
        offset = halo_counts[target] * size - begin
        halo_counts[target] += 1
        for earlier in range(part):
            start = max(begin, starts[earlier])
            stop = starts[earlier] + lengths[earlier]
            if start < stop:
                index = first[earlier] + start - starts[earlier]
                yield (owners[earlier], index, stop - start), (target, offset + start, stop - start)


def _check_halo(x: Tensor, size: int, dim: int) -> None:
    check_tensor("halo x", x)
    if not x.is_floating_point():
        raise DtypeError("halo x", "a tensor of floats", f"{x.dtype}", "cast it with .float()")
    check_count("halo size", size, "pass the width of the convolution less one", least=0)
    if type(dim) is not int or not -x.ndim <= dim < x.ndim:
        raise ShapeError("halo dim", f"a dim of the tensor's {x.ndim}", repr(dim), "pass the dim of the tokens")
