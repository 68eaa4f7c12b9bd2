"""Worlds, meshes and measured constants, made once before any call.

It supplies the methods of the planner's values that need a world.
"""

from attnmesh.planner.cluster import measured
from attnmesh.planner.plan import mesh_of_plan
from attnmesh.setup import init_mesh, measure

measured.supply(measure.measure)
mesh_of_plan.supply(init_mesh.init_plan_mesh)
