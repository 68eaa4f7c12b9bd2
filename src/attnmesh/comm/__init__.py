"""Everything that crosses ranks. It supplies the methods of the planner's values that need a world."""

from attnmesh.comm import init_mesh, measure
from attnmesh.planner.cluster import measured
from attnmesh.planner.plan import mesh_of_plan

measured.supply(measure.measure)
mesh_of_plan.supply(init_mesh.init_plan_mesh)
