"""Attention on the queries x keys mesh as a differentiable operator of PyTorch.

Between forward and backward only tensors of a shard's size are kept.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.attention.executor import Task, backward, forward
from attnmesh.comm.topology import surroundings
from attnmesh.core.mask import Mask
from attnmesh.core.partial import wide, with_sinks
from attnmesh.kernels.attend import empty_placed, placed, sink_gradient
from attnmesh.kernels.driver import SavedForward
from attnmesh.kernels.select import choose
from attnmesh.mesh.axes import Mesh, cached_per_world
from attnmesh.mesh.schedule import EXCHANGES, Exchange, Problem, schedule
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.auto import best_exchange
from attnmesh.planner.workload import Workload


@torch.library.custom_op("attnmesh::mesh_attention", mutates_args=())
def mesh_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    groups: str,
    code: Sequence[int],
    exchange: str,
    kernel: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Forward on the queries x keys mesh: (out, lse) of this rank's queries."""
    task = _task(q, k, v, groups, code, exchange, kernel, scale)
    partial = with_sinks(forward(q, k, v, task), sinks)
    return placed(partial.out, q.dtype), partial.lse


@mesh_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_placed(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


@torch.library.custom_op("attnmesh::mesh_attention_backward", mutates_args=())
def mesh_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    groups: str,
    code: Sequence[int],
    exchange: str,
    kernel: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward on the queries x keys mesh: (dq, dk, dv) of this rank's tokens."""
    task = _task(q, k, v, groups, code, exchange, kernel, scale)
    dq, dk, dv = (placed(x, q.dtype) for x in backward(q, k, v, SavedForward(out, lse, dout), task))
    return dq, dk, dv


@mesh_backward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (empty_placed(x, x.shape[-1]) for x in (q, k, v))
    return dq, dk, dv


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, sinks, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse = ctx.saved_tensors
    dq, dk, dv = mesh_backward_op(q, k, v, out, lse, dout, *ctx.options)
    dsinks = None if sinks is None else sink_gradient(sinks, out, lse, dout)
    return dq, dk, dv, dsinks, *[None] * len(ctx.options)


mesh_op.register_autograd(_gradients, setup_context=_remember)


def _task(
    q: Tensor, k: Tensor, v: Tensor, groups: str, code: Sequence[int], exchange: str, kernel: str, scale: float
) -> Task:
    here = Mesh.named(Shape(*code[:3]), code[3:6], groups)
    problem = Problem.decode(here.shape, code[6:])
    alike = q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3]  # of its tokens a rank may hold none
    how = _automatic(here, q.device, q.dtype, alike, problem) if exchange == "auto" else EXCHANGES[exchange]
    plan = schedule(problem, here.queries.index, here.keys.index, how.ring)
    head_groups = how.head_groups(here.shape, k.shape[1] * here.shape.heads)
    return Task(here, plan, head_groups, choose(kernel, q, k, v), scale)


@cached_per_world(1024)
def _automatic(
    here: Mesh, device: torch.device, dtype: torch.dtype, alike: tuple[int, ...], problem: Problem
) -> Exchange:
    """From what all ranks know alike: heads here are a rank's share of them."""
    if problem.shape.queries * problem.shape.keys == 1 or 0 in (problem.length, problem.key_length, *alike):
        return EXCHANGES["bulk"]
    cluster, tile = surroundings(here, device)
    batch, q_heads, kv_heads, head_dim, value_dim = alike
    other = problem.key_length != problem.length  # keys of another sequence: reckoned as if all were seen
    workload = Workload(
        problem.shape.heads * q_heads,
        problem.shape.heads * kv_heads,
        head_dim,
        max(problem.length, problem.key_length),
        value_dim=value_dim,
        batch=batch,
        dtype=dtype,
        mask=Mask() if other else problem.mask,
    )
    return best_exchange(cluster, tile, problem.shape, problem.layout, workload)
