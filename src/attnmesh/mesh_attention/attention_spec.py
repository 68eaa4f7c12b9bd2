"""A problem on a mesh and how it is solved, this rank's task of it, and what is prepared for calls of one signature."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.scaling import Scaling
from attnmesh.core.selection import Selection
from attnmesh.errors import RankFailure, ShapeError
from attnmesh.kernels.choice import choose
from attnmesh.kernels.driver import visible_counts
from attnmesh.kernels.kernel import KernelRequest
from attnmesh.kernels.selected_keys import SelectedKeys
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh.schedule import EXCHANGE_MODES, Problem, Schedule, groups_of_heads, schedule
from attnmesh.mesh_attention.auto_choices import chosen_mode
from attnmesh.mesh_attention.executor import Task
from attnmesh.mesh_attention.latents import LatentWidths
from attnmesh.runtime.memo import Memo, on_device
from attnmesh.runtime.world import cached_from_code, cached_per_world


class AttentionSpec(NamedTuple):
    """A problem on a mesh and how it is solved, the same on all ranks, with this rank's axes."""

    mesh: Mesh
    problem: Problem
    exchange: str
    kernel: str
    scaling: Scaling
    index_block: int = 0
    """Keys per index of a selection; 0 if there is none."""
    counts_assumed: bool = False
    """True where nobody counted the tokens of other shards, so that they count as even: in a graph without `length`."""

    def check_own_shard(self, queries: int, keys: int) -> None:
        """Raise unless this rank holds as many tokens as its layout gives it."""
        problem = self.problem
        expected = _shard_sizes(self.problem, self.problem.shard_index(self.mesh.shard_index))
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
        cause = "; or shards are uneven: then pass length= to attention in torch.compile" * self.counts_assumed
        return RankFailure(ranks, step, axis, why + cause)

    def to_code(self) -> tuple[str, list[int]]:
        """Return it as names and numbers, which compiled graphs keep as constants."""
        names = [
            *self.mesh.group_names,
            self.exchange,
            self.kernel,
            *map(repr, (*self.scaling, self.index_block, int(self.counts_assumed))),
        ]
        sizes_and_indices = [*self.mesh.shape, *(axis.index for axis in self.mesh.axes)]
        return ",".join(names), [*sizes_and_indices, *self.problem.to_code()]

    @staticmethod
    def from_code(names: str, numbers: Sequence[int]) -> "AttentionSpec":
        """Return the spec that `to_code` wrote."""
        return cached_from_code(_spec_of_code, names, numbers)

    def task(self, q_heads: int, qkv: tuple[Tensor, ...], latent_widths: LatentWidths | None = None) -> Task:
        """Return this rank's task of so many query heads of all ranks. It is made once for tensors of these shapes.

        The tensors may have this rank's share of the heads alone.
        """
        q, k, v = qkv
        signature = self, q_heads, q.shape, k.shape, v.shape, q.dtype, q.device, latent_widths
        if (task := _tasks().get(signature)) is None:
            with torch.inference_mode(False):  # it is kept for later calls, in any mode
                task = _tasks().keep(signature, self._new_task(q_heads, q, k, v, latent_widths))
        return task

    def with_visible_keys(self, task: Task, key_lengths: Tensor | None, indices: Tensor | None) -> Task:
        """Return the task with the real keys of each step. If some keys are selected, it has those of them."""
        if indices is not None:
            return replace(task, selected=self._selected(task.schedule, key_lengths, indices))
        if key_lengths is None:
            return task
        return replace(task, counts=[visible_counts(step.positions, key_lengths) for step in task.schedule.key_steps])

    def _new_task(self, q_heads: int, q: Tensor, k: Tensor, v: Tensor, latent_widths: LatentWidths | None) -> Task:
        """Choose an exchange and a kernel for each step, make this rank's schedule, and cut the heads into groups."""
        mesh, problem = self.mesh, self.problem
        kv_heads = q_heads * k.shape[1] // q.shape[1]
        sizes = q.shape[0], q_heads, kv_heads, q.shape[3], v.shape[3]  # all but tokens, of which a rank may have 0
        if self.exchange == "auto":
            mode = chosen_mode(mesh, q.device, q.dtype, sizes, problem, latent_widths)
        else:
            mode = EXCHANGE_MODES[self.exchange]
        own_schedule = schedule(problem, mesh.queries.index, mesh.keys.index, mode.ring)
        group_count = 1 if latent_widths is not None else mode.head_groups(mesh.shape, kv_heads)
        groups = groups_of_heads(q_heads, kv_heads, mesh.shape.heads, group_count)
        tokens = own_schedule.chunk.queries, own_schedule.chunk.keys, own_schedule.chunk.keys
        whole = zip((q, k, v), tokens, strict=True)  # tensors of the whole chunk
        q, k, v = (x.new_empty(1).expand(*x.shape[:2], count, x.shape[3]) for x, count in whole)
        queries = own_schedule.query_step.positions
        requests = [KernelRequest.of(q, k, v, self.scaling, (queries, x.positions)) for x in own_schedule.key_steps]
        kernels = [choose(request, self.kernel) for request in requests]
        return Task(mesh, own_schedule, groups, kernels, self.scaling, [None] * len(own_schedule.key_steps))

    def _selected(self, schedule: Schedule, key_lengths: Tensor | None, indices: Tensor) -> list[SelectedKeys]:
        """Return the keys of each step that this rank's queries select."""
        queries = schedule.query_step
        selection = Selection(indices, self.index_block)
        if len(queries.keep) < schedule.chunk.queries:  # the others see no key
            selection = selection.of_queries(on_device(queries.keep, indices.device))
        mask, positions = self.problem.mask, queries.positions
        return [SelectedKeys.of(selection, mask, positions, step.positions, key_lengths) for step in schedule.key_steps]


class PreparedAttention(NamedTuple):
    """Spec and task of calls of one signature, settled once: no later call checks, chooses or makes them anew."""

    spec: AttentionSpec
    task: Task | None = None
    """This rank's part. None where autograd or a graph makes it, or where key lengths or a selection change it."""
    text: str = ""
    """The text that ranks compare."""
    payload: Sequence[int] = ()
    """Numbers that this rank sends beside the text."""
    payloads_by_shard: Sequence[Sequence[int]] = ()
    """Numbers that all ranks send when they know the call; none where nobody has counted their tokens."""


@cached_per_world()
def prepared_attentions() -> Memo[PreparedAttention]:
    """Return what is prepared, by the signatures of calls."""
    return Memo(2048)


@cached_per_world()
def _tasks() -> Memo[Task]:
    """Return this rank's tasks, by their `AttentionSpec` and the shapes of tensors."""
    return Memo(2048)


@cached_per_world(1024)
def _spec_of_code(names: str, numbers: tuple[int, ...]) -> AttentionSpec:
    *groups, exchange, kernel, scale, softcap, index_block, counts_assumed = names.split(",")
    mesh = Mesh.named(numbers[:3], numbers[3:6], groups)
    scaling = Scaling(float(scale), float(softcap))
    return AttentionSpec(
        mesh,
        Problem.from_code(mesh.shape, numbers[6:]),
        exchange,
        kernel,
        scaling,
        int(index_block),
        counts_assumed == "1",
    )


@lru_cache(maxsize=1024)
def _shard_sizes(problem: Problem, index: int) -> tuple[int, int]:
    """Return the tokens of queries and of keys in a shard."""
    ranks = problem.shape.ranks
    queries = problem.layout.positions(problem.length, ranks, index)
    return len(queries), len(problem.key_layout.positions(problem.key_length, ranks, index))
