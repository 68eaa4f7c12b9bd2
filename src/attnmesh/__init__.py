"""Exact attention across a mesh of devices."""

from typing import TYPE_CHECKING, Any

from attnmesh.cache.cache import KVCache as KVCache
from attnmesh.comm.failures import set_deadline as set_deadline
from attnmesh.core.layout import *
from attnmesh.core.mask import *
from attnmesh.core.partial import Partial as Partial
from attnmesh.core.selection import Selection as Selection
from attnmesh.cost.cluster import Cluster as Cluster
from attnmesh.decoding.decode_call import decode as decode
from attnmesh.decoding.rows import decode_rows as decode_rows
from attnmesh.kernels.local import attend as attend
from attnmesh.kernels.partials import energy as energy
from attnmesh.kernels.partials import merge as merge
from attnmesh.mesh.shapes import Shape as Shape
from attnmesh.mesh.shapes import mesh_shape as mesh_shape
from attnmesh.mesh_attention.attention import attention as attention
from attnmesh.mesh_attention.merge_across import merge_across as merge_across
from attnmesh.mesh_attention.sharding import shard as shard
from attnmesh.mesh_attention.sharding import unshard as unshard
from attnmesh.mesh_attention.top_k_across import top_k_across as top_k_across
from attnmesh.planner.plan import Plan as Plan
from attnmesh.planner.plan import plan as plan
from attnmesh.planner.recurrent import Recurrent as Recurrent
from attnmesh.planner.selected import Selected as Selected
from attnmesh.planner.workload import Workload as Workload
from attnmesh.recurrent.halo import halo as halo
from attnmesh.recurrent.scan import AffineMap as AffineMap
from attnmesh.recurrent.scan import scan_across as scan_across
from attnmesh.setup.init_mesh import init_mesh as init_mesh
from attnmesh.setup.init_mesh import split_mesh as split_mesh
from attnmesh.store.recover import recover as recover

if TYPE_CHECKING:
    from attnmesh.mesh_attention.context_parallel import ContextParallel as ContextParallel


def __getattr__(name: str) -> Any:
    """Return `ContextParallel`, whose base class takes a second to import."""
    if name != "ContextParallel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attnmesh.mesh_attention.context_parallel import ContextParallel

    return ContextParallel


__version__ = "0.2.0"
