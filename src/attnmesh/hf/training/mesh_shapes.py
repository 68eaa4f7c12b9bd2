"""The shape of the mesh for each batch: the documents of one batch are short, and those of another are long."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from attnmesh.attention.auto_layout import chosen_layout, price
from attnmesh.core.layout import Layout
from attnmesh.core.mask import Causal
from attnmesh.errors import ArgumentError, KernelError, MeshError, require, short
from attnmesh.hf.models import is_recurrent
from attnmesh.hf.training.batch import AgreedBatch
from attnmesh.mesh.axes import Mesh
from attnmesh.mesh.shapes import mesh_shapes
from attnmesh.setup.init_mesh import split_mesh

MOST = 4
"""Shapes that are set up: those that send least under a full mask."""


def check_shape(shape: object, mesh: DeviceMesh | None) -> None:
    """Raise unless `shape` is None, or "auto" beside a mesh of one axis."""
    fix = 'pass shape="auto", or a mesh of that shape'
    require(shape in (None, "auto"), ArgumentError, "on_mesh shape", 'None or "auto"', short(shape), fix)
    axes = 1 if shape is None or mesh is None else mesh.ndim
    fix = 'slice one axis, as mesh["cp"]'
    require(axes == 1, MeshError, "on_mesh mesh", 'a mesh of one axis beside shape="auto"', f"{axes} axes", fix)


class MeshShapes:
    """The mesh given, or meshes of several shapes over its ranks, of which each batch takes the cheapest."""

    def __init__(self, mesh: DeviceMesh | None, shape: str | None) -> None:
        self.mesh, self.shape = mesh, shape
        self.meshes: list[DeviceMesh] = []
        self.heads = (0, 0, 0)

    def set_up(self, config: Any) -> None:
        """Make the meshes for a model, once. All ranks of the world call it together."""
        if self.shape is None or self.mesh is None or self.meshes:
            return
        fits, fix = not is_recurrent(config), "leave shape out"
        require(fits, KernelError, "on_mesh shape", "a model without recurrent layers", config.model_type, fix)
        text = config.get_text_config()
        q_heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or q_heads
        self.heads = q_heads, kv_heads, getattr(text, "head_dim", None) or text.hidden_size // q_heads
        shapes = mesh_shapes(self.mesh.size(), q_heads, kv_heads)[:MOST]
        self.meshes = [split_mesh(self.mesh, shape) for shape in shapes]

    def choose(self, batch: AgreedBatch, layout: Layout | str) -> tuple[DeviceMesh | None, Layout]:
        """Return the mesh and the layout with which the planner predicts the shortest step."""
        mask, length = Causal() & batch.documents, batch.positions.shape[1]
        if not self.meshes:
            return self.mesh, chosen_layout(layout, mask, Mesh.of(self.mesh))
        prices = [price(layout, mask, length, Mesh.of(mesh), self.heads) for mesh in self.meshes]
        best = min(range(len(prices)), key=lambda index: prices[index].seconds)
        return self.meshes[best], prices[best].layout
