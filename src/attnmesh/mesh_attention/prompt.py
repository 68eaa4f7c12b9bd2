"""Attention of a prompt among its own tokens, whose keys stay where a cache wants them.

The tokens lie along a keys axis. There are two ways to attend them, with the same result from the same shards:

    keys axis      queries travel, and partials are merged
    queries axis   the same ranks count as a queries axis: keys travel, and each rank attends its own queries once

With grouped heads keys are fewer bytes than queries and partials, but gathered keys take memory on each rank.
"""

from itertools import product

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm.topology import agreed_cluster_and_tile
from attnmesh.core.partial import Partial
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.cost.exchange_cost import fastest_candidate
from attnmesh.mesh.axes import Axis, RankMesh
from attnmesh.mesh.schedule import EXCHANGE_MODES, Problem
from attnmesh.mesh.shapes import Shape
from attnmesh.mesh_attention.attention import attend_shards
from attnmesh.mesh_attention.attention_arguments import AttentionArguments
from attnmesh.mesh_attention.auto_choices import cost_inputs
from attnmesh.mesh_attention.latents import Latents, LatentWidths
from attnmesh.runtime.world import cached_per_world


def attend_prompt(
    arguments: AttentionArguments,
    device_mesh: DeviceMesh | None,
    checked: bool | None,
    latents: Latents | None = None,
    other_partial: Partial | None = None,
) -> Tensor:
    """Return attention of one rank's shards as `attend_shards` does, without gradients, in the way that takes least."""
    mesh = RankMesh.of(device_mesh)
    q, k, v = arguments.q, arguments.k, arguments.v
    options = arguments.options
    if mesh.keys.size > 1 and mesh.queries.size == 1 and arguments.selected is None:
        sizes = q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3]
        problem = options.problem(mesh, arguments.counts)
        widths = None if latents is None else latents.widths
        mesh, exchange = agreed_mesh_and_exchange(mesh, q.device, q.dtype, sizes, problem, widths, options.exchange)
        arguments = arguments._replace(options=options._replace(exchange=exchange))
    return attend_shards(arguments, mesh, checked, latents, other_partial)


@cached_per_world(1024)
def agreed_mesh_and_exchange(
    mesh: RankMesh,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    problem: Problem,
    latent_widths: LatentWidths | None,
    exchange: str,
) -> tuple[RankMesh, str]:
    """Return the fastest mesh and exchange: this mesh or `keys_as_queries` of it, and the given exchange, or any.

    Collective at its first call. The choice depends on values that are equal on all ranks.
    """
    if 0 in (problem.length, *sizes):
        return mesh, exchange
    cluster, tile = agreed_cluster_and_tile(mesh, device)
    layout, work = cost_inputs(dtype, sizes, problem, latent_widths, backward=False)
    names = EXCHANGE_MODES if exchange == "auto" else (exchange,)
    shapes = (mesh.shape, tile), (_shape_with_keys_as_queries(mesh.shape), _shape_with_keys_as_queries(tile))
    candidates = [CandidateMesh(*shape, layout, name) for shape, name in product(shapes, names)]
    fastest = fastest_candidate(candidates, work, cluster)
    return mesh if fastest.shape == mesh.shape else keys_as_queries(mesh), fastest.exchange_or_merge


def keys_as_queries(mesh: RankMesh) -> RankMesh:
    """Return a mesh of the same ranks and shards with its keys axis for a queries axis, which has one rank."""
    return RankMesh(mesh.heads, mesh.keys, Axis(), mesh.device_mesh)


def _shape_with_keys_as_queries(shape: Shape) -> Shape:
    return Shape(shape.heads, shape.keys, shape.queries)
