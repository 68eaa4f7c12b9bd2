"""The heads axis: DeepSpeed-Ulysses' all-to-all, as an operator whose gradient is the all-to-all back.

Before it a rank holds all heads of its own tokens. After it a rank holds its share of the heads, for the tokens of all
ranks along the axis, in order of position.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from attnmesh.attention.plan import Plan
from attnmesh.comm.p2p import meta_like, swap
from attnmesh.kernels.plans import empty_length_major
from attnmesh.kernels.traced import is_learned, needs_operator
from attnmesh.mesh.axes import Axis
from attnmesh.mesh.schedule import Problem
from attnmesh.runtime.kept import on_device


def tokens_to_heads(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's share of the heads, for the tokens of all ranks along the heads axis."""
    if plan.mesh.heads.size == 1:
        return q, k, v
    q, k, v = _swap([q, k, v], [False, True, True], plan, to_heads=True)
    return q, k, v


def heads_to_tokens(out: Tensor, plan: Plan) -> Tensor:
    """Return all heads of this rank's tokens."""
    return out if plan.mesh.heads.size == 1 else _swap([out], [False], plan, to_heads=False)[0]


def _swap(tensors: list[Tensor], are_keys: list[bool], plan: Plan, *, to_heads: bool) -> Sequence[Tensor]:
    """Exchange tokens for heads, or heads for tokens, by an operator where PyTorch traces or transforms calls."""
    if needs_operator(*tensors):
        swapped: Sequence[Tensor] = swap_op(tensors, are_keys, *plan.pack(), to_heads)
        return swapped
    if is_learned(*tensors):
        return _swap_learned(are_keys, plan, to_heads, *tensors)
    return _exchange(tensors, are_keys, plan, to_heads)


def _exchange(tensors: Sequence[Tensor], are_keys: Sequence[bool], plan: Plan, to_heads: bool) -> list[Tensor]:
    tokens = [_tokens(plan, is_key) for is_key in are_keys]
    return (_to_heads if to_heads else _to_tokens)(tensors, plan.mesh.heads, tokens)


class _Swap(torch.autograd.Function):
    """`_exchange` with gradients, where PyTorch traces nothing: the exchange back."""

    @staticmethod
    def forward(ctx: Any, are_keys: list[bool], plan: Plan, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors exchanged."""
        ctx.call = are_keys, plan, to_heads
        return tuple(_exchange(tensors, are_keys, plan, to_heads))

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, which are exchanged as tensors are."""
        are_keys, plan, to_heads = ctx.call
        return None, None, None, *_swap_learned(are_keys, plan, not to_heads, *douts)


_swap_learned: Callable[..., tuple[Tensor, ...]] = _Swap.apply


@torch.library.custom_op("attnmesh::swap_heads", mutates_args=())
def swap_op(
    tensors: Sequence[Tensor], are_keys: Sequence[bool], names: str, numbers: Sequence[int], to_heads: bool
) -> list[Tensor]:
    """Exchange tokens for heads, or heads for tokens. `are_keys` marks the tensors that have the keys' tokens."""
    return _exchange(tensors, are_keys, Plan.unpack(names, numbers), to_heads)


@swap_op.register_fake
def _(
    tensors: Sequence[Tensor], are_keys: Sequence[bool], names: str, numbers: Sequence[int], to_heads: bool
) -> list[Tensor]:
    plan = Plan.unpack(names, numbers)
    size, index = plan.mesh.heads.size, plan.mesh.heads.index
    counts = [[len(tokens) for tokens in _tokens(plan, is_key)] for is_key in are_keys]
    if to_heads:
        return [_empty(x, x.shape[1] // size, sum(count)) for x, count in zip(tensors, counts, strict=True)]
    return [_empty(x, x.shape[1] * size, count[index]) for x, count in zip(tensors, counts, strict=True)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, *ctx.options, ctx.to_heads = inputs


def _gradient(ctx: Any, douts: list[Tensor]) -> tuple[list[Tensor] | None, ...]:
    return swap_op(douts, *ctx.options, not ctx.to_heads), None, None, None, None


swap_op.register_autograd(_gradient, setup_context=_save_for_backward)


def _tokens(plan: Plan, is_key: bool) -> list[Tensor]:
    """Return for each rank along the axis where its tokens stand among the tokens of all, in order of position."""
    problem, mesh = plan.problem, plan.mesh
    traced = type(problem.length) is not int or type(problem.key_length) is not int  # SymInts, which have no hash
    return (_places.__wrapped__ if traced else _places)(problem, mesh.queries.index, mesh.keys.index, is_key)


@lru_cache(maxsize=256)
def _places(problem: Problem, r: int, c: int, is_key: bool) -> list[Tensor]:
    layout, length = (problem.key_layout, problem.key_length) if is_key else (problem.layout, problem.length)
    shape = problem.shape
    with torch.device("cpu"), torch.inference_mode(False):  # they are kept for later calls, in any mode
        shards = [layout.positions(length, shape.ranks, shape.shard(h, r, c)) for h in range(shape.heads)]
        places = torch.cat(shards).argsort().argsort()
    return list(places.split([len(shard) for shard in shards]))


def _to_heads(tensors: Sequence[Tensor], axis: Axis, tokens: list[list[Tensor]]) -> list[Tensor]:
    shares = list(zip(*(x.chunk(axis.size, dim=1) for x in tensors), strict=True))
    wanted = [tuple(map(meta_like, shares[0], map(len, places))) for places in zip(*tokens, strict=True)]  # by rank
    results = []
    for x, parts, places in zip(tensors, zip(*swap(shares, wanted, axis), strict=True), tokens, strict=True):
        result = _empty(x, x.shape[1] // axis.size, sum(map(len, places)))
        for place, part in zip(places, parts, strict=True):
            result.index_copy_(2, on_device(place, x.device), part)
        results.append(result)
    return results


def _to_tokens(tensors: Sequence[Tensor], axis: Axis, tokens: list[list[Tensor]]) -> list[Tensor]:
    parts = []
    for places in zip(*tokens, strict=True):  # by rank
        indices = [on_device(place, tensors[0].device) for place in places]
        parts.append(tuple(map(torch.index_select, tensors, repeat(2), indices)))
    results = []
    for x, heads in zip(tensors, zip(*swap(parts, [parts[axis.index]] * axis.size, axis), strict=True), strict=True):
        result = _empty(x, x.shape[1] * axis.size, heads[0].shape[2])
        results.append(result.copy_(torch.cat(heads, dim=1)))
    return results


def _empty(x: Tensor, heads: int, tokens: int) -> Tensor:
    return empty_length_major(x.new_empty((x.shape[0], heads, tokens, 1)), x.shape[3])
