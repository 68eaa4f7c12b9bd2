"""Exact attention across a mesh of devices."""

from attnmesh.across import merge_across as merge_across
from attnmesh.attention import attention as attention
from attnmesh.cache import KVCache as KVCache
from attnmesh.cluster import Cluster as Cluster
from attnmesh.decode import decode as decode
from attnmesh.energy import energy as energy
from attnmesh.faults import set_deadline as set_deadline
from attnmesh.kernel.attend import attend as attend
from attnmesh.layout import Contiguous as Contiguous
from attnmesh.layout import Striped as Striped
from attnmesh.layout import Zigzag as Zigzag
from attnmesh.making import init_mesh as init_mesh
from attnmesh.mask import Causal as Causal
from attnmesh.mask import Documents as Documents
from attnmesh.mask import Full as Full
from attnmesh.mask import Mask as Mask
from attnmesh.mask import Window as Window
from attnmesh.mesh import Shape as Shape
from attnmesh.mesh import mesh_shape as mesh_shape
from attnmesh.partial import Partial as Partial
from attnmesh.partial import merge as merge
from attnmesh.plan import Plan as Plan
from attnmesh.plan import plan as plan
from attnmesh.recover import recover as recover
from attnmesh.shards import shard as shard
from attnmesh.shards import unshard as unshard
from attnmesh.workload import Workload as Workload

__version__ = "0.1.0"
