"""Attention on the queries x keys mesh as a differentiable operator of PyTorch.

Between forward and backward only tensors of a shard's size are kept.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.attention.call import Run
from attnmesh.attention.executor import Task, backward, forward
from attnmesh.attention.latent import Latents
from attnmesh.comm.failures import collective
from attnmesh.comm.topology import surroundings
from attnmesh.core.layout import Contiguous, Split
from attnmesh.core.mask import Mask
from attnmesh.core.partial import sum_dtype, with_sinks
from attnmesh.kernels.attend import empty_length_major, length_major, refuse_second_gradients, sink_gradient
from attnmesh.kernels.blocks import BackwardInputs
from attnmesh.kernels.driver import choose, visible_counts
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh.schedule import EXCHANGES, Exchange, Problem, schedule
from attnmesh.mesh.world import cached_per_world
from attnmesh.planner.auto import best_exchange
from attnmesh.planner.workload import Workload


@torch.library.custom_op("attnmesh::mesh_attention", mutates_args=())
def mesh_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key_lengths: Tensor | None,
    names: str,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of this rank's queries. `names` and `numbers` encode a `Run`."""
    run = Run.decode(names, numbers)
    out, lse = with_sinks(forward(q, (k, v), _task(q, k, v, key_lengths, run)), sinks)
    if key_lengths is not None and key_lengths.device.type != "cpu":  # eager calls have compared those of the host
        out = torch.where(_are_equal(key_lengths, run.mesh), out, torch.nan)
    return length_major(out, q.dtype), lse


def _are_equal(numbers: Tensor, mesh: Mesh) -> Tensor:
    """Return whether all ranks of a mesh hold the same integers, on the device: the host reads nothing."""
    highest = torch.stack((numbers, -numbers))
    for axis in mesh.axes:
        if axis.group is not None:
            collective(axis, "comparing key_lengths", dist.all_reduce, highest, dist.ReduceOp.MAX)
    return (highest.sum(0) == 0).all()


@mesh_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_length_major(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=sum_dtype(q.dtype))


@torch.library.custom_op("attnmesh::mesh_attention_backward", mutates_args=())
def mesh_backward_op(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    dout: Tensor,
    key_lengths: Tensor | None,
    names: str,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of this rank's tokens from its (q, k, v) and (out, lse)."""
    (q, k, v), (out, lse) = inputs, outputs
    task = _task(q, k, v, key_lengths, Run.decode(names, numbers))
    dq, dk, dv = (length_major(x, q.dtype) for x in backward(q, k, v, BackwardInputs(out, lse, dout), task))
    return dq, dk, dv


@mesh_backward_op.register_fake
def _(inputs: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (empty_length_major(x, x.shape[-1]) for x in inputs)
    return dq, dk, dv


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, key_lengths, *ctx.code = inputs
    ctx.save_for_backward(q, k, v, sinks, key_lengths, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, key_lengths, out, lse = ctx.saved_tensors
    dq, dk, dv = mesh_backward_op([q, k, v], [out, lse], dout, key_lengths, *ctx.code)
    dsinks = None if sinks is None else sink_gradient(sinks, out, lse, dout)
    return dq, dk, dv, dsinks, None, None, None


mesh_op.register_autograd(_gradients, setup_context=_save_for_backward)
mesh_backward_op.register_autograd(refuse_second_gradients)


@torch.no_grad()
def attend_latents(q: Tensor, k: Tensor, v: Tensor, latents: Latents, sinks: Tensor | None, run: Run) -> Tensor:
    """Return attention of this rank's queries, where latents travel and are expanded where they are attended.

    `k` and `v` are this rank's expanded keys and values. The mesh has no heads axis.
    """
    partial = with_sinks(forward(q, (latents.tokens,), _task(q, k, v, None, run, latents)), sinks)
    return length_major(partial.out, q.dtype)


def _task(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None, run: Run, latents: Latents | None = None
) -> Task:
    """Return this rank's schedule, and the kernel that serves its tensors."""
    mesh, problem = run.mesh, run.problem
    sizes = q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3]  # without tokens, of which a rank may have none
    if run.exchange == "auto":
        latent = None if latents is None else latents.widths
        exchange = _fastest_exchange(mesh, q.device, q.dtype, sizes, problem, latent)
    else:
        exchange = EXCHANGES[run.exchange]
    steps = schedule(problem, mesh.queries.index, mesh.keys.index, exchange.ring)
    head_groups = 1 if latents else exchange.head_groups(mesh.shape, k.shape[1] * mesh.shape.heads)
    projection = None if latents is None else latents.projection
    counts = tuple(visible_counts(step.positions, key_lengths) for step in steps.key_steps)
    kernel = choose(run.kernel, q, k, v, run.logits.capped)
    return Task(mesh, steps, head_groups, kernel, run.logits, counts, projection)


@cached_per_world(1024)
def _fastest_exchange(
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    problem: Problem,
    latent: tuple[int, int] | None,
) -> Exchange:
    """Return the planner's pick. It depends on values that are equal on all ranks."""
    if problem.shape.queries * problem.shape.keys == 1 or 0 in (problem.length, problem.key_length, *sizes):
        return EXCHANGES["bulk"]
    cluster, tile = surroundings(mesh, device)
    batch, q_heads, kv_heads, head_dim, value_dim = sizes
    cross = problem.key_length != problem.length  # priced as if every query saw every key
    workload = Workload(
        problem.shape.heads * q_heads,
        problem.shape.heads * kv_heads,
        head_dim,
        max(problem.length, problem.key_length),
        value_dim=value_dim,
        batch=batch,
        dtype=dtype,
        mask=Mask() if cross else problem.mask,
        phase="training" if latent is None else "prefill",
        latent=latent,
    )
    layout = (
        Contiguous() if isinstance(problem.layout, Split) else problem.layout
    )  # sizes may be those of one part alone
    return best_exchange(cluster, tile, problem.shape, layout, workload)
