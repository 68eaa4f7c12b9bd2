"""Along the heads axis tokens are swapped for heads: DeepSpeed-Ulysses' all-to-all, an operator with its own reverse.

Before, each rank holds all heads of its shard; after, its share of the heads of the tokens of all ranks in line, in
order of position.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.exchange import blank, swap
from attnmesh.kernel.attend import empty_placed
from attnmesh.mesh import Axis, Mesh, Shape
from attnmesh.schedule import Problem


@torch.library.custom_op("attnmesh::swap_heads", mutates_args=())
def swap_op(x: Tensor, groups: str, code: Sequence[int], keys: bool, to_heads: bool) -> Tensor:
    """Tokens for heads, or heads for tokens; `keys` says whose layout and length."""
    axis, tokens = Mesh.named(Shape(*code[:3]), code[3:6], groups).heads, _tokens(code, keys)
    return _to_heads(x, axis, tokens) if to_heads else _to_tokens(x, axis, tokens)


@swap_op.register_fake
def _(x: Tensor, groups: str, code: Sequence[int], keys: bool, to_heads: bool) -> Tensor:
    counts = [len(tokens) for tokens in _tokens(code, keys)]
    if to_heads:
        return empty_placed(x.new_empty((x.shape[0], x.shape[1] // code[0], sum(counts), 1)), x.shape[3])
    return empty_placed(x.new_empty((x.shape[0], x.shape[1] * code[0], counts[code[3]], 1)), x.shape[3])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.where, ctx.to_heads = inputs


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return swap_op(dout, *ctx.where, not ctx.to_heads), None, None, None, None


swap_op.register_autograd(_gradient, setup_context=_remember)


def _tokens(code: Sequence[int], keys: bool) -> list[Tensor]:
    """For each rank in line, where its tokens stand among those of all in line, in order of position."""
    shape, (_, r, c) = Shape(*code[:3]), code[3:6]
    problem = Problem.decode(shape, code[6:])
    layout, length = (problem.key_layout, problem.key_length) if keys else (problem.layout, problem.length)
    shards = [layout.positions(length, shape.ranks, shape.shard(h, r, c)) for h in range(shape.heads)]
    places = torch.cat(shards).argsort().argsort()
    return list(places.split([len(shard) for shard in shards]))


def _to_heads(x: Tensor, axis: Axis, tokens: list[Tensor]) -> Tensor:
    shares = [(part,) for part in x.chunk(axis.size, dim=1)]
    wanted = [(blank(shares[0][0], len(some)),) for some in tokens]
    out = empty_placed(x.new_empty((*shares[0][0].shape[:2], sum(map(len, tokens)), 1)), x.shape[3])
    for some, (part,) in zip(tokens, swap(shares, wanted, axis), strict=True):
        out.index_copy_(2, some.to(x.device), part)
    return out


def _to_tokens(x: Tensor, axis: Axis, tokens: list[Tensor]) -> Tensor:
    parts = [(x.index_select(2, some.to(x.device)),) for some in tokens]
    mine = parts[axis.index][0]
    arrived = swap(parts, [(torch.empty_like(mine),)] * axis.size, axis)
    out = empty_placed(x.new_empty((x.shape[0], x.shape[1] * axis.size, mine.shape[2], 1)), x.shape[3])
    return out.copy_(torch.cat([part for (part,) in arrived], dim=1))
