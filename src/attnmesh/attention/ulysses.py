"""Along the heads axis tokens are swapped for heads: DeepSpeed-Ulysses' all-to-all, an operator with its own reverse.

Before, each rank holds all heads of its shard; after, its share of the heads of the tokens of all ranks in line, in
order of position.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm.p2p import blank, swap
from attnmesh.kernels.attend import empty_placed
from attnmesh.mesh.axes import Axis, Mesh
from attnmesh.mesh.schedule import Problem
from attnmesh.mesh.shapes import Shape


@torch.library.custom_op("attnmesh::swap_heads", mutates_args=())
def swap_op(
    tensors: Sequence[Tensor], keys: Sequence[bool], groups: str, code: Sequence[int], to_heads: bool
) -> list[Tensor]:
    """Tokens for heads, or heads for tokens, of all tensors at once; `keys` says of each whose tokens they are."""
    axis, tokens = Mesh.named(Shape(*code[:3]), code[3:6], groups).heads, [_tokens(code, each) for each in keys]
    return (_to_heads if to_heads else _to_tokens)(tensors, axis, tokens)


@swap_op.register_fake
def _(
    tensors: Sequence[Tensor], keys: Sequence[bool], groups: str, code: Sequence[int], to_heads: bool
) -> list[Tensor]:
    line = range(code[0])
    counts = [[len(_tokens(code, each)[rank]) for rank in line] for each in keys]
    if to_heads:
        return [_empty(x, x.shape[1] // code[0], sum(count)) for x, count in zip(tensors, counts, strict=True)]
    return [_empty(x, x.shape[1] * code[0], count[code[3]]) for x, count in zip(tensors, counts, strict=True)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, *ctx.where, ctx.to_heads = inputs


def _gradient(ctx: Any, douts: list[Tensor]) -> tuple[list[Tensor] | None, ...]:
    return swap_op(douts, *ctx.where, not ctx.to_heads), None, None, None, None


swap_op.register_autograd(_gradient, setup_context=_remember)


def _tokens(code: Sequence[int], keys: bool) -> list[Tensor]:
    """For each rank in line, where its tokens stand among those of all in line, in order of position."""
    shape, (_, r, c) = Shape(*code[:3]), code[3:6]
    problem = Problem.decode(shape, code[6:])
    layout, length = (problem.key_layout, problem.key_length) if keys else (problem.layout, problem.length)
    shards = [layout.positions(length, shape.ranks, shape.shard(h, r, c)) for h in range(shape.heads)]
    places = torch.cat(shards).argsort().argsort()
    return list(places.split([len(shard) for shard in shards]))


def _to_heads(tensors: Sequence[Tensor], axis: Axis, tokens: list[list[Tensor]]) -> list[Tensor]:
    shares = list(zip(*(x.chunk(axis.size, dim=1) for x in tensors), strict=True))
    coming = zip(*tokens, strict=True)  # by rank
    wanted = [tuple(blank(x, len(t)) for x, t in zip(shares[0], theirs, strict=True)) for theirs in coming]
    arrived = zip(*swap(shares, wanted, axis), strict=True)
    swapped = []
    for x, parts, places in zip(tensors, arrived, tokens, strict=True):
        out = _empty(x, x.shape[1] // axis.size, sum(map(len, places)))
        for some, part in zip(places, parts, strict=True):
            out.index_copy_(2, some.to(x.device), part)
        swapped.append(out)
    return swapped


def _to_tokens(tensors: Sequence[Tensor], axis: Axis, tokens: list[list[Tensor]]) -> list[Tensor]:
    going = zip(*tokens, strict=True)  # by rank
    parts = [
        tuple(x.index_select(2, some.to(x.device)) for x, some in zip(tensors, theirs, strict=True)) for theirs in going
    ]
    wanted = [tuple(map(torch.empty_like, parts[axis.index]))] * axis.size
    arrived = zip(*swap(parts, wanted, axis), strict=True)
    return [
        _empty(x, x.shape[1] * axis.size, heads[0].shape[2]).copy_(torch.cat(heads, dim=1))
        for x, heads in zip(tensors, arrived, strict=True)
    ]


def _empty(x: Tensor, heads: int, tokens: int) -> Tensor:
    return empty_placed(x.new_empty((x.shape[0], heads, tokens, 1)), x.shape[3])
