"""Plans: all that is settled for a kind of calls on a mesh. A plan is made once, and every call of its kind runs it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.attention.executor import Task
from attnmesh.comm.topology import surroundings
from attnmesh.core.layout import Contiguous, Split
from attnmesh.core.logits import Logits
from attnmesh.core.mask import Mask
from attnmesh.kernels.driver import choose
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh.schedule import EXCHANGES, Exchange, Problem, groups_of_heads, schedule
from attnmesh.planner.auto import best_exchange
from attnmesh.planner.workload import Workload
from attnmesh.runtime.kinds import Kinds
from attnmesh.runtime.world import cached_per_world, decode_cached

Widths = tuple[int, int]
"""Columns of a latent that are projected, and those of a value."""


class Sizes(NamedTuple):
    """Sizes of a call's tensors, all but tokens, of which a rank may have none."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @staticmethod
    def of(q_heads: int, q: Tensor, k: Tensor, v: Tensor) -> "Sizes":
        """Return the sizes for so many query heads of all ranks. The tensors may have those of one rank."""
        return Sizes(q.shape[0], q_heads, q_heads * k.shape[1] // q.shape[1], q.shape[3], v.shape[3])


class Plan(NamedTuple):
    """A problem on a mesh and how it is solved, the same on all ranks, with this rank's place."""

    mesh: Mesh
    problem: Problem
    exchange: str
    kernel: str
    logits: Logits

    def pack(self) -> tuple[str, list[int]]:
        """Return the plan as names and numbers, which compiled graphs keep as constants."""
        names = [*self.mesh.group_names, self.exchange, self.kernel, *map(repr, self.logits)]
        places = [*self.mesh.shape, *(axis.index for axis in self.mesh.axes)]
        return ",".join(names), [*places, *self.problem.encode()]

    @staticmethod
    def unpack(names: str, numbers: Sequence[int]) -> "Plan":
        """Return the plan that `pack` wrote."""
        return decode_cached(_unpack, names, numbers)

    def task(self, sizes: Sizes, like: Tensor, latent: Widths | None = None) -> Task:
        """Return this rank's part for tensors of these sizes, with the dtype and device of another."""
        kind = self, sizes, like.dtype, like.device, latent
        if (task := _tasks().find(kind)) is None:
            with torch.device("cpu"), torch.inference_mode(False):  # it is kept for later calls, in any mode
                task = _tasks().keep(kind, self._task(sizes, like, latent))
        return task

    def _task(self, sizes: Sizes, like: Tensor, latent: Widths | None) -> Task:
        mesh, problem = self.mesh, self.problem
        batch, q_heads, kv_heads, head_dim, value_dim = sizes
        if self.exchange == "auto":
            exchange = _fastest_exchange(mesh, like.device, like.dtype, sizes, problem, latent)
        else:
            exchange = EXCHANGES[self.exchange]
        steps = schedule(problem, mesh.queries.index, mesh.keys.index, exchange.ring)
        number = 1 if latent else exchange.head_groups(mesh.shape, kv_heads)
        groups = groups_of_heads(q_heads, kv_heads, mesh.shape.heads, number)
        queries, keys = steps.chunk
        shapes = (q_heads, queries, head_dim), (kv_heads, keys, head_dim), (kv_heads, keys, value_dim)
        q, k, v = (like.new_empty(1).expand(batch, *shape) for shape in shapes)
        kernel = choose(self.kernel, q, k, v, self.logits.capped)
        return Task(mesh, steps, groups, kernel, self.logits, [None] * len(steps.key_steps))


@cached_per_world(1024)
def _unpack(names: str, numbers: tuple[int, ...]) -> Plan:
    *groups, exchange, kernel, scale, softcap = names.split(",")
    mesh = Mesh.named(numbers[:3], numbers[3:6], groups)
    return Plan(mesh, Problem.decode(mesh.shape, numbers[6:]), exchange, kernel, Logits(float(scale), float(softcap)))


@cached_per_world()
def _tasks() -> Kinds[Task]:
    """Return the tasks of this rank by plan and kind of tensors."""
    return Kinds()


@cached_per_world(1024)
def _fastest_exchange(
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sizes,
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
    layout = Contiguous() if isinstance(problem.layout, Split) else problem.layout
    return best_exchange(cluster, tile, problem.shape, layout, workload)
