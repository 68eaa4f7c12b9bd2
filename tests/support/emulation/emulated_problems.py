"""Random mesh problems on emulated GPUs. Autograd does not run on emulated tensors, so operators are undone by hand."""

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh_attention import mesh_runs as operators
from attnmesh.mesh_attention.attention import attend_shards
from attnmesh.mesh_attention.attention_arguments import AttentionArguments
from attnmesh.mesh_attention.latents import Latents, Projection
from tests.support.emulation.emulated_gpu import EmulatedGPU
from tests.support.emulation.emulated_nccl import world
from tests.support.ranks.pool import on_each_rank
from tests.support.truth.mesh_problems import MeshProblem, named_mesh, shard_positions


class Context:
    """What autograd keeps of one call of an operator."""

    saved_tensors: tuple[Tensor | None, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_: Tensor) -> None:
        """Do nothing."""

    def set_materialize_grads(self, _: bool) -> None:
        """Do nothing."""


@on_each_rank
def run_on_gpu(gpu: EmulatedGPU, problem: MeshProblem, kernel: str, checked: bool | None) -> list[Tensor]:
    """Return this rank's out and gradients, as `mesh_problems.run_problem` does; out alone if latents travel."""
    mesh = named_mesh(problem.shape, problem.axes)
    q, k, v, dout, *sinks = problem.whole()
    queries, keys = shard_positions(problem, mesh)
    shards = [x[:, :, positions].cuda() for x, positions in ((q, queries), (k, keys), (v, keys))]
    sink = sinks[0].cuda() if sinks else None
    whole = problem.selected
    selected = None if whole is None else am.Selection(whole.indices[:, :, queries].cuda(), whole.block)
    if problem.latent:
        return [_attend_latents(problem, mesh, [*shards, sink], keys, checked, selected)]
    said = dict(zip(("length", "key_length"), problem.lengths, strict=True)) if problem.say_length else {}
    context = Context()

    def recorded(*arguments: Any) -> Any:
        found = mesh_op(*arguments)
        operators._save_for_backward(context, arguments, found)
        return found

    mesh_op = operators.mesh_op
    with torch.no_grad(), patch.object(sys.modules[attend_shards.__module__], "mesh_op", recorded):
        out = am.attention(
            *shards,
            mesh=mesh,
            mask=problem.mask,
            layout=problem.layouts[0],
            key_layout=problem.layouts[1],
            exchange=problem.exchange,
            scale=problem.scale,
            softcap=problem.softcap,
            key_lengths=problem.key_lengths,
            sinks=sink,
            kernel=kernel,
            checked=checked,
            selected=selected,
            **said,
        )
    with torch.no_grad():
        gradients = operators._gradients(context, [dout[:, :, queries].cuda()])[:4]
    return [x.cpu() for x in (out, *gradients) if x is not None]


class Ranks:
    """Worlds of emulated GPUs, in place of the pool of ranks."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return every rank's result."""
        return world(size, run_without_gpu, function, *arguments, backend=self.backend).results()


@on_each_rank
def run_without_gpu(gpu: EmulatedGPU, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that does not ask for the GPU."""
    with torch.no_grad():
        return function(*arguments)


def _attend_latents(
    problem: MeshProblem,
    mesh: Any,
    shards: list[Any],
    keys: Tensor,
    checked: bool | None,
    selected: am.Selection | None,
) -> Tensor:
    """Return this rank's out where latents travel."""
    said = problem.lengths if problem.say_length else (None, None)
    options = problem.options(*said)
    rows, projection = problem.latents()
    moved = Projection(projection.keys.cuda(), projection.values.cuda())
    with torch.no_grad():
        arguments = AttentionArguments(*shards, None, options, selected)
        return attend_shards(arguments, RankMesh.of(mesh), checked, Latents(rows[:, :, keys].cuda(), moved)).cpu()
