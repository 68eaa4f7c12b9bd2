"""The choice behind `layout="auto"`. It depends on the mask and the mesh alone, and is equal on all ranks."""

import math

import torch

from attnmesh.comm.topology import surroundings
from attnmesh.core.layout import Layout, Zigzag
from attnmesh.core.mask import Mask
from attnmesh.errors import LayoutError
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh.schedule import EXCHANGES
from attnmesh.planner.candidate import Candidate
from attnmesh.planner.cost import cost
from attnmesh.planner.plan import layouts_for
from attnmesh.planner.workload import Workload
from attnmesh.runtime.world import cached_per_world

KEY_HEADS, GROUP, WIDTH = 8, 4, 128
"""Heads of the model for which layouts are priced: key heads, query heads of each, and columns."""


def chosen_layout(layout: Layout | str, mask: Mask, mesh: Mesh) -> Layout:
    """Return the layout given, or for "auto" the one that takes least in training. All ranks of the mesh call it."""
    if not isinstance(layout, str):
        return layout
    if len(mask.ends) < 2 or mesh.shape.ranks == 1:
        return Zigzag()
    if torch.compiler.is_compiling():
        expected, fix = "a layout of documents in a compiled model", "pass layout=am.Packed(documents, shape)"
        raise LayoutError("layout", expected, '"auto"', fix)
    return _cheapest(mask, mesh)


@cached_per_world(256)
def _cheapest(mask: Mask, mesh: Mesh) -> Layout:
    """Return the layout with which the planner predicts the shortest training step, for a mask with documents."""
    cluster, tile = surroundings(mesh, torch.device(mesh.kind))
    kv_heads, dtype = math.lcm(KEY_HEADS, mesh.shape.heads), torch.bfloat16 if mesh.kind == "cuda" else torch.float32
    workload = Workload(GROUP * kv_heads, kv_heads, WIDTH, mask.ends[-1], dtype=dtype, mask=mask, phase="training")

    def seconds(layout: Layout) -> float:
        candidates = (Candidate(mesh.shape, tile, layout, name) for name in EXCHANGES)
        return min(cost(candidate, workload, cluster).seconds for candidate in candidates)

    with torch.device("cpu"), torch.inference_mode(False):
        return min(layouts_for(workload, mesh.shape), key=seconds)
