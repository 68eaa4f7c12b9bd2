"""Plans: all that is settled for a kind of calls on a mesh, made once, and attention by a plan, with gradients.

A function of autograd runs a plan, and in a traced graph an operator. Between forward and backward only tensors of a
shard's size are kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from attnmesh.comm.failures import collective
from attnmesh.comm.topology import surroundings
from attnmesh.core.layout import Contiguous, Packed, Split
from attnmesh.core.logits import Logits
from attnmesh.core.mask import Mask
from attnmesh.core.partial import Partial, merge_unchecked, sum_dtype
from attnmesh.core.selection import Selection
from attnmesh.errors import RankFailure, ShapeError
from attnmesh.kernels.blocks import BackwardInputs, Need
from attnmesh.kernels.choice import choose
from attnmesh.kernels.driver import visible_counts
from attnmesh.kernels.local_op import sink_gradient
from attnmesh.kernels.local_plan import empty_length_major, length_major
from attnmesh.kernels.selected_keys import SelectedKeys
from attnmesh.kernels.traced import Once, is_learned, needs_operator, once
from attnmesh.mesh.axes import Axis, Mesh
from attnmesh.mesh.exchange_cost import LayerWork, fastest_exchange
from attnmesh.mesh.schedule import EXCHANGES, ChunkSize, Exchange, Problem, Schedule, groups_of_heads, schedule
from attnmesh.mesh_attention.executor import Task, backward, forward
from attnmesh.mesh_attention.head_swap import empty_tokens
from attnmesh.mesh_attention.latents import Latents
from attnmesh.runtime.caches import Kinds, on_device
from attnmesh.runtime.counters import Tensors
from attnmesh.runtime.operators import operator, recorded
from attnmesh.runtime.world import cached_per_world, decode_cached

Widths = tuple[int, int]
"""Columns of a latent that are projected, and its rotated ones."""


class MeshPlan(NamedTuple):
    """A problem on a mesh and how it is solved, the same on all ranks, with this rank's place."""

    mesh: Mesh
    problem: Problem
    exchange: str
    kernel: str
    logits: Logits
    block: int = 0
    """Keys per index of a selection; 0 if there is none."""
    even: bool = False
    """True where nobody counted the tokens of other shards: in a graph without `length`."""

    def check_own_shard(self, queries: int, keys: int) -> None:
        """Raise unless this rank holds as many tokens as its layout gives it."""
        problem, expected = self.problem, _shard_sizes(self.problem, self.problem.shard(self.mesh.shard))
        if (queries, keys) != expected:
            given = f"{queries} queries and {keys} keys"
            shape = (
                f"a shard of {expected[0]} queries of {problem.length} and {expected[1]} keys of {problem.key_length}"
            )
            fix = "shard with am.shard and this layout, or correct length and key_length"
            raise ShapeError("attention", shape, given, fix)

    def explained(self, failure: RankFailure) -> RankFailure:
        """Return the failure of an exchange, with the cause that it may have in a graph."""
        ranks, step, axis, why = failure.args
        cause = "; or shards are uneven: then pass length= to attention in torch.compile" * self.even
        return RankFailure(ranks, step, axis, why + cause)

    def pack(self) -> tuple[str, list[int]]:
        """Return the plan as names and numbers, which compiled graphs keep as constants."""
        names = [
            *self.mesh.group_names,
            self.exchange,
            self.kernel,
            *map(repr, (*self.logits, self.block, int(self.even))),
        ]
        places = [*self.mesh.shape, *(axis.index for axis in self.mesh.axes)]
        return ",".join(names), [*places, *self.problem.encode()]

    @staticmethod
    def unpack(names: str, numbers: Sequence[int]) -> "MeshPlan":
        """Return the plan that `pack` wrote."""
        return decode_cached(_unpack, names, numbers)

    def task(
        self,
        q_heads: int,
        qkv: Tensors,
        key_lengths: Tensor | None = None,
        indices: Tensor | None = None,
        latents: Latents | None = None,
    ) -> Task:
        """Return this rank's part for so many query heads of all ranks, with the keys of each step that are seen.

        The tensors may have this rank's share of the heads alone.
        """
        (q, k, v), widths = qkv, None if latents is None else latents.widths
        kind = self, q_heads, q.shape, k.shape, v.shape, q.dtype, q.device, widths
        if (task := _tasks().get(kind)) is None:
            with torch.device("cpu"), torch.inference_mode(False):  # it is kept for later calls, in any mode
                task = _tasks().keep(kind, self._new_task(q_heads, q, k, v, widths))
        if latents is not None:
            task = replace(task, projection=latents.projection)
        if indices is not None:
            return replace(task, selected=self._selected(task.schedule, key_lengths, indices))
        if key_lengths is None:
            return task
        return replace(task, counts=[visible_counts(step.positions, key_lengths) for step in task.schedule.key_steps])

    def _new_task(self, q_heads: int, q: Tensor, k: Tensor, v: Tensor, latent: Widths | None) -> Task:
        mesh, problem = self.mesh, self.problem
        kv_heads = q_heads * k.shape[1] // q.shape[1]
        sizes = q.shape[0], q_heads, kv_heads, q.shape[3], v.shape[3]  # all but tokens, of which a rank may have 0
        if self.exchange == "auto":
            exchange = _fastest_exchange(mesh, q.device, q.dtype, sizes, problem, latent)
        else:
            exchange = EXCHANGES[self.exchange]
        steps = schedule(problem, mesh.queries.index, mesh.keys.index, exchange.ring)
        number = 1 if latent else exchange.head_groups(mesh.shape, kv_heads)
        groups = groups_of_heads(q_heads, kv_heads, mesh.shape.heads, number)
        tokens = steps.chunk.queries, steps.chunk.keys, steps.chunk.keys
        whole = zip((q, k, v), tokens, strict=True)  # of the whole chunk
        q, k, v = (x.new_empty(1).expand(*x.shape[:2], count, x.shape[3]) for x, count in whole)
        queries, call = steps.query_step.positions, (q, k, v, self.logits)
        kernels = [choose(Need.of(*call, (queries, x.positions)), self.kernel) for x in steps.key_steps]
        return Task(mesh, steps, groups, kernels, self.logits, [None] * len(steps.key_steps))

    def _selected(self, schedule: Schedule, key_lengths: Tensor | None, indices: Tensor) -> list[SelectedKeys]:
        """Return the keys of each step that this rank's queries select."""
        queries, selection = schedule.query_step, Selection(indices, self.block)
        if len(queries.keep) < schedule.chunk.queries:  # the others see no key
            selection = selection.of_queries(on_device(queries.keep, indices.device))
        mask, places = self.problem.mask, queries.positions
        return [SelectedKeys.of(selection, mask, places, step.positions, key_lengths) for step in schedule.key_steps]


@cached_per_world(1024)
def _unpack(names: str, numbers: tuple[int, ...]) -> MeshPlan:
    *groups, exchange, kernel, scale, softcap, block, even = names.split(",")
    mesh = Mesh.named(numbers[:3], numbers[3:6], groups)
    logits = Logits(float(scale), float(softcap))
    return MeshPlan(mesh, Problem.decode(mesh.shape, numbers[6:]), exchange, kernel, logits, int(block), even == "1")


@lru_cache(maxsize=1024)
def _shard_sizes(problem: Problem, shard: int) -> tuple[int, int]:
    """Return the tokens of queries and of keys in a shard."""
    ranks = problem.shape.ranks
    queries = problem.layout.positions(problem.length, ranks, shard)
    return len(queries), len(problem.key_layout.positions(problem.key_length, ranks, shard))


@cached_per_world()
def _tasks() -> Kinds[Task]:
    """Return the tasks of this rank by plan and kind of tensors."""
    return Kinds()


@cached_per_world(1024)
def _fastest_exchange(
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    problem: Problem,
    latent: Widths | None,
) -> Exchange:
    """Return the exchange that takes least. It depends on values that are equal on all ranks."""
    if 0 in (problem.length, problem.key_length, *sizes):
        return EXCHANGES["bulk"]
    cluster, tile = surroundings(mesh, device)
    batch, *heads_and_widths = sizes
    cross = problem.key_length != problem.length  # priced as if every query saw every key
    work = LayerWork(
        *heads_and_widths,
        length=max(problem.length, problem.key_length),
        item=dtype.itemsize,
        mask=Mask() if cross else problem.mask,
        batch=batch,
        backward=latent is None,
        latent=latent,
    )
    # Sizes may be those of one part alone.
    cut = isinstance(problem.layout, Split) or (cross and isinstance(problem.layout, Packed))
    layout = Contiguous() if cut else problem.layout
    return fastest_exchange(cluster, tile, problem.shape, layout, work)


# --- attention ---


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key_lengths: Tensor | None,
    indices: Tensor | None,
    plan: MeshPlan,
    latents: Latents | None = None,
    further: Partial | None = None,
) -> Tensor:
    """Return attention of this rank's queries, by an operator where PyTorch traces or transforms calls.

    `latents` travel instead of keys and values, along a mesh without a heads axis, and are expanded where they are
    attended. `further` is the partial of keys that do not travel. With either there are no gradients.
    """
    if latents is None and further is None:
        if needs_operator(q, k, v, sinks):
            out: Tensor = mesh_op(q, k, v, sinks, key_lengths, indices, *plan.pack())[0]
            return out
        if is_learned(q, k, v, sinks):
            out, *_ = _attend_learned(q, k, v, sinks, key_lengths, indices, plan)
            return out
    with torch.no_grad():
        task = plan.task(q.shape[1], (q, k, v), key_lengths, indices, latents)
        found = forward(q, (k, v) if latents is None else (latents.tokens,), task, sinks)
        if further is not None:
            found = merge_unchecked([found, further])
        return length_major(found.out, q.dtype)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key_lengths: Tensor | None,
    indices: Tensor | None,
    plan: MeshPlan,
) -> tuple[Tensor, ...]:
    """Return (out, lse) of this rank's queries, and with a heads axis its heads of q, k and v."""
    task = plan.task(q.shape[1], (q, k, v), key_lengths, indices)
    share = _blank_share((q, k, v), task.schedule.chunk, plan.mesh.heads)
    out, lse = forward(q, (k, v), task, sinks, share)
    return length_major(out, q.dtype), lse, *share


def _blank_share(qkv: Tensors, chunk: ChunkSize, axis: Axis) -> Tensors:
    """Return memory for a rank's heads of q, k and v, of all tokens of its chunk; none without a heads axis."""
    if axis.size == 1:
        return ()
    (q, *kv), key_heads = qkv, axis.share_of(int(qkv[1].shape[1]))  # in a graph of any heads, a symbol
    heads = key_heads.stop - key_heads.start
    shared = q.shape[1] // qkv[1].shape[1]
    return empty_tokens(q, heads * shared, chunk.queries), *(empty_tokens(x, heads, chunk.keys) for x in kv)


def _backward(
    plan: MeshPlan, key_lengths: Tensor | None, indices: Tensor | None, *tensors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of this rank's tokens, from q, k, v, out, lse and the gradient of out."""
    *qkv, out, lse, dout = tensors
    task = plan.task(dout.shape[1], tuple(qkv), key_lengths, indices)
    return backward(tuple(qkv), BackwardInputs(out, lse, dout), task)


def _are_equal(numbers: Tensor, mesh: Mesh) -> Tensor:
    """Return whether all ranks of a mesh hold the same integers, on the device: the host reads nothing."""
    highest = torch.stack((numbers, -numbers))
    for axis in mesh.axes:
        if axis.group is not None:
            collective(axis, "comparing key_lengths", dist.all_reduce, highest, dist.ReduceOp.MAX)
    return (highest.sum(0) == 0).all()


# --- gradients ---


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    *qkv, sinks, key_lengths, indices = inputs[:6]
    ctx.plan, (out, lse, *share) = inputs[6:], output
    ctx.save_for_backward(*(share or qkv), sinks, key_lengths, indices, out, lse)
    ctx.mark_non_differentiable(lse, *share)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Any, *_: None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, key_lengths, indices, out, lse = ctx.saved_tensors
    dsinks = None
    if len(ctx.plan) > 1:  # an operator, whose plan is packed
        dout = dout[0]
        dq, dk, dv = mesh_backward_op([q, k, v], [out, lse], dout, key_lengths, indices, *ctx.plan)
        if sinks is not None:
            dsinks = sink_gradient(sinks, out, lse, dout)
    else:
        dq, dk, dv = once(_backward, *ctx.plan, key_lengths, indices, q, k, v, out, lse, dout)
        if sinks is not None:
            dsinks = once(sink_gradient, sinks, out, lse, dout)
    return dq, dk, dv, dsinks


_attend_learned = recorded(_attend, _save_for_backward, _gradients)


# --- operators: a plan is packed into names and numbers ---


def _fake_outputs(q: Tensor, k: Tensor, v: Tensor, *plan: Any) -> list[Tensor]:
    mesh, problem, *_ = MeshPlan.unpack(*plan[3:])
    place = mesh.queries.index, mesh.keys.index
    chunk = ChunkSize(problem.queries(*place).shape[0], problem.keys(*place).shape[0])
    out, lse = empty_length_major(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=sum_dtype(q.dtype))
    return [out, lse, *_blank_share((q, k, v), chunk, mesh.heads)]


@operator("mesh_attention", _fake_outputs, _save_for_backward, _gradients)
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
    """Return what `_attend` does, with out NaN if the ranks' `key_lengths` differ, which no graph compares."""
    plan = MeshPlan.unpack(names, numbers)
    plan.check_own_shard(q.shape[2], k.shape[2])
    try:
        out, *others = _attend(q, k, v, sinks, key_lengths, indices, plan)
    except RankFailure as failure:
        raise plan.explained(failure) from failure
    if key_lengths is not None:
        out.masked_fill_(~_are_equal(key_lengths.to(q.device), plan.mesh), torch.nan)
    return [out, *others]


def _fake_gradients(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], dout: Tensor, key_lengths: Any, indices: Any, *plan: Any
) -> tuple[Tensor, Tensor, Tensor]:
    (q, k, v), (mesh, problem, *_) = inputs, MeshPlan.unpack(*plan)
    heads = dout.shape[1] * k.shape[1] // q.shape[1]
    shard = problem.shard(mesh.shard)
    tokens = problem.key_layout.positions(problem.key_length, problem.shape.ranks, shard).shape[0]
    return empty_length_major(dout, q.shape[3]), empty_tokens(k, heads, tokens), empty_tokens(v, heads, tokens)


@operator("mesh_attention_backward", _fake_gradients, backward=Once.backward)
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
    return _backward(MeshPlan.unpack(names, numbers), key_lengths, indices, *inputs, *outputs, dout)
