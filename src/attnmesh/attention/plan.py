"""Plans: all that is settled for a kind of calls on a mesh. A plan is made once, and every call of its kind runs it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.attention.executor import Task
from attnmesh.comm.topology import share_numbers, surroundings
from attnmesh.core.layout import Contiguous, Packed, Split
from attnmesh.core.logits import Logits
from attnmesh.core.mask import Mask
from attnmesh.kernels.driver import choose_for_places
from attnmesh.mesh.axes import Axis, Mesh, flat_axis
from attnmesh.mesh.schedule import EXCHANGES, Exchange, Problem, groups_of_heads, schedule
from attnmesh.mesh.shapes import AXES
from attnmesh.planner.auto import best_exchange
from attnmesh.planner.workload import Workload
from attnmesh.runtime.kept import Kinds
from attnmesh.runtime.world import cached_per_world, decode_cached

Widths = tuple[int, int]
"""Columns of a latent that are projected, and those of a value."""


class Plan(NamedTuple):
    """A problem on a mesh and how it is solved, the same on all ranks, with this rank's place."""

    mesh: Mesh
    problem: Problem
    exchange: str
    kernel: str
    logits: Logits
    block: int = 0
    """Keys per index of a selection; 0 if there is none."""

    def pack(self) -> tuple[str, list[int]]:
        """Return the plan as names and numbers, which compiled graphs keep as constants."""
        names = [*self.mesh.group_names, self.exchange, self.kernel, *map(repr, (*self.logits, self.block))]
        places = [*self.mesh.shape, *(axis.index for axis in self.mesh.axes)]
        return ",".join(names), [*places, *self.problem.encode()]

    @staticmethod
    def unpack(names: str, numbers: Sequence[int]) -> "Plan":
        """Return the plan that `pack` wrote."""
        return decode_cached(_unpack, names, numbers)

    def task(self, q_heads: int, q: Tensor, k: Tensor, v: Tensor, latent: Widths | None = None) -> Task:
        """Return this rank's part for so many query heads, of which the tensors may have this rank's share alone."""
        kind = self, q_heads, q.shape, k.shape, v.shape, q.dtype, q.device, latent
        if (task := _tasks().get(kind)) is None:
            with torch.device("cpu"), torch.inference_mode(False):  # it is kept for later calls, in any mode
                task = _tasks().keep(kind, self._task(q_heads, q, k, v, latent))
        return task

    def _task(self, q_heads: int, q: Tensor, k: Tensor, v: Tensor, latent: Widths | None) -> Task:
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
        queries, choice = steps.query_step.positions, (self.kernel, q, k, v, self.logits)
        kernels = [choose_for_places(*choice, (queries, x.positions)) for x in steps.key_steps]
        return Task(mesh, steps, groups, kernels, self.logits, [None] * len(steps.key_steps))


@cached_per_world(1024)
def _unpack(names: str, numbers: tuple[int, ...]) -> Plan:
    *groups, exchange, kernel, scale, softcap, block = names.split(",")
    mesh = Mesh.named(numbers[:3], numbers[3:6], groups)
    logits = Logits(float(scale), float(softcap))
    return Plan(mesh, Problem.decode(mesh.shape, numbers[6:]), exchange, kernel, logits, int(block))


@cached_per_world()
def one_column(mesh: Mesh) -> tuple[Mesh, tuple[int, ...]]:
    """Return all ranks of a mesh as one column, and the shard of each. All ranks make the first call at once."""
    long = [axis for axis in mesh.axes if axis.size > 1]
    axis = long[0] if len(long) == 1 else flat_axis(mesh.device_mesh, AXES)
    places = [place for (place,) in share_numbers([axis.index], mesh)]  # by shard
    return Mesh(Axis(), axis, Axis()), tuple(sorted(range(len(places)), key=places.__getitem__))


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
    """Return the planner's pick. It depends on values that are equal on all ranks."""
    if 0 in (problem.length, problem.key_length, *sizes):
        return EXCHANGES["bulk"]
    cluster, tile = surroundings(mesh, device)
    batch, q_heads, kv_heads, head_dim, value_dim = sizes
    cross = problem.key_length != problem.length  # priced as if every query saw every key
    workload = Workload(
        q_heads,
        kv_heads,
        head_dim,
        max(problem.length, problem.key_length),
        value_dim=value_dim,
        batch=batch,
        dtype=dtype,
        mask=Mask() if cross else problem.mask,
        phase="training" if latent is None else "prefill",
        latent=latent,
    )
    # Sizes may be those of one part alone.
    cut = isinstance(problem.layout, Split) or (cross and isinstance(problem.layout, Packed))
    layout = Contiguous() if cut else problem.layout
    return best_exchange(cluster, tile, problem.shape, layout, workload)
