"""The choices behind `layout="auto"` and `exchange="auto"`. They depend on values that are equal on all ranks."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from attnmesh.comm.topology import agreed_cluster_and_tile
from attnmesh.core.layout import Contiguous, Layout, Packed, Split
from attnmesh.core.mask import Mask
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.cost.exchange_cost import LayerWork, attention_seconds, balanced_layouts, fastest_candidate
from attnmesh.errors import LayoutError
from attnmesh.mesh.axes import RankMesh
from attnmesh.mesh.schedule import EXCHANGE_MODES, ExchangeMode, Problem
from attnmesh.mesh.shard_marks import unpriced_layout
from attnmesh.mesh_attention.latents import LatentWidths
from attnmesh.runtime.world import cached_per_world

TYPICAL_HEADS = (32, 8, 128)
"""Query heads, key heads and columns for which layouts are priced.

`shard` knows no model, and has to choose the layout that `attention` chooses: so both take these.
"""


def agreed_layout(layout: Layout | str, mask: Mask, mesh: RankMesh) -> Layout:
    """Return the layout given, or for "auto" the one that takes least in training. Collective at its first call."""
    if (unpriced := unpriced_layout(layout, mask, mesh.ranks)) is not None:
        return unpriced
    if torch.compiler.is_compiling():
        expected, fix = "a layout of documents in a compiled model", "pass layout=am.Packed(documents, shape)"
        raise LayoutError("layout", expected, '"auto"', fix)
    return agreed_price("auto", mask, sum(mask.documents), mesh, TYPICAL_HEADS).layout


def check_auto(subject: str, layout: Layout | str | None, mask: Mask | None, ranks: int) -> None:
    """Raise for "auto" without a mask on several ranks: `shard` and `attention` could choose two different layouts."""
    if ranks > 1 and mask is None and isinstance(layout, str):
        fix = "pass the mask of the attention to shard, attention and unshard alike, as mask=am.Causal()"
        raise LayoutError(f"{subject} layout", 'mask= beside layout="auto"', "no mask", fix)


def _filled(layouts: Sequence[Layout], length: int, mesh: RankMesh) -> Sequence[Layout]:
    """Return the layouts with tokens on all ranks, as models of transformers need, or all if there are none."""
    ranks = mesh.ranks
    return [x for x in layouts if all(len(x.positions(length, ranks, shard)) for shard in range(ranks))] or layouts


class Price(NamedTuple):
    """Predicted seconds of attention, forward and backward, and the layout that takes them."""

    seconds: float
    layout: Layout


@cached_per_world(1024)
def agreed_price(layout: Layout | str, mask: Mask, length: int, mesh: RankMesh, heads: tuple[int, int, int]) -> Price:
    """Return the price of a layout on a mesh, or for "auto" that of the best. Collective at its first call.

    The bound is safe, as `collective_once` says.
    """
    cluster, tile = agreed_cluster_and_tile(mesh, torch.device(mesh.device_type))
    q_heads, kv_heads, width = heads
    kv_heads = math.lcm(kv_heads, mesh.shape.heads)
    q_heads = math.lcm(q_heads, kv_heads)
    dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
    work = LayerWork(q_heads, kv_heads, width, width, length=length, itemsize=dtype.itemsize, mask=mask)

    def seconds(layout: Layout) -> float:
        candidates = (CandidateMesh(mesh.shape, tile, layout, name) for name in EXCHANGE_MODES)
        return min(attention_seconds(candidate, work, cluster) for candidate in candidates)

    with torch.inference_mode(False):
        layouts = _filled(balanced_layouts(mask, mesh.shape), length, mesh) if isinstance(layout, str) else [layout]
        return min((Price(seconds(layout), layout) for layout in layouts), key=lambda price: price.seconds)


@cached_per_world(1024)
def agreed_mode(
    mesh: RankMesh,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    problem: Problem,
    latent_widths: LatentWidths | None,
) -> ExchangeMode:
    """Return the exchange that takes least. Collective at its first call. It depends on values equal on all ranks."""
    if 0 in (problem.length, problem.key_length, *sizes):
        return EXCHANGE_MODES["bulk"]
    cluster, tile = agreed_cluster_and_tile(mesh, device)
    layout, work = cost_inputs(dtype, sizes, problem, latent_widths, backward=latent_widths is None)
    candidates = [CandidateMesh(problem.shape, tile, layout, name) for name in EXCHANGE_MODES]
    return EXCHANGE_MODES[fastest_candidate(candidates, work, cluster).exchange_or_merge]


def cost_inputs(
    dtype: torch.dtype, sizes: tuple[int, ...], problem: Problem, latent_widths: LatentWidths | None, *, backward: bool
) -> tuple[Layout, LayerWork]:
    """Return the layout and the work that stand for a problem in prices."""
    batch, *heads_and_widths = sizes
    cross = problem.key_length != problem.length  # priced as if every query saw every key
    work = LayerWork(
        *heads_and_widths,
        length=max(problem.length, problem.key_length),
        itemsize=dtype.itemsize,
        mask=Mask() if cross else problem.mask,
        batch=batch,
        backward=backward,
        latent=latent_widths,
    )
    # These layouts have sizes, which may add up to the queries alone and not to the length that is priced.
    cut = isinstance(problem.layout, Split) or (cross and isinstance(problem.layout, Packed))
    return Contiguous() if cut else problem.layout, work
