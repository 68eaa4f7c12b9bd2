"""Random mesh problems on emulated GPUs. Autograd does not run on emulated tensors, so operators are undone by hand."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.attention import operator
from attnmesh.attention.attention import attend_shards
from attnmesh.attention.call import Call, Options
from attnmesh.attention.latent import Latents, Projection
from attnmesh.mesh.axes import Mesh
from tests.support.emulated_gpu import EmulatedGPU
from tests.support.mesh_problems import MeshProblem, named_mesh, shard_positions


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


class Tape:
    """The calls of the operators of attention on a mesh, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Context]] = []

    def recorded(self, name: str, call: Any, save: Any) -> Any:
        """Return an operator that records its calls."""

        def run(*arguments: Any) -> Any:
            out, context = call(*arguments), Context()
            save(context, arguments, out)
            self.calls.append((name, context))
            return out

        return run

    def gradients(self, dout: Tensor) -> list[Tensor | None]:
        """Return the gradients of q, k and v, and of this rank's sinks."""
        gradients: list[Any] = [dout]
        dsinks = None
        for name, context in reversed(self.calls):
            if name == "swap":
                gradients = list(ulysses._gradient(context, gradients)[0] or ())
            else:
                *gradients, dsinks = operator._gradients(context, gradients[0], gradients[0])[:4]
        return [*gradients, dsinks]


def run(gpu: EmulatedGPU, problem: MeshProblem, kernel: str, checked: bool | None) -> list[Tensor]:
    """Return this rank's out and gradients, as `mesh_problems.run` does; out alone if latents travel."""
    mesh, tape = named_mesh(problem.shape, problem.axes), Tape()
    q, k, v, dout, *sinks = problem.whole()
    queries, keys = shard_positions(problem, mesh)
    shards = [x[:, :, places].cuda() for x, places in ((q, queries), (k, keys), (v, keys))]
    sink = sinks[0].cuda() if sinks else None
    if problem.latent:
        return [_attend_latents(problem, mesh, shards, sink, keys, checked)]
    said = dict(zip(("length", "key_length"), problem.lengths, strict=True)) if problem.say_length else {}
    mesh_op = tape.recorded("mesh", operator.mesh_op, operator._save_for_backward)
    swap_op = tape.recorded("swap", ulysses.swap_op, ulysses._save_for_backward)
    recording = patch.object(operator, "mesh_op", mesh_op), patch.object(ulysses, "swap_op", swap_op)
    with torch.no_grad(), recording[0], recording[1]:
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
            **said,
        )
    with torch.no_grad():
        *gradients, dsinks = tape.gradients(dout[:, :, queries].cuda())
    found = [x.cpu() for x in (out, *gradients) if x is not None]
    if dsinks is not None:  # those of this rank's heads
        whole = torch.zeros(problem.heads[0], dtype=dsinks.dtype)
        heads = Mesh.of(mesh).heads
        whole.chunk(heads.size)[heads.index].copy_(dsinks.cpu())
        found.append(whole)
    return found


def _attend_latents(
    problem: MeshProblem, mesh: Any, shards: list[Tensor], sink: Tensor | None, keys: Tensor, checked: bool | None
) -> Tensor:
    """Return this rank's out where latents travel."""
    said = problem.lengths if problem.say_length else (None, None)
    options = Options(
        problem.mask, *problem.layouts, problem.exchange, "auto", problem.scale, problem.softcap, *said, None
    )
    tokens, projection = problem.latents()
    moved = Projection(projection.keys.cuda(), projection.values.cuda())
    with torch.no_grad():
        call = Call(*shards, sink, None, options)
        return attend_shards(call, Mesh.of(mesh), checked, Latents(tokens[:, :, keys].cuda(), moved)).cpu()
