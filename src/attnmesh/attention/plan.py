"""Plans: all that is settled for a kind of calls on a mesh. A plan is made once, and every call of its kind runs it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.attention.executor import Task
from attnmesh.comm.topology import surroundings
from attnmesh.core.layout import Contiguous, Packed, Split
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

    def task(self, q_heads: int, q: Tensor, k: Tensor, v: Tensor, latent: Widths | None = None) -> Task:
        """Return this rank's part for so many query heads, of which the tensors may have this rank's share alone."""
        kind = self, q_heads, q.shape, k.shape, v.shape, q.dtype, q.device, latent
        if (task := _tasks().find(kind)) is None:
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
        tokens = zip((q, k, v), (steps.chunk[0], *steps.chunk[1:] * 2), strict=True)  # those of the whole chunk
        q, k, v = (x.new_empty(1).expand(*x.shape[:2], count, x.shape[3]) for x, count in tokens)
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
