"""Attention on the queries x keys mesh, with gradients: a function of autograd, and an operator in a traced graph.

Between forward and backward only tensors of a shard's size are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.attention.executor import Task, backward, forward
from attnmesh.attention.latent import Latents
from attnmesh.attention.plan import Plan
from attnmesh.comm.failures import collective
from attnmesh.core.partial import sum_dtype, with_sinks
from attnmesh.kernels.attend import sink_gradient
from attnmesh.kernels.blocks import BackwardInputs
from attnmesh.kernels.driver import visible_counts
from attnmesh.kernels.plans import empty_length_major, length_major
from attnmesh.kernels.traced import Once, is_learned, needs_operator, once
from attnmesh.mesh.axes import Mesh


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, key_lengths: Tensor | None, plan: Plan) -> Tensor:
    """Return attention of this rank's queries, by an operator where PyTorch traces or transforms calls."""
    if needs_operator(q, k, v, sinks):
        out, _ = mesh_op(q, k, v, sinks, key_lengths, *plan.pack())
        return out  # type: ignore[no-any-return]
    run = _attend_learned if is_learned(q, k, v, sinks) else _attend
    return run(q, k, v, sinks, key_lengths, plan)[0]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, key_lengths: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of this rank's queries."""
    out, lse = with_sinks(forward(q, (k, v), _task(q, k, v, key_lengths, plan)), sinks)
    return length_major(out, q.dtype), lse


def _backward(plan: Plan, key_lengths: Tensor | None, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of this rank's tokens, from q, k, v, out, lse and the gradient of out."""
    q, k, v, *saved = tensors
    dq, dk, dv = backward(q, k, v, BackwardInputs(*saved), _task(q, k, v, key_lengths, plan))
    return length_major(dq, q.dtype), length_major(dk, q.dtype), length_major(dv, q.dtype)


def _task(q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor | None, plan: Plan) -> Task:
    """Return this rank's task, with the keys of each step that each sequence sees."""
    task = plan.task(q, k, v)
    if key_lengths is None:
        return task
    return replace(task, counts=[visible_counts(step.positions, key_lengths) for step in task.schedule.key_steps])


def _are_equal(numbers: Tensor, mesh: Mesh) -> Tensor:
    """Return whether all ranks of a mesh hold the same integers, on the device: the host reads nothing."""
    highest = torch.stack((numbers, -numbers))
    for axis in mesh.axes:
        if axis.group is not None:
            collective(axis, "comparing key_lengths", dist.all_reduce, highest, dist.ReduceOp.MAX)
    return (highest.sum(0) == 0).all()


@torch.no_grad()
def attend_latents(q: Tensor, k: Tensor, v: Tensor, latents: Latents, sinks: Tensor | None, plan: Plan) -> Tensor:
    """Return attention of this rank's queries, where latents travel and are expanded where they are attended.

    `k` and `v` are this rank's expanded keys and values. The mesh has no heads axis.
    """
    task = replace(plan.task(q, k, v, latents.widths), projection=latents.projection)
    partial = with_sinks(forward(q, (latents.tokens,), task), sinks)
    return length_major(partial.out, q.dtype)


# --- gradients ---


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, key_lengths, *ctx.plan = inputs
    ctx.save_for_backward(q, k, v, sinks, key_lengths, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, key_lengths, out, lse = ctx.saved_tensors
    dsinks = None
    if len(ctx.plan) > 1:
        dq, dk, dv = mesh_backward_op([q, k, v], [out, lse], dout, key_lengths, *ctx.plan)
        if sinks is not None:
            dsinks = sink_gradient(sinks, out, lse, dout)
    else:
        dq, dk, dv = once(_backward, *ctx.plan, key_lengths, q, k, v, out, lse, dout)
        if sinks is not None:
            dsinks = once(sink_gradient, sinks, out, lse, dout)
    return dq, dk, dv, dsinks, None, *[None] * len(ctx.plan)


class _MeshAttention(torch.autograd.Function):
    """`_attend` with gradients, where PyTorch traces nothing."""

    forward = staticmethod(_attend)
    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_gradients)


_attend_learned: Callable[..., tuple[Tensor, Tensor]] = _MeshAttention.apply


# --- operators: a plan is packed into names and numbers ---


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
    """Return (out, lse) of this rank's queries; NaN if the ranks' `key_lengths` differ, which no graph compares."""
    plan = Plan.unpack(names, numbers)
    out, lse = _attend(q, k, v, sinks, key_lengths, plan)
    if key_lengths is not None:
        out.masked_fill_(~_are_equal(key_lengths.to(q.device), plan.mesh), torch.nan)
    return out, lse


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
    return _backward(Plan.unpack(names, numbers), key_lengths, *inputs, *outputs, dout)


@mesh_backward_op.register_fake
def _(inputs: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (empty_length_major(x, x.shape[-1]) for x in inputs)
    return dq, dk, dv


mesh_op.register_autograd(_gradients, setup_context=_save_for_backward)
mesh_backward_op.register_autograd(Once.backward)
