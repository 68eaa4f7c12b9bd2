"""This rank's task of a problem: its exchanges, its heads in groups, and the kernel of each step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.comm.p2p import Channel
from attnmesh.core.selection import Selection
from attnmesh.kernels.choice import choose
from attnmesh.kernels.driver import KeyCounts, VisibleKeys, visible_counts
from attnmesh.kernels.kernel import Kernel, KernelRequest
from attnmesh.kernels.selected_keys import SelectedKeys
from attnmesh.mesh.schedule import (
    EXCHANGE_MODES,
    GatherStep,
    HeadGroup,
    HeadSlices,
    Schedule,
    groups_of_heads,
    make_schedule,
)
from attnmesh.mesh_attention.attention_spec import AttentionSpec
from attnmesh.mesh_attention.auto_choices import agreed_mode
from attnmesh.mesh_attention.head_swap import HeadAllToAll, HeadTensors
from attnmesh.mesh_attention.latents import LatentWidths, Projection
from attnmesh.runtime.memo import index_on
from attnmesh.runtime.world import cached_per_world


class TaskStep(NamedTuple):
    """One step of the keys: how they arrive, and the kernel that attends them."""

    gather: GatherStep
    onward: GatherStep | None
    """The step with which dk and dv of these keys are sent on, of `Schedule.gradient_steps`."""
    visible_keys: VisibleKeys
    kernel: Kernel
    counts: KeyCounts = None
    """Real keys of each sequence."""


@dataclass(frozen=True)
class Task:
    """This rank's part of a problem: its schedule, the channels that it runs on, and each step of the keys."""

    spec: AttentionSpec
    schedule: Schedule
    groups: Sequence[HeadGroup]
    steps: Sequence[TaskStep]
    along_heads: HeadAllToAll
    kv_channel: Channel
    """The queries axis, along which keys and values travel."""
    query_channel: Channel
    """The keys axis, along which queries travel."""
    projection: Projection | None = None
    """Projection of latents, where these travel instead of keys and values."""

    def steps_of(self, group: HeadGroup) -> Sequence[TaskStep]:
        """Return the steps of a group of heads. Selected keys are those that its heads select."""
        if not self.spec.index_block:  # a band is that of all heads
            return self.steps
        heads = group[self.spec.mesh.heads.index].kv_heads
        return [step._replace(visible_keys=step.visible_keys.select_heads(heads)) for step in self.steps]

    def heads_of(self, group: HeadGroup, own_heads: HeadTensors) -> HeadTensors:
        """Return a group's heads, as views. `own_heads` are this rank's heads of all groups."""
        index = self.spec.mesh.heads.index
        slices, slices_of_first_group = group[index], self.groups[0][index]  # they count the heads of all ranks
        among_own_heads = (
            slice(heads.start - first.start, heads.stop - first.start)
            for heads, first in zip(slices, slices_of_first_group, strict=True)
        )
        return own_heads.some_heads(HeadSlices(*among_own_heads))

    def with_visible_keys(self, key_lengths: Tensor | None, indices: Tensor | None) -> "Task":
        """Return the task with the real keys of each step; with `indices`, with the selected ones of these."""
        if indices is not None:
            return self._with_selected_keys(key_lengths, indices)
        if key_lengths is None:
            return self
        steps = [step._replace(counts=visible_counts(step.gather.positions, key_lengths)) for step in self.steps]
        return replace(self, steps=steps)

    def _with_selected_keys(self, key_lengths: Tensor | None, indices: Tensor) -> "Task":
        """Return the task with the keys of each step that this rank's queries select."""
        queries, mask = self.schedule.query_step, self.spec.problem.mask
        selection = Selection(indices, self.spec.index_block)
        if len(queries.keep) < self.schedule.chunk.queries:  # the other queries see no key
            selection = selection.of_queries(index_on(queries.keep, indices.device))
        steps = []
        for step in self.steps:
            selected_keys = SelectedKeys.of(selection, mask, queries.positions, step.gather.positions, key_lengths)
            steps.append(step._replace(visible_keys=selected_keys))
        return replace(self, steps=steps)


def task_of(
    spec: AttentionSpec, q_heads: int, qkv: tuple[Tensor, Tensor, Tensor], latent_widths: LatentWidths | None = None
) -> Task:
    """Return this rank's task, made once for tensors of these shapes.

    `q_heads` counts the query heads of all ranks. The tensors may have this rank's share of the heads alone. Ranks
    agree on an exchange "auto" in the first call.
    """
    q, k, v = qkv
    return _new_task(spec, q_heads, (q.shape, k.shape, v.shape), q.dtype, q.device, latent_widths)


@cached_per_world(2048)
@torch.inference_mode(False)  # the task is kept for later calls, in any mode
def _new_task(
    spec: AttentionSpec,
    q_heads: int,
    shapes: tuple[torch.Size, torch.Size, torch.Size],
    dtype: torch.dtype,
    device: torch.device,
    latent_widths: LatentWidths | None,
) -> Task:
    """Choose an exchange and a kernel for each step, make this rank's schedule, and cut the heads into groups."""
    mesh, problem = spec.mesh, spec.problem
    (batch, own_q_heads, _, dim), (_, own_kv_heads, *_), (*_, value_dim) = shapes
    kv_heads = q_heads * own_kv_heads // own_q_heads
    sizes = batch, q_heads, kv_heads, dim, value_dim  # all but tokens, of which a rank may have 0
    if spec.exchange == "auto":
        mode = agreed_mode(mesh, device, dtype, sizes, problem, latent_widths)
    else:
        mode = EXCHANGE_MODES[spec.exchange]
    own_schedule = make_schedule(problem, mesh.queries.index, mesh.keys.index, mode.ring)
    group_count = 1 if latent_widths is not None else mode.head_groups(mesh.shape, kv_heads)
    groups = groups_of_heads(q_heads, kv_heads, mesh.shape.heads, group_count)
    counts = own_schedule.chunk.queries, own_schedule.chunk.keys, own_schedule.chunk.keys
    one = torch.empty(1, dtype=dtype, device=device)
    whole = zip(shapes, counts, strict=True)  # tensors of the whole chunk
    q, k, v = (one.expand(*shape[:2], count, shape[3]) for shape, count in whole)
    steps = []
    gathers = zip(own_schedule.key_steps, own_schedule.gradient_steps, own_schedule.bands, strict=True)
    for gather, onward, band in gathers:
        request = KernelRequest.of(q, k, v, spec.scaling, (own_schedule.query_step.positions, gather.positions))
        steps.append(TaskStep(gather, onward, band, choose(request, spec.kernel)))
    # With one group of heads each exchange ends before another begins along its axis. With several groups those of the
    # next group begin earlier. The exception is a ring of one group: its exchanges overlap, but each goes to one rank,
    # and `one_at_a_time` says nothing of exchanges to fewer than three.
    head_channel, kv_channel, query_channel = (
        Channel(axis, device, one_at_a_time=group_count == 1) for axis in mesh.axes
    )
    along_heads = HeadAllToAll(head_channel, own_schedule)
    return Task(spec, own_schedule, groups, steps, along_heads, kv_channel, query_channel)
