"""The ways to run attention on a mesh: on one rank, as a task, recorded by autograd, or as an operator of a graph.

A function of autograd runs an `AttentionSpec`, and in a traced graph an operator. Between forward and backward only
tensors of a shard's size are kept.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.failures import run_collective
from attnmesh.core.partial import Partial, merge_partials, sum_dtype
from attnmesh.core.selection import Visible
from attnmesh.errors import RankFailure
from attnmesh.kernels.local_op import attend_locally, sink_gradient
from attnmesh.kernels.rectangles import BackwardInputs
from attnmesh.kernels.traced import OnceDifferentiable, run_once_differentiable
from attnmesh.mesh.axes import Axis, RankMesh
from attnmesh.mesh.schedule import ChunkSize
from attnmesh.mesh_attention.attention_spec import AttentionSpec
from attnmesh.mesh_attention.executor import backward, forward
from attnmesh.mesh_attention.head_swap import HeadTensors, empty_tokens
from attnmesh.mesh_attention.task import task_of
from attnmesh.runtime.operators import autograd_function, custom_operator
from attnmesh.runtime.tensors import Tensors, empty_length_major, length_major

# --- attention ---


def run_on_one_rank(
    qkv: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    visible: Visible,
    spec: AttentionSpec,
    other_partial: Partial | None,
) -> Tensor:
    """Return attention over the keys of this rank, merged with `other_partial`."""
    q, k, v = qkv
    partial = attend_locally(q, k, v, visible, spec.scaling, spec.kernel, sinks)
    if other_partial is None:
        return partial.out
    return merge_partials([Partial(*partial), other_partial]).out.to(q.dtype)


def _run_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key_lengths: Tensor | None,
    indices: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, ...]:
    """Return (out, lse) of this rank's queries. With a heads axis its heads of q, k and v follow."""
    task = task_of(spec, q.shape[1], (q, k, v)).with_visible_keys(key_lengths, indices)
    blank = _blank_heads((q, k, v), task.schedule.chunk, spec.mesh.heads)
    out, lse = forward(q, (k, v), task, sinks, HeadTensors(blank[:1], blank[1:]) if blank else None)
    return length_major(out, q.dtype), lse, *blank


def _blank_heads(qkv: Tensors, chunk: ChunkSize, axis: Axis) -> Tensors:
    """Return memory for a rank's heads of q, k and v, of all tokens of its chunk; none without a heads axis."""
    if axis.size == 1:
        return ()
    q, *kv = qkv
    kv_heads = axis.slice_of(int(kv[0].shape[1]))  # in a graph of any heads, a symbol
    heads = kv_heads.stop - kv_heads.start
    heads_per_kv = q.shape[1] // kv[0].shape[1]
    return empty_tokens(q, heads * heads_per_kv, chunk.queries), *(empty_tokens(x, heads, chunk.keys) for x in kv)


def _backward(
    spec: AttentionSpec, key_lengths: Tensor | None, indices: Tensor | None, *tensors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of this rank's tokens. They are made of q, k, v, out, lse and the gradient of out."""
    q, k, v, out, lse, dout = tensors
    task = task_of(spec, dout.shape[1], (q, k, v)).with_visible_keys(key_lengths, indices)
    return backward(HeadTensors((q,), (k, v)), BackwardInputs(out, lse, dout), task)


def _are_equal(numbers: Tensor, mesh: RankMesh) -> Tensor:
    """Return whether all ranks of a mesh hold the same integers, on the device: the CPU reads nothing."""
    highest = torch.stack((numbers, -numbers))
    for axis in mesh.axes:
        if axis.group is not None:
            run_collective(axis, "comparing key_lengths", dist.all_reduce, highest, dist.ReduceOp.MAX)
    return (highest.sum(0) == 0).all()


# --- gradients ---


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    *qkv, sinks, key_lengths, indices = inputs[:6]
    out, lse, *head_tensors = output
    ctx.spec, ctx.code = (inputs[6], None) if len(inputs) == 7 else (None, inputs[6:])  # an operator has the code
    ctx.save_for_backward(*(head_tensors or qkv), sinks, key_lengths, indices, out, lse)
    ctx.mark_non_differentiable(lse, *head_tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Any, *_: None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, key_lengths, indices, out, lse = ctx.saved_tensors
    dsinks = None
    if ctx.code is not None:
        (dout, *_) = dout  # an operator's outputs are a list
        dq, dk, dv = mesh_backward_op([q, k, v], [out, lse], dout, key_lengths, indices, *ctx.code)
        if sinks is not None:
            dsinks = sink_gradient(sinks, out, lse, dout)
    else:
        dq, dk, dv = run_once_differentiable(_backward, ctx.spec, key_lengths, indices, q, k, v, out, lse, dout)
        if sinks is not None:
            dsinks = run_once_differentiable(sink_gradient, sinks, out, lse, dout)
    return dq, dk, dv, dsinks


run_with_grad = autograd_function(_run_spec, _save_for_backward, _gradients)
"""Attention on a mesh, recorded by autograd."""


# --- operators: an `AttentionSpec` is packed into names and numbers ---


def _fake_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key_lengths: Tensor | None,
    indices: Tensor | None,
    names: str,
    numbers: Sequence[int],
) -> list[Tensor]:
    spec = AttentionSpec.from_code(names, numbers)
    mesh, problem = spec.mesh, spec.problem
    coordinate = mesh.queries.index, mesh.keys.index
    chunk = ChunkSize(problem.query_positions(*coordinate).shape[0], problem.key_positions(*coordinate).shape[0])
    out = empty_length_major(q, v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=sum_dtype(q.dtype))
    return [out, lse, *_blank_heads((q, k, v), chunk, mesh.heads)]


@custom_operator("mesh_attention", _fake_outputs, _save_for_backward, _gradients)
def mesh_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key_lengths: Tensor | None,
    indices: Tensor | None,
    names: str,
    numbers: Sequence[int],
) -> list[Tensor]:
    """Return what `_run_spec` returns. `out` is NaN if `key_lengths` differ between ranks, which no graph compares."""
    spec = AttentionSpec.from_code(names, numbers)
    spec.check_own_shard(q.shape[2], k.shape[2])
    try:
        out, *head_tensors = _run_spec(q, k, v, sinks, key_lengths, indices, spec)
    except RankFailure as failure:
        ranks, step, axis, why = failure.args
        cause = "; or shards are uneven: then pass length= to attention in torch.compile" * spec.counts_assumed
        raise RankFailure(ranks, step, axis, why + cause) from failure
    if key_lengths is not None:
        out.masked_fill_(~_are_equal(key_lengths.to(q.device), spec.mesh), torch.nan)
    return [out, *head_tensors]


def _fake_gradients(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    dout: Tensor,
    key_lengths: Tensor | None,
    indices: Tensor | None,
    names: str,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs
    spec = AttentionSpec.from_code(names, numbers)
    mesh, problem = spec.mesh, spec.problem
    heads = dout.shape[1] * k.shape[1] // q.shape[1]
    index = problem.shard_at(mesh.shard_index)
    tokens = problem.key_layout.positions(problem.key_length, problem.shape.ranks, index).shape[0]
    return empty_length_major(dout, q.shape[3]), empty_tokens(k, heads, tokens), empty_tokens(v, heads, tokens)


@custom_operator("mesh_attention_backward", _fake_gradients, backward=OnceDifferentiable.backward)
def mesh_backward_op(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    dout: Tensor,
    key_lengths: Tensor | None,
    indices: Tensor | None,
    names: str,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of this rank's tokens from its (q, k, v) and (out, lse)."""
    return _backward(AttentionSpec.from_code(names, numbers), key_lengths, indices, *inputs, *outputs, dout)
