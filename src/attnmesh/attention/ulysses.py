"""The heads axis: DeepSpeed-Ulysses' all-to-all, as an operator whose gradient is the all-to-all back.

Before it a rank holds all heads of its own tokens. After it a rank holds its share of the heads, for the tokens of all
ranks along the axis, in order of position.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnmesh.attention.call import Run
from attnmesh.comm.p2p import meta_like, swap
from attnmesh.core.kept import on_device
from attnmesh.kernels.attend import empty_length_major
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.schedule import Problem


def tokens_to_heads(q: Tensor, k: Tensor, v: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's share of the heads, for the tokens of all ranks along the heads axis."""
    if run.mesh.heads.size == 1:
        return q, k, v
    q, k, v = swap_op([q, k, v], [False, True, True], *run.encode(), True)
    return q, k, v


def heads_to_tokens(out: Tensor, run: Run) -> Tensor:
    """Return all heads of this rank's tokens."""
    return out if run.mesh.heads.size == 1 else swap_op([out], [False], *run.encode(), False)[0]


@torch.library.custom_op("attnmesh::swap_heads", mutates_args=())
def swap_op(
    tensors: Sequence[Tensor], are_keys: Sequence[bool], names: str, numbers: Sequence[int], to_heads: bool
) -> list[Tensor]:
    """Exchange tokens for heads, or heads for tokens. `are_keys` marks the tensors that have the keys' tokens."""
    run = Run.decode(names, numbers)
    tokens = [_tokens(run, is_key) for is_key in are_keys]
    return (_to_heads if to_heads else _to_tokens)(tensors, run.mesh.heads, tokens)


@swap_op.register_fake
def _(
    tensors: Sequence[Tensor], are_keys: Sequence[bool], names: str, numbers: Sequence[int], to_heads: bool
) -> list[Tensor]:
    run = Run.decode(names, numbers)
    size, index = run.mesh.heads.size, run.mesh.heads.index
    counts = [[len(tokens) for tokens in _tokens(run, is_key)] for is_key in are_keys]
    if to_heads:
        return [_empty(x, x.shape[1] // size, sum(count)) for x, count in zip(tensors, counts, strict=True)]
    return [_empty(x, x.shape[1] * size, count[index]) for x, count in zip(tensors, counts, strict=True)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, *ctx.options, ctx.to_heads = inputs


def _gradient(ctx: Any, douts: list[Tensor]) -> tuple[list[Tensor] | None, ...]:
    return swap_op(douts, *ctx.options, not ctx.to_heads), None, None, None, None


swap_op.register_autograd(_gradient, setup_context=_save_for_backward)


def _tokens(run: Run, is_key: bool) -> list[Tensor]:
    """Return for each rank along the axis where its tokens stand among the tokens of all, in order of position."""
    problem, mesh = run.problem, run.mesh
    traced = type(problem.length) is not int or type(problem.key_length) is not int  # SymInts, which have no hash
    return (_places.__wrapped__ if traced else _places)(problem, mesh.queries.index, mesh.keys.index, is_key)


@lru_cache(maxsize=256)
def _places(problem: Problem, r: int, c: int, is_key: bool) -> list[Tensor]:
    layout, length = (problem.key_layout, problem.key_length) if is_key else (problem.layout, problem.length)
    shape = problem.shape
    shards = [layout.positions(length, shape.ranks, shape.shard(h, r, c)) for h in range(shape.heads)]
    places = torch.cat(shards).argsort().argsort()
    return list(places.split([len(shard) for shard in shards]))


def _to_heads(tensors: Sequence[Tensor], axis: Axis, tokens: list[list[Tensor]]) -> list[Tensor]:
    shares = list(zip(*(x.chunk(axis.size, dim=1) for x in tensors), strict=True))
    tokens_by_rank = zip(*tokens, strict=True)
    wanted = [tuple(meta_like(x, len(t)) for x, t in zip(shares[0], each, strict=True)) for each in tokens_by_rank]
    arrived = zip(*swap(shares, wanted, axis), strict=True)
    results = []
    for x, parts, places in zip(tensors, arrived, tokens, strict=True):
        result = _empty(x, x.shape[1] // axis.size, sum(map(len, places)))
        for place, part in zip(places, parts, strict=True):
            result.index_copy_(2, on_device(place, x.device), part)
        results.append(result)
    return results


def _to_tokens(tensors: Sequence[Tensor], axis: Axis, tokens: list[list[Tensor]]) -> list[Tensor]:
    parts = [
        tuple(x.index_select(2, on_device(place, x.device)) for x, place in zip(tensors, places, strict=True))
        for places in zip(*tokens, strict=True)  # by rank
    ]
    wanted = [tuple(meta_like(x, x.shape[2]) for x in parts[axis.index])] * axis.size
    arrived = zip(*swap(parts, wanted, axis), strict=True)
    return [
        _empty(x, x.shape[1] * axis.size, heads[0].shape[2]).copy_(torch.cat(heads, dim=1))
        for x, heads in zip(tensors, arrived, strict=True)
    ]


def _empty(x: Tensor, heads: int, tokens: int) -> Tensor:
    return empty_length_major(x.new_empty((x.shape[0], heads, tokens, 1)), x.shape[3])
