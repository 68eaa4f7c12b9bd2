"""Worlds, meshes and measured constants, made once before any call.

It binds `Cluster.measure`, which needs a world.
"""

from attnmesh.cost.cluster import measured
from attnmesh.setup import measure

measured.bind(measure.measure)
